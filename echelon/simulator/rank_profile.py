"""The model as one rank of the tensor and pipeline axes has it: a smaller profile, priced like any other.

What a rank holds is exact: parameters by their names, as placements and stages divide them. What it computes and keeps goes by the
modules: those of its stages, and a share of what tp cuts and of what lies between a column and its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from echelon.plan.placement import cut_parameters
from echelon.plan.plan import Plan
from echelon.plan.profile import Amount, Moment, Operator, Parameter, Profile, fold_path
from echelon.simulator.pipeline_schedule import in_flight
from echelon.simulator.rank_shares import Shares, inside
from echelon.simulator.recomputation import Blocks, blocks_again, own_kept


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of the model, and what it keeps beside the micro-batch at work."""

    profile: Profile
    #: Bytes of micro-batches that wait for their backward, and of what each of them gave to the next stage.
    waiting: float = 0.0
    #: Bytes that a block computes in forward and gives back at once: an allocator may hold on to them.
    freed: float = 0.0


def parts(profile: Profile, plan: Plan, micros: tuple[int, ...]) -> tuple[Part, ...]:
    """What each rank of pp has, of tp the rank that holds most. `micros`: samples of each micro-batch."""
    if plan.mesh.tp == plan.mesh.pp == 1 and plan.recompute == "none":
        return (Part(profile),)
    shares = Shares(profile, plan)
    return tuple(_part(profile, plan, shares, rank, micros) for rank in range(plan.mesh.pp))


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
    return Part(made, (flying - 1) * kept.bytes + flying * shares.sent(profile, rank, max(micros)), kept.freed)


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
    #: While the last block is computed again, and while the first is: what that makes, and what is kept until then.
    last: float = 0.0
    first: float = 0.0
    freed: float = 0.0  #: what a block made in forward and gave back


def _kept(profile: Profile, plan: Plan, shares: Shares, rank: int, samples: int) -> Kept:
    again = {fold_path(path) for path in profile.units} if plan.recompute != "none" else set()
    own = own_kept(profile, samples)
    total, whole = sum(own.values()), profile.kept(samples)
    rest = max(whole - total, 0.0)  # kept outside of all modules: at the loss
    outside, before, reached = rest * shares.staged("", rank), 0.0, False
    for path, size in own.items():
        if any(inside(path, block) for block in again):
            reached = True
            continue
        outside += size * shares.kept(path, rank)
        before += 0.0 if reached or not path else size * shares.kept(path, rank)
    blocks = blocks_again(profile, plan, shares, rank, samples) if again else Blocks()
    mine, scale = outside + blocks.kept, whole / (total + rest) if total + rest else 0.0
    return Kept(
        min(scale * mine, whole),
        min(mine / (total + rest), 1.0) if total + rest else 0.0,
        scale * (before + blocks.kept + blocks.largest) if blocks.kept else 0.0,
        scale * (before + blocks.one + blocks.largest) if blocks.kept else 0.0,
        scale * blocks.largest,
    )


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
    if kept.last:  # what the loss and the layers after the blocks kept is gone by then
        inner = [path for path in profile.units if not here or path in here]
        found.append(_backward(profile, held, shares, rank, samples, inner, inner[-1], kept.last))
        found.append(_backward(profile, held, shares, rank, samples, inner, inner[0], kept.first))
    elif shares.ranks and rank != shares.last:  # the profile's peaks are at the loss
        found.append(_backward(profile, held, shares, rank, samples, here, here[-1], kept.bytes))
    return tuple(found)


def _backward(
    profile: Profile,
    held: tuple[Parameter, ...],
    shares: Shares,
    rank: int,
    samples: int,
    units: list[str],
    unit: str,
    kept: float,
) -> Moment:
    """Backward of one of `units`: beside what is kept, the gradients of what it gave, of the largest activation and of a weight."""
    within = {fold_path(path) for path in units}
    modules = [module for module in profile.modules if any(inside(fold_path(module.path), path) for path in within)]
    given = max((module.output.at(samples) for module in modules if fold_path(module.path) in within), default=0.0)
    most = max((module.output.at(samples) * shares.cut(module.path) for module in modules), default=0.0)
    weight = max((each.bytes for each in held if any(inside(fold_path(each.name), path) for path in within)), default=0)
    after = max((place for place, each in enumerate(held) if inside(each.name, unit)), default=len(held))
    return Moment(
        where=unit,
        phase="backward",
        alive=Amount(kept + given + most + weight),
        kept=Amount(kept),
        gradients=float(sum(each.bytes for each in held[after + 1 :] if each.trainable)),
    )
