"""The model as one rank of the tensor and pipeline axes has it: a smaller profile, priced like any other.

What a rank holds is exact: parameters by their names, as placements and stages divide them. What it computes and keeps goes by the
modules: those of its stages, and a share of what tp cuts and of what lies between a column and its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from echelon.plan.again import keeps
from echelon.plan.placement import cut_parameters
from echelon.plan.plan import Plan
from echelon.plan.profile import WIDTH, Amount, Moment, Operator, Parameter, Profile, fold_path
from echelon.plan.stages import pairs, stage_ranges
from echelon.simulator.schedule import in_flight


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of the model, and what it keeps beside the micro-batch at work."""

    profile: Profile
    #: Bytes of micro-batches that wait for their backward, and of what each of them gave to the next stage.
    waiting: float = 0.0


def parts(profile: Profile, plan: Plan, micros: tuple[int, ...]) -> tuple[Part, ...]:
    """What each rank of pp has, of tp the rank that holds most. `micros`: samples of each micro-batch."""
    if plan.mesh.tp == plan.mesh.pp == 1 and plan.recompute == "none":
        return (Part(profile),)
    shares = Shares(profile, plan)
    return tuple(_part(profile, plan, shares, rank, micros) for rank in range(plan.mesh.pp))


class Shares:
    """Which share of a module's work and of its activations falls to a rank."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._tp, self._pp = plan.mesh.tp, plan.mesh.pp
        ranges = stage_ranges(plan, len(profile.visits)) if plan.mesh.pp > 1 else []
        self._begins = [places.start for places in ranges]
        #: The rank of pp that computes each visit.
        self.ranks = [number % plan.mesh.pp for number, places in enumerate(ranges) for _ in places]
        self.last = (len(ranges) - 1) % plan.mesh.pp if ranges else 0
        self._visits: dict[str, list[int]] = {}
        for visit, rank in zip(profile.visits, self.ranks, strict=False):
            self._visits.setdefault(fold_path(visit.path), []).append(rank)
        self._cut = {fold_path(each.path): each.cut for each in plan.placements}
        self._between = set(_between(profile, plan))

    def work(self, path: str, rank: int) -> float:
        """Of what a module computes, by its folded path."""
        cut = path in self._between or self._cut.get(path, "vocabulary") != "vocabulary"
        return self.staged(path, rank) / (self._tp if cut else 1)

    def kept(self, path: str, rank: int) -> float:
        """Of what a module keeps for backward: a column keeps its input, which is whole, a row one that is cut."""
        cut = path in self._between or self._cut.get(path) == "row"
        return self.staged(path, rank) / (self._tp if cut else 1)

    def cut(self, path: str) -> float:
        """Of what a module gives, the part that a rank of tp has: columns are cut, the sum that a row takes part in is whole."""
        return 1 / self._tp if path in self._between or self._cut.get(path) in ("column", "gather", "logits") else 1.0

    def sent(self, profile: Profile, rank: int, samples: int) -> float:
        """Bytes that a micro-batch takes from the stages of `rank` to those after them."""
        return sum(
            profile.visits[place].crossing.at(samples)
            for place in self._begins
            if place and self.ranks[place - 1] == rank
        )

    def staged(self, path: str, rank: int) -> float:
        """Of its calls, those that are in the stages of `rank`. What is outside all units is done where the loss is."""
        if self._pp == 1:
            return 1.0
        for unit, ranks in self._visits.items():
            if inside(path, unit):
                return ranks.count(rank) / len(ranks)
        return 1.0 if rank == self.last else 0.0


def inside(path: str, outer: str) -> bool:
    """Whether a module is `outer` or lies in it."""
    return path == outer or path.startswith(outer + ".")


def forward_in_blocks(whole: Profile, profile: Profile) -> list[Operator]:
    """The forward operators of `profile` that lie in repeated blocks of the whole model."""
    blocks = {fold_path(path) for path in whole.units}
    forward = [operator for operator in profile.operators if operator.phase == "forward"]
    return [operator for operator in forward if any(inside(operator.module, block) for block in blocks)]


def computed_again(whole: Profile, profile: Profile, plan: Plan) -> list[Operator]:
    """The operators of `profile` that run once more in backward."""
    inner = forward_in_blocks(whole, profile) if plan.recompute != "none" else []
    if plan.recompute == "block":
        return inner
    # What a row gives is summed over the ranks in place, so that there is nothing of it to keep.
    rows = {fold_path(each.path) for each in plan.placements if each.cut == "row"}
    return [each for each in inner if not keeps(each.name) or each.module in rows]


def output_bytes(operator: Operator, samples: int) -> float:
    """What one call of a product or an attention gives."""
    dims = [amount.at(samples) for amount in operator.dims]
    width = WIDTH.get(operator.dtype, 4)
    if operator.kind == "convolution":
        count, _, channels, _, spatial, _ = dims
        return count * channels * spatial * width
    lots, first, second, last = dims
    if operator.kind == "attention":
        return lots * first * (last * width + 4)  # and of each query the scores' logarithm, in float32
    return lots * first * second * width


def _between(profile: Profile, plan: Plan) -> Iterator[str]:
    """Folded paths of what computes on columns: the module that holds a pair, and what in it has no parameters of its own."""
    modules = {module.path: module for module in profile.modules}
    for columns, row in pairs(plan):
        names = [each.path.split(".") for each in (*columns, row)]
        shared = [same[0] for same in zip(*names, strict=False) if len(set(same)) == 1]
        holder = fold_path(".".join(shared))
        if columns and holder in modules:
            yield holder
            yield from (path for path, each in modules.items() if inside(path, holder) and not each.parameters)


def _part(profile: Profile, plan: Plan, shares: Shares, rank: int, micros: tuple[int, ...]) -> Part:
    held = tuple(_held(profile, plan, shares, rank))
    trained = sum(each.elements for each in held if each.trainable)
    share = trained / max(sum(each.elements for each in profile.parameters if each.trainable), 1)
    units = [(path, _bytes_in(held, path)) for path in profile.units]
    here = [(path, size) for path, size in units if size]
    gradients = sum(each.bytes for each in held if each.trainable) / max(profile.gradient_bytes, 1)
    kept = _kept(profile, plan, shares, rank, max(micros))
    made = replace(
        profile,
        parameters=held,
        operators=tuple(_operators(profile, shares, rank)),
        moments=_moments(profile, held, shares, rank, max(micros), kept, gradients),
        optimizers=tuple(
            replace(
                rule,
                state=int(rule.state * share),
                temporary=int(rule.temporary * share),
                elements=int(rule.elements * share),
            )
            for rule in profile.optimizers
        ),
        units=tuple(path for path, _ in here),
        unit_bytes=tuple(size for _, size in here),
    )
    flying = in_flight(plan, len(micros), rank)
    return Part(made, (flying - 1) * kept.bytes + flying * shares.sent(profile, rank, max(micros)))


def _held(profile: Profile, plan: Plan, shares: Shares, rank: int) -> Iterator[Parameter]:
    cuts = cut_parameters(plan.placements)
    for each in profile.parameters:
        names = (each.name, *each.aliases)
        owners = {
            owner
            for visit, owner in zip(profile.visits, shares.ranks, strict=False)
            if any(inside(name, visit.path) for name in names)
        }
        if shares.ranks and owners and rank not in owners:
            continue
        found = next((cuts[name] for name in names if name in cuts), None)
        if found is None:
            yield each
            continue
        placement, part = found
        yield replace(each, shape=part.most(each.shape, plan.mesh.tp, placement.unit))


def _bytes_in(parameters: tuple[Parameter, ...], path: str) -> int:
    return sum(each.bytes for each in parameters if inside(each.name, path))


def _operators(profile: Profile, shares: Shares, rank: int) -> Iterator[Operator]:
    for operator in profile.operators:
        calls = operator.count * shares.staged(operator.module, rank)
        if not calls:
            continue
        count = max(round(calls), 1)
        factor = shares.work(operator.module, rank) * operator.count / count
        yield replace(operator, count=count, flops=operator.flops * factor, moved=operator.moved * factor)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rank keeps for the backward of one micro-batch."""

    bytes: float
    share: float  #: of what the whole model keeps
    #: While the last block is computed again: what it makes, and what is kept of it, of the other blocks and before them.
    again: float = 0.0


def _kept(profile: Profile, plan: Plan, shares: Shares, rank: int, samples: int) -> Kept:
    again = {fold_path(path) for path in profile.units} if plan.recompute != "none" else set()
    own = _own_kept(profile, samples)
    total, whole = sum(own.values()), profile.kept(samples)
    rest = max(whole - total, 0.0)  # kept outside of all modules: at the loss
    outside, before, reached = rest * shares.staged("", rank), 0.0, False
    for path, size in own.items():
        if any(inside(path, block) for block in again):
            reached = True
            continue
        outside += size * shares.kept(path, rank)
        before += 0.0 if reached or not path else size * shares.kept(path, rank)
    blocks = _blocks(profile, plan, shares, rank, samples) if again else _Blocks()
    mine, scale = outside + blocks.kept, whole / (total + rest) if total + rest else 0.0
    return Kept(
        min(scale * mine, whole),
        min(mine / (total + rest), 1.0) if total + rest else 0.0,
        scale * (before + blocks.kept + blocks.largest) if blocks.kept else 0.0,
    )


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Bytes of blocks that are computed again: what all of them keep until then, and what the largest makes while it is."""

    kept: float = 0.0
    largest: float = 0.0


def _blocks(profile: Profile, plan: Plan, shares: Shares, rank: int, samples: int) -> _Blocks:
    own = _own_kept(profile, samples)
    saved = set(forward_in_blocks(profile, profile)).difference(computed_again(profile, profile, plan))
    sizes = [
        (
            each.module,
            each.count * output_bytes(each, samples) * shares.staged(each.module, rank) * shares.cut(each.module),
        )
        for each in saved
    ]
    kept, largest = sum(size for _, size in sizes), 0.0
    for block in {fold_path(path) for path in profile.units}:
        alike = [module for module in profile.modules if fold_path(module.path) == block]
        calls = sum(module.count for module in alike) * shares.staged(block, rank)
        if not calls:
            continue
        given = max(module.output.at(samples) for module in alike)  # its input is as large as its output
        kept += calls * given
        inner = {path: size for path, size in own.items() if inside(path, block)}
        # Of what a block keeps when nothing is computed again, the part that this rank has.
        part = sum(size * shares.kept(path, rank) for path, size in inner.items()) / (sum(inner.values()) or 1.0)
        most = max(module.kept.at(samples) for module in alike) * part / shares.staged(block, rank)
        known = sum(size for path, size in sizes if inside(path, block)) / calls
        largest = max(largest, most - known - given)
    return _Blocks(kept, largest)


def _own_kept(profile: Profile, samples: int) -> dict[str, float]:
    """Bytes that all modules of a folded path keep, those of the modules in them left out."""
    totals: dict[str, float] = {}
    for module in profile.modules:
        path = fold_path(module.path)
        totals[path] = totals.get(path, 0.0) + module.count * module.kept.at(samples)
    own = dict(totals)
    for path, size in totals.items():
        outer = path
        while outer:
            outer = outer.rpartition(".")[0]
            if outer in totals:
                own[outer] -= size
                break
    return {path: max(size, 0.0) for path, size in own.items()}


def _moments(
    profile: Profile,
    held: tuple[Parameter, ...],
    shares: Shares,
    rank: int,
    samples: int,
    kept: Kept,
    gradients: float,
) -> tuple[Moment, ...]:
    """The moments that fall to a rank, which has the parameters `held`; `gradients`: its share of them."""
    found = [
        replace(
            moment,
            alive=moment.alive + moment.kept * (kept.share - 1),
            kept=moment.kept * kept.share,
            gradients=moment.gradients * gradients,
        )
        for moment in profile.moments
        if shares.staged(moment.where.partition(" ")[0].replace("loss", ""), rank)
    ]
    here = [visit.path for visit, at in zip(profile.visits, shares.ranks, strict=False) if at == rank]
    if kept.again:  # what the loss and the layers after the blocks kept is gone by then
        inner = [path for path in profile.units if not here or path in here]
        found.append(_backward(profile, held, shares, rank, samples, inner, kept.again))
    elif shares.ranks and rank != shares.last:  # the profile's peaks are at the loss
        found.append(_backward(profile, held, shares, rank, samples, here, kept.bytes))
    return tuple(found)


def _backward(
    profile: Profile,
    held: tuple[Parameter, ...],
    shares: Shares,
    rank: int,
    samples: int,
    units: list[str],
    kept: float,
) -> Moment:
    """Backward of the last of `units`: beside what is kept, the gradients of what it gave, of the largest activation and of a weight."""
    within = {fold_path(path) for path in units}
    modules = [module for module in profile.modules if any(inside(fold_path(module.path), path) for path in within)]
    last = [module for module in modules if fold_path(module.path) == fold_path(units[-1])]
    given = max((module.output.at(samples) for module in last), default=0.0)
    most = max((module.output.at(samples) * shares.cut(module.path) for module in modules), default=0.0)
    weight = max((each.bytes for each in held if any(inside(fold_path(each.name), path) for path in within)), default=0)
    return Moment(
        where=units[-1],
        phase="backward",
        alive=Amount(kept + given + most + weight),
        kept=Amount(kept),
        gradients=0.0,
    )
