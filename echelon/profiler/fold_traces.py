"""Two traces of the same step as amounts per sample, with what repeats folded. Pure arithmetic over traces."""

from __future__ import annotations

from collections.abc import Iterable

from echelon.plan.profile import Amount, Module, Moment, Operator, fold_path
from echelon.trials.op_recorder import Call, Figures, Trace

#: Micro-batches and shares of the gradients at which a moment may be the peak; a moment that never is, is dropped.
_SIZES = tuple(2**k for k in range(17))
_SHARES = (0.0, 0.25, 0.5, 1.0)


class Line:
    """Turns the figures of two batch sizes into a fixed part and a part per sample."""

    def __init__(self, first: Trace, second: Trace) -> None:
        self.a, self.b = first.samples, second.samples
        # Where operators differ between sizes there is no telling the fixed part: all of it counts per sample.
        self.aligned = [(c.name, c.path) for c in first.calls] == [(c.name, c.path) for c in second.calls]

    def amount(self, small: float, large: float) -> Amount:
        if not self.aligned:
            return Amount(0.0, large / self.b)
        slope = (large - small) / (self.b - self.a)
        fixed = small - slope * self.a
        return Amount(0.0 if abs(fixed) < 1e-6 * max(large, 1.0) else fixed, slope)


def _pairs(first: Trace, second: Trace, line: Line) -> Iterable[tuple[Call, Call]]:
    return zip(first.calls if line.aligned else second.calls, second.calls, strict=True)


def fold_operators(first: Trace, second: Trace) -> tuple[Operator, ...]:
    """The operators of a step, alike ones counted."""
    line = Line(first, second)
    counts: dict[Operator, int] = {}
    for small, large in _pairs(first, second, line):
        operator = Operator(
            name=large.name,
            kind=large.kind,  # type: ignore[arg-type]
            phase=large.phase,
            module=fold_path(large.path),
            dtype=large.dtype,
            dims=tuple(line.amount(a, b) for a, b in zip(small.dims, large.dims, strict=True)),
            flops=line.amount(small.flops, large.flops),
            moved=line.amount(small.moved, large.moved),
        )
        counts[operator] = counts.get(operator, 0) + 1
    return tuple(
        Operator(**{name: getattr(o, name) for name in Operator.__dataclass_fields__ if name != "count"}, count=count)
        for o, count in counts.items()
    )


def fold_modules(first: Trace, second: Trace, tree: dict[str, tuple[str, int]]) -> tuple[Module, ...]:
    """The modules that ran, in the model's order. Modules of one folded path that are not alike keep their own paths."""
    line = Line(first, second)
    single: dict[str, Module] = {}
    for path, (kind, size) in tree.items():
        small, large = first.modules.get(path), second.modules.get(path)
        if large is None:
            continue
        small = small or Figures()
        single[path] = Module(
            path=path,
            kind=kind,
            parameters=size,
            flops=line.amount(small.flops, large.flops),
            moved=line.amount(small.moved, large.moved),
            kept=line.amount(small.kept, large.kept),
            output=line.amount(small.output, large.output),
        )
    families: dict[str, list[Module]] = {}
    for path, module in single.items():
        families.setdefault(fold_path(path), []).append(module)
    folded = []
    for path, members in families.items():
        if len({_without_path(member) for member in members}) == 1:
            folded.append(_renamed(members[0], path if len(members) > 1 else members[0].path, len(members)))
        else:
            folded.extend(members)
    return tuple(folded)


def peaks(first: Trace, second: Trace) -> tuple[Moment, ...]:
    """The moments that are the peak of memory for some micro-batch, in the order of the step."""
    line = Line(first, second)
    moments: dict[Moment, None] = {}
    for small, large in _pairs(first, second, line):
        moment = Moment(
            where=f"{fold_path(large.path) or 'loss'} {large.name}",
            phase=large.phase,
            alive=line.amount(small.alive, large.alive),
            kept=line.amount(small.kept, large.kept),
            gradients=large.gradients,
            blocks=large.blocks,
            operator=large.name,
            moved=line.amount(small.moved, large.moved),
        )
        moments.setdefault(moment)
    best = set()
    for size in _SIZES:
        best.add(max(moments, key=lambda m: m.kept.at(size)))
        # Convolutions may take a workspace as large as what they move.
        best.add(max(moments, key=lambda m: m.alive.at(size) + ("conv" in m.operator) * m.moved.at(size)))
        for share in _SHARES:
            best.add(max(moments, key=lambda m: m.alive.at(size) + share * m.gradients))
    return tuple(moment for moment in moments if moment in best)


def _without_path(module: Module) -> Module:
    return _renamed(module, "", 1)


def _renamed(module: Module, path: str, count: int) -> Module:
    values = {name: getattr(module, name) for name in Module.__dataclass_fields__}
    return Module(**(values | {"path": path, "count": count}))
