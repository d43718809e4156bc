"""A profile as a cluster's forecast needs it: one repeated block, what comes before the blocks, and what comes after them.

Where a plan leaves open how tp cuts the model the ideal rule holds: products in blocks and of the vocabulary are divided, and so is all
that lies beside them in modules that hold products; norms, dropouts and residuals are whole, or divided along the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from echelon.plan.profile import WIDTH, Operator, Phase, Profile, fold_path
from echelon.simulator.again import own_kept
from echelon.simulator.shares import inside

#: Products of weights; other products (written-out attention) are of activations alone.
_WEIGHTS = ("mm", "addmm", "_int_mm")
#: Samples at which an amount per sample is read.
_MANY = 1 << 20


@dataclass(frozen=True, slots=True)
class Op:
    """Operators that are alike, as one block (or the part outside of blocks) runs them."""

    kind: Literal["product", "inner", "attention", "convolution", "stream"]
    phase: Phase
    dtype: str
    count: float
    dims: tuple[tuple[float, float], ...]  #: (fixed, per sample)
    flops: tuple[float, float]
    moved: tuple[float, float]
    core: bool  #: part of attention between its projections
    cut: bool  #: divided by tp


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes per sample that one block, or what is outside of blocks, keeps for backward."""

    cut: float = 0.0  #: of what tp divides
    whole: float = 0.0
    core: float = 0.0  #: of attention between its projections; part of `cut`
    products: float = 0.0  #: outputs of products and attention; tp divides about all of them


@dataclass(frozen=True, slots=True)
class Work:
    """The model. Figures of `block` are of one; `before` and `after` are what a pipeline's first and last rank do besides."""

    layers: int
    before: tuple[Op, ...]
    block: tuple[Op, ...]
    after: tuple[Op, ...]
    elements: tuple[float, float, float]  #: parameters before the blocks, in one block, after them
    tied: float  #: of those before, what is used after the blocks too
    width: int  #: bytes of one parameter as traced
    kept: Kept
    outside: tuple[float, float]  #: bytes per sample kept before and after the blocks
    given: float  #: bytes per sample that one block passes to the next
    loss: float  #: bytes per sample alive at the loss beside what is kept anywhere
    logits: float  #: bytes per sample of the largest output behind the blocks
    working: float  #: bytes per sample that the largest operator of a block reads and writes: alive while it runs
    inputs: float  #: bytes per sample that come from the data
    experts: float = 0.0  #: of one block's parameters, those of experts: ep divides them
    routed: float = 0.0  #: bytes per sample that go to one block's experts, and come back
    #: Of each place where a stage may begin, whether it is a block; empty: not known.
    visits: tuple[bool, ...] = ()

    @property
    def scores(self) -> float:
        """Bytes per sample that one block keeps of written-out attention. What its projections gave, about three times what the block
        gives, is kept by any attention."""
        written = any(op.kind == "inner" for op in self.block)
        return max(self.kept.core - 3 * self.given, 0.0) if written else 0.0


def distil(profile: Profile) -> Work:
    """The work of a profile. A model without repeated blocks is one block."""
    units = tuple(dict.fromkeys(map(fold_path, profile.units)))
    layers = max(len(profile.units), 1)
    late = _after(profile, units)
    core = {each.module for each in profile.operators if _kind(each) in ("inner", "attention")}
    holders = _holders(profile, units)
    parts: dict[str, list[Op]] = {"before": [], "block": [], "after": []}
    for each in profile.operators:
        where = _where(each.module, units, late)
        count = each.count / layers if where == "block" else float(each.count)
        kind = _kind(each)
        cut = where == "after" or (where == "block" and (kind != "stream" or _within(each.module, holders)))
        parts[where].append(
            Op(
                kind,
                each.phase,
                each.dtype,
                count,
                tuple((dim.fixed, dim.per_sample) for dim in each.dims),
                (each.flops.fixed, each.flops.per_sample),
                (each.moved.fixed, each.moved.per_sample),
                each.module in core and each.module not in units,
                cut,
            )
        )
    elements = {"before": 0.0, "block": 0.0, "after": 0.0}
    tied = 0.0
    for parameter in profile.parameters:
        where = _where(fold_path(parameter.name), units, late)
        elements[where] += parameter.elements
        if where == "before" and any(_where(fold_path(name), units, late) == "after" for name in parameter.aliases):
            tied += parameter.elements
    expert = _experts(profile, units)
    own = {path: size / _MANY for path, size in own_kept(profile, _MANY).items()}
    blocks = sum(size for path, size in own.items() if _where(path, units, late) == "block")
    kept = Kept(
        cut=sum(s for p, s in own.items() if _where(p, units, late) == "block" and _within(p, holders)) / layers,
        whole=sum(s for p, s in own.items() if _where(p, units, late) == "block" and not _within(p, holders)) / layers,
        core=sum(s for p, s in own.items() if p in core and _where(p, units, late) == "block") / layers,
        products=sum(_output(each) for each in parts["block"] if each.phase == "forward"),
    )
    before = sum(size for path, size in own.items() if _where(path, units, late) == "before")
    after = sum(size for path, size in own.items() if _where(path, units, late) == "after")
    peak = max(moment.alive.per_sample for moment in profile.moments)
    modules = [module for module in profile.modules if fold_path(module.path) in units]
    given = max((module.output.per_sample for module in modules), default=0.0)
    return Work(
        layers=layers,
        before=merged(parts["before"]),
        block=merged(parts["block"]),
        after=merged(parts["after"]),
        elements=(elements["before"], elements["block"] / layers, elements["after"]),
        tied=tied,
        width=WIDTH.get(profile.parameters[0].dtype, 4) if profile.parameters else 4,
        kept=kept,
        outside=(before, after),
        given=given,
        loss=max(peak - blocks - before, after),
        logits=max(
            (
                m.output.per_sample
                for m in profile.modules
                if m.path and _where(fold_path(m.path), units, late) == "after"
            ),
            default=0.0,
        ),
        working=max((op.moved[1] for op in parts["block"]), default=0.0),
        inputs=float(profile.input_bytes),
        experts=sum(each.elements for each in profile.parameters if _within(fold_path(each.name), expert)) / layers,
        routed=given * _choices(profile, units, expert) if expert else 0.0,
        visits=tuple(fold_path(visit.path) in units for visit in profile.visits),
    )


def _experts(profile: Profile, units: tuple[str, ...]) -> frozenset[str]:
    """Modules within blocks that stand side by side in a list and have parameters of the same shapes: experts."""
    shapes: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = {}
    for parameter in profile.parameters:
        folded = fold_path(parameter.name)
        unit = next((each for each in units if inside(folded, each)), None)
        steps, names = folded.split("."), parameter.name.split(".")
        places = [at for at, step in enumerate(steps[:-1]) if step == "*" and unit and at >= len(unit.split("."))]
        if places:
            at = places[0] + 1
            member = shapes.setdefault(".".join(names[: at - 1]), {}).setdefault(names[at - 1], [])
            member.append((".".join(names[at:]), tuple(parameter.shape)))
    found = set()
    for path, members in shapes.items():
        if len(members) > 1 and len({tuple(sorted(each)) for each in members.values()}) == 1:
            found.add(fold_path(f"{path}.0"))
    return frozenset(found)


def _choices(profile: Profile, units: tuple[str, ...], experts: frozenset[str]) -> float:
    """To how many experts a token goes: rows that all experts of a block compute over those that others compute; 1 where that is not told."""
    rows: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for each in profile.operators:
        if each.phase == "forward" and _kind(each) == "product" and any(inside(each.module, unit) for unit in units):
            of = rows[_within(each.module, experts)]
            of[each.module] = of.get(each.module, 0.0) + each.count * each.dims[1].per_sample / max(
                len(profile.units), 1
            )
    theirs, others = (max(of.values(), default=0.0) for of in (rows[True], rows[False]))
    return theirs / others if theirs and others else 1.0


def merged(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Element-wise operators put together: they are priced by their bytes and their number, whatever each moves."""
    streams: dict[tuple[str, bool, bool], list[Op]] = {}
    for op in ops:
        if op.kind == "stream":
            streams.setdefault((op.phase, op.core, op.cut), []).append(op)
    made = []
    for alike in streams.values():
        count = sum(op.count for op in alike)
        fixed, per = (sum(op.count * op.moved[place] for op in alike) / count for place in (0, 1))
        made.append(replace(alike[0], count=count, moved=(fixed, per)))
    return (*(op for op in ops if op.kind != "stream"), *made)


def _kind(operator: Operator) -> Literal["product", "inner", "attention", "convolution", "stream"]:
    if operator.kind == "matmul":
        return "product" if operator.name.partition(":")[0] in _WEIGHTS else "inner"
    return operator.kind


def _output(op: Op) -> float:
    """Bytes per sample that a product or an attention of a block gives, all its calls together."""
    width = WIDTH.get(op.dtype, 4)
    if op.kind == "product":
        (_, rows), (columns, _) = op.dims[1], op.dims[2]
        return op.count * rows * columns * width
    if op.kind == "attention":
        (_, lots), (queries, _), _, (size, _) = op.dims
        return op.count * lots * queries * size * width
    return 0.0


def _where(path: str, units: tuple[str, ...], late: frozenset[str]) -> Literal["before", "block", "after"]:
    if not units or any(inside(path, unit) for unit in units):
        return "block"
    return "after" if not path or any(inside(path, module) for module in late if module) else "before"


def _after(profile: Profile, units: tuple[str, ...]) -> frozenset[str]:
    """Modules outside of blocks that first run behind them: the last norm, the head."""
    reached, late, early = False, [], set()
    for operator in profile.operators:
        if operator.phase == "backward":
            break
        if any(inside(operator.module, unit) for unit in units):
            reached = True
        elif reached and operator.module not in early:
            late.append(operator.module)
        else:
            early.add(operator.module)
    return frozenset(late)


def _holders(profile: Profile, units: tuple[str, ...]) -> frozenset[str]:
    """Modules within blocks (the blocks themselves aside) that hold products: tp divides what they do."""
    found = set()
    for operator in profile.operators:
        if operator.kind == "stream":
            continue
        path = operator.module
        while path and path not in units and any(inside(path, unit) for unit in units):
            found.add(path)
            path = path.rpartition(".")[0]
    return frozenset(found)


def _within(path: str, holders: Iterable[str]) -> bool:
    return any(inside(path, holder) for holder in holders)
