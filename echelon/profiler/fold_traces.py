"""Two traces of the same step as amounts per sample, with what repeats folded. Pure arithmetic over traces."""

from __future__ import annotations

from collections.abc import Iterable

from echelon.plan.profile import Amount, MemorySnapshot, ModuleProfile, Operator, fold_path
from echelon.trials.op_recorder import ModuleTotals, OpCall, StepTrace

#: Micro-batches and shares of the gradients at which a moment may be the peak; a moment that never is, is dropped.
_MICRO_BATCH_SIZES = tuple(2**k for k in range(17))
_GRADIENT_SHARES = (0.0, 0.25, 0.5, 1.0)


class BatchSizeFit:
    """Turns the figures of two batch sizes into a fixed part and a part per sample."""

    def __init__(self, small_trace: StepTrace, large_trace: StepTrace) -> None:
        self.small_samples, self.large_samples = small_trace.num_samples, large_trace.num_samples
        # Where operators differ between sizes there is no telling the fixed part: all of it counts per sample.
        self.is_aligned = [(op_call.name, op_call.path) for op_call in small_trace.calls] == [
            (op_call.name, op_call.path) for op_call in large_trace.calls
        ]

    def fit_amount(self, small: float, large: float) -> Amount:
        if not self.is_aligned:
            return Amount(0.0, large / self.large_samples)
        slope = (large - small) / (self.large_samples - self.small_samples)
        fixed = small - slope * self.small_samples
        return Amount(0.0 if abs(fixed) < 1e-6 * max(large, 1.0) else fixed, slope)


def _pair_op_calls(
    small_trace: StepTrace, large_trace: StepTrace, fit: BatchSizeFit
) -> Iterable[tuple[OpCall, OpCall]]:
    return zip(small_trace.calls if fit.is_aligned else large_trace.calls, large_trace.calls, strict=True)


def fold_operators(small_trace: StepTrace, large_trace: StepTrace) -> tuple[Operator, ...]:
    """The operators of a step, alike ones counted."""
    fit = BatchSizeFit(small_trace, large_trace)
    counts: dict[Operator, int] = {}
    for small, large in _pair_op_calls(small_trace, large_trace, fit):
        operator = Operator(
            name=large.name,
            kind=large.kind,  # type: ignore[arg-type]
            phase=large.phase,
            module=fold_path(large.path),
            dtype=large.dtype,
            dims=tuple(
                fit.fit_amount(small_dim, large_dim)
                for small_dim, large_dim in zip(small.dims, large.dims, strict=True)
            ),
            flops=fit.fit_amount(small.flops, large.flops),
            moved=fit.fit_amount(small.moved_bytes, large.moved_bytes),
        )
        counts[operator] = counts.get(operator, 0) + 1
    return tuple(
        Operator(
            **{name: getattr(counted_operator, name) for name in Operator.__dataclass_fields__ if name != "count"},
            count=count,
        )
        for counted_operator, count in counts.items()
    )


def fold_modules(
    small_trace: StepTrace, large_trace: StepTrace, tree: dict[str, tuple[str, int]]
) -> tuple[ModuleProfile, ...]:
    """The modules that ran, in the model's order. Modules of one folded path that are not alike keep their own paths."""
    fit = BatchSizeFit(small_trace, large_trace)
    modules_by_path: dict[str, ModuleProfile] = {}
    for path, (class_name, parameter_bytes) in tree.items():
        small, large = small_trace.module_totals.get(path), large_trace.module_totals.get(path)
        if large is None:
            continue
        small = small or ModuleTotals()
        modules_by_path[path] = ModuleProfile(
            path=path,
            kind=class_name,
            parameters=parameter_bytes,
            flops=fit.fit_amount(small.flops, large.flops),
            moved=fit.fit_amount(small.moved_bytes, large.moved_bytes),
            saved=fit.fit_amount(small.saved_bytes, large.saved_bytes),
            output=fit.fit_amount(small.output_bytes, large.output_bytes),
        )
    modules_by_folded_path: dict[str, list[ModuleProfile]] = {}
    for path, module in modules_by_path.items():
        modules_by_folded_path.setdefault(fold_path(path), []).append(module)
    folded = []
    for path, members in modules_by_folded_path.items():
        if len({_without_path(member) for member in members}) == 1:
            folded.append(_with_path(members[0], path if len(members) > 1 else members[0].path, len(members)))
        else:
            folded.extend(members)
    return tuple(folded)


def find_peak_moments(small_trace: StepTrace, large_trace: StepTrace) -> tuple[MemorySnapshot, ...]:
    """The moments that are the peak of memory for some micro-batch, in the order of the step."""
    fit = BatchSizeFit(small_trace, large_trace)
    moments: dict[MemorySnapshot, None] = {}
    for small, large in _pair_op_calls(small_trace, large_trace, fit):
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
    peak_moments = set()
    for samples in _MICRO_BATCH_SIZES:
        peak_moments.add(max(moments, key=lambda candidate: candidate.saved.at(samples)))
        # Convolutions may take a workspace as large as what they move.
        peak_moments.add(
            max(
                moments,
                key=lambda candidate: (
                    candidate.alive.at(samples) + ("conv" in candidate.operator) * candidate.moved.at(samples)
                ),
            )
        )
        for share in _GRADIENT_SHARES:
            peak_moments.add(
                max(moments, key=lambda candidate: candidate.alive.at(samples) + share * candidate.gradients)
            )
    return tuple(moment for moment in moments if moment in peak_moments)


def _without_path(module: ModuleProfile) -> ModuleProfile:
    return _with_path(module, "", 1)


def _with_path(module: ModuleProfile, path: str, count: int) -> ModuleProfile:
    values = {name: getattr(module, name) for name in ModuleProfile.__dataclass_fields__}
    return ModuleProfile(**(values | {"path": path, "count": count}))
