"""The work of a profile: its operators, parameters and what it keeps, put together by block.

Where a plan leaves open how tp cuts the model the ideal rule holds: products in blocks and of the vocabulary are divided, and so is all
that lies beside them in modules that hold products; norms, dropouts and residuals are whole, or divided along the sequence. A plan
that says how it cuts is taken at its word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from echelon.plan.mesh import Mesh
from echelon.plan.placement import cut_parameters
from echelon.plan.plan import Plan
from echelon.plan.profile import WIDTH, Operator, Parameter, Profile, fold_path
from echelon.simulator.model_summary import Kept, Op, Place, Work
from echelon.simulator.rank_shares import Shares, inside
from echelon.simulator.recomputation import output_bytes, own_kept
from echelon.simulator.whole_tensor_cost import trained_share

#: Products of weights; other products (written-out attention) are of activations alone.
_WEIGHTS = (
    "mm",
    "addmm",
    "_int_mm",
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
    "_cudnn_rnn",
    "_cudnn_rnn_backward",
)
#: Sums of tp per block and pass by the ideal rule: one behind attention, one behind the feed-forward part.
_SUMS = 2
_PARTS = ("before", "block", "after")
#: Samples at which an amount per sample is read.
_MANY = 1 << 20


def distil(profile: Profile, plan: Plan | None = None) -> Work:
    """The work of a profile. A model without repeated blocks is one block. `plan`: whose cuts hold, where it has some."""
    units = tuple(dict.fromkeys(map(fold_path, profile.units)))
    layers = max(len(profile.units), 1)
    late = _after(profile, units)
    cuts = _Cuts(profile, units, plan)
    experts = _experts(profile, units)
    core = {
        each.module for each in profile.operators if _kind(each) in ("inner", "attention") and not experts.compute(each)
    }
    parts: dict[str, list[Op]] = {name: [] for name in _PARTS}
    for each in profile.operators:
        where = _where(each.module, units, late)
        expert = where == "block" and experts.compute(each)
        kind = "product" if expert and _kind(each) == "inner" else _kind(each)
        parts[where].append(
            Op(
                kind=kind,
                phase=each.phase,
                dtype=each.dtype,
                count=each.count / layers if where == "block" else float(each.count),
                dims=tuple((dim.fixed, dim.per_sample) for dim in each.dims),
                flops=(each.flops.fixed, each.flops.per_sample),
                moved=(each.moved.fixed, each.moved.per_sample),
                core=each.module in core and each.module not in units,
                cut=cuts.work(each.module, where, kind),
                lies=each.name.partition(":")[2],
                expert=expert,
            )
        )
    elements, whole, tied = dict.fromkeys(_PARTS, 0.0), dict.fromkeys(_PARTS, 0.0), 0.0
    tensors = dict.fromkeys(_PARTS, 0.0)
    for parameter in profile.parameters:
        where = _where(fold_path(parameter.name), units, late)
        elements[where] += parameter.elements
        tensors[where] += 1
        whole[where] += parameter.elements * (not cuts.parameter(parameter))
        if where == "before" and any(_where(fold_path(name), units, late) == "after" for name in parameter.aliases):
            tied += parameter.elements
    own = {path: size / _MANY for path, size in own_kept(profile, _MANY).items()}
    inner = {path: size for path, size in own.items() if _where(path, units, late) == "block"}
    cut = sum(size for path, size in inner.items() if cuts.kept(path))
    before, after = (
        sum(size for path, size in own.items() if _where(path, units, late) == where) for where in ("before", "after")
    )
    peak = max(moment.alive.per_sample for moment in profile.moments)
    modules = [module for module in profile.modules if fold_path(module.path) in units]
    given = max((module.output.per_sample for module in modules), default=0.0)
    trained = sum(rule.elements for rule in profile.optimizers)
    return Work(
        layers=layers,
        before=merged(parts["before"]),
        block=merged(parts["block"]),
        after=merged(parts["after"]),
        elements=(elements["before"], elements["block"] / layers, elements["after"]),
        whole=(whole["before"], whole["block"] / layers, whole["after"]),
        tied=tied,
        width=WIDTH.get(profile.parameters[0].dtype, 4) if profile.parameters else 4,
        precision=profile.precision,
        state=profile.state_bytes / max(trained, 1),
        trained=min(trained / max(profile.elements, 1), 1.0),
        clip=profile.clip,
        across=tuple(
            (trained_share(profile, rule), rule.reads, rule.draws)
            for rule in profile.optimizers
            if rule.reads != "element" or rule.draws
        ),
        kept=Kept(
            cut=cut / layers,
            whole=(sum(inner.values()) - cut) / layers,
            core=sum(size for path, size in inner.items() if path in core) / layers,
            products=_given(profile, units) / layers,
        ),
        outside=(before, after),
        given=given,
        keys=_keys(profile, core, layers, given),
        loss=max(peak - sum(inner.values()) - before, after),
        parted=cuts.logits,
        sums=cuts.sums(layers),
        working=max((op.moved[1] for op in parts["block"]), default=0.0),
        inputs=float(profile.input_bytes),
        experts=sum(each.elements for each in profile.parameters if experts.hold(each)) / layers,
        number=experts.number,
        tensors=(tensors["before"], tensors["block"] / layers, tensors["after"]),
        routed=given * _choices(profile, units, experts) if experts.number else 0.0,
        places=_places(profile, layers),
    )


class _Cuts:
    """What tp divides: as a plan says, or by the ideal rule where no plan has cuts."""

    def __init__(self, profile: Profile, units: tuple[str, ...], plan: Plan | None) -> None:
        known = plan is not None and plan.mesh.tp > 1 and bool(plan.placements or plan.uncut)
        self._plan = plan if known else None
        self._shares = Shares(profile, replace(plan, mesh=Mesh(tp=plan.mesh.tp), stages=())) if plan and known else None
        self._names = cut_parameters(plan.placements) if plan and known else {}
        self._holders = _holders(profile, units)
        self._columns = _columns(profile, units)
        self._units = units

    def work(self, path: str, where: str, kind: str) -> bool:
        """Of what a module computes."""
        if self._shares:
            return self._shares.work(path, 0) < 1
        return where == "after" or (where == "block" and (kind != "stream" or _within(path, self._holders)))

    def kept(self, path: str) -> bool:
        """Of what a module of a block keeps: a column keeps its input, which is whole."""
        if self._shares:
            return self._shares.kept(path, 0) < 1
        return _within(path, self._holders) and path not in self._columns

    def parameter(self, parameter: Parameter) -> bool:
        """Of what is held."""
        return not self._shares or any(name in self._names for name in (parameter.name, *parameter.aliases))

    @property
    def logits(self) -> bool:
        """Whether the loss is computed on parts."""
        return self._plan is None or any(each.cut == "logits" for each in self._plan.placements)

    def sums(self, layers: int) -> float:
        """How often what a block gives, or about as much, is added up in one pass; to put parts together is half of that."""
        if self._plan is None:
            return float(_SUMS)
        inner = [
            each for each in self._plan.placements if any(inside(fold_path(each.path), unit) for unit in self._units)
        ]
        often = {"row": 1.0, "attention": 1.0, "gather": 0.5, "stored": 0.5}
        return sum(often.get(each.cut, 0.0) for each in inner) / layers


def _keys(profile: Profile, core: set[str], layers: int, given: float) -> float:
    """Bytes per sample of the keys and values of one block: what the products around an attention give, less the queries, which are as
    large as what attention gives, and less what the last of them gives the block. Where that is not told, twice what the block gives."""
    attention = [each for each in profile.operators if each.phase == "forward" and _kind(each) == "attention"]
    if not attention:
        return 2 * given
    (_, lots), (queries, _), _, (size, _) = ((d.fixed, d.per_sample) for d in attention[0].dims)
    asked = lots * queries * size * WIDTH.get(attention[0].dtype, 4)
    holder = attention[0].module
    while holder:
        products = [
            each for each in profile.operators
            if each.phase == "forward" and _kind(each) == "product" and inside(each.module, holder)
        ]  # fmt: skip
        if products:
            out = sum(
                o.count * o.dims[1].per_sample * o.dims[2].fixed * WIDTH.get(o.dtype, 4) for o in products
            ) / layers  # fmt: skip
            return min(max(out - asked - given, 0.0), 2 * given) or 2 * given
        holder = holder.rpartition(".")[0]
    return 2 * given


def _places(profile: Profile, layers: int) -> tuple[Place, ...]:
    """What each visit is in blocks, of those that are blocks or lie in one; all of them where the model has no blocks."""
    blocks = [not profile.units or any(inside(visit.path, unit) for unit in profile.units) for visit in profile.visits]
    own = {visit.path: 0.0 for visit, block in zip(profile.visits, blocks, strict=True) if block}
    for parameter in profile.parameters:
        path = next((path for path in _prefixes(parameter.name) if path in own), None)
        if path is not None:
            own[path] += parameter.elements
    times = Counter(visit.path for visit in profile.visits)
    work = sum(visit.work for visit, block in zip(profile.visits, blocks, strict=True) if block)
    size = sum(own.values())
    return tuple(
        Place(
            blocks=layers * visit.work / work if block and work else 0.0,
            # One that is called several times is held once, by a part for each call.
            elements=layers * own[visit.path] / times[visit.path] / size if block and size else 0.0,
            crossing=visit.crossing.per_sample,
        )
        for visit, block in zip(profile.visits, blocks, strict=True)
    )


def _prefixes(name: str) -> Iterator[str]:
    """The modules that a parameter lies in, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of a block: modules of a list, or weights of three dims that hold one matrix for each."""

    listed: frozenset[str] = frozenset()  #: folded paths of modules
    stacked: frozenset[str] = frozenset()  #: folded names of parameters
    number: int = 0

    def hold(self, parameter: Parameter) -> bool:
        """Whether a parameter is theirs."""
        name = fold_path(parameter.name)
        return name in self.stacked or _within(name, self.listed)

    def compute(self, operator: Operator) -> bool:
        """Whether an operator is theirs."""
        return _within(operator.module, self.listed) or (bool(self.stacked) and _lots(operator) == self.number)


def _lots(operator: Operator) -> float:
    """How many products one call of weights in a stack makes; 0: it has none."""
    many = operator.dims[0] if operator.kind == "matmul" and operator.dims else None
    return many.fixed if many and not many.per_sample and many.fixed > 1 else 0.0


def _experts(profile: Profile, units: tuple[str, ...]) -> _Experts:
    """Modules alike in a list of a block, each of which sees fewer rows than the block has: layers in a row are alike too, and see all.
    Or weights of three dims whose products are as many as the first of them."""
    members: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = {}
    stacks: dict[str, int] = {}
    for parameter in profile.parameters:
        folded = fold_path(parameter.name)
        unit = next((each for each in units if inside(folded, each)), None)
        if unit is None:
            continue
        steps, names = folded.split("."), parameter.name.split(".")
        places = [at for at, step in enumerate(steps[:-1]) if step == "*" and at >= len(unit.split("."))]
        if places:
            at = places[0] + 1
            member = members.setdefault(".".join(names[: at - 1]), {}).setdefault(names[at - 1], [])
            member.append((".".join(names[at:]), tuple(parameter.shape)))
        elif len(parameter.shape) == 3:
            stacks[folded] = parameter.shape[0]
    listed: dict[str, int] = {}
    for path, each in members.items():
        folded = fold_path(f"{path}.0")
        alike = len({tuple(sorted(shapes)) for shapes in each.values()}) == 1
        if len(each) > 1 and alike and _few_rows(profile, units, folded):
            listed[folded] = len(each)
    if listed:
        return _Experts(frozenset(listed), frozenset(), min(listed.values()))
    made = {_lots(each) for each in profile.operators if any(inside(each.module, unit) for unit in units)}
    found = {name: number for name, number in stacks.items() if number > 1 and number in made}
    return _Experts(frozenset(), frozenset(found), min(found.values(), default=0))


def _few_rows(profile: Profile, units: tuple[str, ...], path: str) -> bool:
    """Whether the products of a module see fewer rows of a sample than those of its block beside it; where there are none beside it,
    fewer than the block gives."""
    unit = next(each for each in units if inside(path, each))
    forward = [
        each for each in profile.operators
        if each.phase == "forward" and _kind(each) == "product" and inside(each.module, unit)
    ]  # fmt: skip
    theirs = [each for each in forward if inside(each.module, path)]
    if not theirs:
        return False
    others = [each.dims[1].per_sample for each in forward if not inside(each.module, path)]
    given = max((m.output.per_sample for m in profile.modules if fold_path(m.path) == unit), default=0.0)
    last = theirs[-1]
    rows = max(others, default=given / (last.dims[2].fixed * WIDTH.get(last.dtype, 4)))
    mean = sum(each.count * each.dims[1].per_sample for each in theirs) / sum(each.count for each in theirs)
    return mean < 0.99 * rows


def _choices(profile: Profile, units: tuple[str, ...], experts: _Experts) -> float:
    """To how many experts a token goes: rows that all experts of a block compute over those that others compute; 1 where that is not told."""
    rows: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for each in profile.operators:
        theirs = experts.compute(each)
        product = _kind(each) == "product" or (theirs and _kind(each) == "inner")
        if each.phase == "forward" and product and any(inside(each.module, unit) for unit in units):
            of, name = rows[theirs], f"{each.module} {each.dims[2].fixed}"
            many = each.count * max(_lots(each), 1.0)
            of[name] = of.get(name, 0.0) + many * each.dims[1].per_sample / max(len(profile.units), 1)
    theirs_, others = (max(of.values(), default=0.0) for of in (rows[True], rows[False]))
    return theirs_ / others if theirs_ and others else 1.0


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


def _given(profile: Profile, units: tuple[str, ...]) -> float:
    """Bytes per sample that products of weights, convolutions and attention in blocks give, all together."""
    return sum(
        each.count * output_bytes(each, _MANY) / _MANY
        for each in profile.operators
        if each.phase == "forward"
        and _kind(each) in ("product", "attention", "convolution")
        and (not units or any(inside(each.module, unit) for unit in units))
    )


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


def _columns(profile: Profile, units: tuple[str, ...]) -> frozenset[str]:
    """Modules of products that read what passes from block to block, and whose outputs tp divides. In each part of a block the last
    product ends a pair; one that is such a part by itself does where it gives as much as the block."""
    given = {
        unit: max((m.output.per_sample for m in profile.modules if fold_path(m.path) == unit), default=0.0)
        for unit in units
    }
    inner: dict[str, list[Operator]] = {}
    for operator in profile.operators:
        unit = next((each for each in units if inside(operator.module, each)), None)
        if (
            unit is not None
            and operator.phase == "forward"
            and _kind(operator) == "product"
            and operator.module != unit
        ):
            part = operator.module[len(unit) + 1 :].partition(".")[0]
            inner.setdefault(f"{unit}.{part}", []).append(operator)
    found: set[str] = set()
    for part, products in inner.items():
        if [each.module for each in products] == [part]:
            each = products[0]
            wide = each.dims[1].per_sample * each.dims[2].fixed * WIDTH.get(each.dtype, 4)
            found |= {part} if wide != given[part.rpartition(".")[0]] else set()
        else:
            found |= {each.module for each in products} - {products[-1].module}
    return frozenset(found)


def _within(path: str, holders: Iterable[str]) -> bool:
    return any(inside(path, holder) for holder in holders)
