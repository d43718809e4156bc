"""Combine the traces of a step at two batch sizes into amounts per sample, with repeated operators and modules folded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from echelon.plan.profile import Amount, MemorySnapshot, ModuleProfile, Operator, fold_path
from echelon.trials.op_recorder import ModuleTotals, StepTrace

#: Micro-batches and fractions of the gradients for which peaks of memory are kept.
_MICRO_BATCH_SIZES = tuple(2**k for k in range(17))
_GRADIENT_SHARES = (0.0, 0.25, 0.5, 1.0)


class BatchSizeFit:
    """Fits a fixed part and a part per sample to the figures at two batch sizes."""

    def __init__(self, small_trace: StepTrace, large_trace: StepTrace) -> None:
        self.small_samples, self.large_samples = small_trace.num_samples, large_trace.num_samples
        small_ops, large_ops = ([(call.name, call.path) for call in t.calls] for t in (small_trace, large_trace))
        # If operators differ between sizes, the fixed part is unknown: all of it counts per sample.
        self.is_aligned = small_ops == large_ops
        small_calls = small_trace.calls if self.is_aligned else large_trace.calls
        self.call_pairs = list(zip(small_calls, large_trace.calls, strict=True))

    def fit_amount(self, small: float, large: float) -> Amount:
        if not self.is_aligned:
            return Amount(0.0, large / self.large_samples)
        slope = (large - small) / (self.large_samples - self.small_samples)
        fixed = small - slope * self.small_samples
        return Amount(0.0 if abs(fixed) < 1e-6 * max(large, 1.0) else fixed, slope)


def fold_operators(small_trace: StepTrace, large_trace: StepTrace) -> tuple[Operator, ...]:
    """The operators of a step, equal ones counted."""
    fit = BatchSizeFit(small_trace, large_trace)
    counts: Counter[Operator] = Counter()
    for small, large in fit.call_pairs:
        operator = Operator(
            name=large.name,
            kind=large.kind,  # type: ignore[arg-type]
            phase=large.phase,
            module=fold_path(large.path),
            dtype=large.dtype,
            dims=tuple(fit.fit_amount(*sizes) for sizes in zip(small.dims, large.dims, strict=True)),
            flops=fit.fit_amount(small.flops, large.flops),
            moved=fit.fit_amount(small.moved_bytes, large.moved_bytes),
        )
        counts[operator] += 1
    return tuple(replace(operator, count=count) for operator, count in counts.items())


def fold_modules(
    small_trace: StepTrace, large_trace: StepTrace, tree: dict[str, tuple[str, int]]
) -> tuple[ModuleProfile, ...]:
    """The modules that ran, in the model's order. Modules with one folded path that differ keep their own paths."""
    fit = BatchSizeFit(small_trace, large_trace)
    modules_by_folded_path: dict[str, list[ModuleProfile]] = {}
    for path, (class_name, parameter_bytes) in tree.items():
        large = large_trace.module_totals.get(path)
        small = small_trace.module_totals.get(path, ModuleTotals())
        if large is not None:
            module = ModuleProfile(
                path=path,
                kind=class_name,
                parameters=parameter_bytes,
                flops=fit.fit_amount(small.flops, large.flops),
                moved=fit.fit_amount(small.moved_bytes, large.moved_bytes),
                saved=fit.fit_amount(small.saved_bytes, large.saved_bytes),
                output=fit.fit_amount(small.output_bytes, large.output_bytes),
            )
            modules_by_folded_path.setdefault(fold_path(path), []).append(module)
    folded = []
    for path, modules in modules_by_folded_path.items():
        if len(modules) > 1 and len({replace(module, path="") for module in modules}) == 1:
            folded.append(replace(modules[0], path=path, count=len(modules)))
        else:
            folded += modules
    return tuple(folded)


def find_peak_moments(small_trace: StepTrace, large_trace: StepTrace) -> tuple[MemorySnapshot, ...]:
    """The moments at which memory peaks for some micro-batch, in the order of the step."""
    fit = BatchSizeFit(small_trace, large_trace)
    moments: dict[MemorySnapshot, None] = {}
    for small, large in fit.call_pairs:
        moment = MemorySnapshot(
            module=f"{fold_path(large.path) or 'loss'} {large.name}",
            phase=large.phase,
            alive=fit.fit_amount(small.alive_bytes, large.alive_bytes),
            saved=fit.fit_amount(small.saved_bytes, large.saved_bytes),
            gradients=large.gradient_bytes,
            blocks=large.large_storages,
            operator=large.name,
            moved=fit.fit_amount(small.moved_bytes, large.moved_bytes),
        )
        moments.setdefault(moment)
    peaks = set()
    for samples in _MICRO_BATCH_SIZES:
        # Convolutions may take a workspace as large as what they move.
        workspaces = {moment: ("conv" in moment.operator) * moment.moved.at(samples) for moment in moments}
        peaks.add(max(moments, key=lambda moment: moment.saved.at(samples)))
        peaks.add(max(moments, key=lambda moment: moment.alive.at(samples) + workspaces[moment]))
        for share in _GRADIENT_SHARES:
            peaks.add(max(moments, key=lambda moment: moment.alive.at(samples) + share * moment.gradients))
    return tuple(moment for moment in moments if moment in peaks)
