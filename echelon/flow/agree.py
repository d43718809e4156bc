"""The one plan of all ranks: given, handed over by the launcher, or searched for by rank 0."""

from __future__ import annotations

from echelon.flow.prepare import PlanLike, Prepared, Subject, prepare, read_plan, receive
from echelon.flow.start import require_world
from echelon.launchers.handover import take_plan
from echelon.plan.plan import Plan
from echelon.world import World


def agree_plan(subject: Subject, wanted: PlanLike, world: World) -> Prepared:
    """The plan that this process is to execute, or to start ranks for."""
    if not world.launched:
        return prepare(subject, wanted)
    handed = take_plan()
    if handed is not None:
        prepared = receive(handed)
    elif world.size == 1 or not _to_be_found(wanted):
        prepared = prepare(subject, wanted, ranks=world.size)
    else:
        prepared = _plan_of_rank_0(subject, wanted, world)
    require_world(prepared.plan, world)
    return prepared


def _to_be_found(wanted: PlanLike) -> bool:
    """Whether the plan is to be searched for, or leaves open how the model is cut."""
    plan = read_plan(wanted)
    return plan is None or plan.open


def _plan_of_rank_0(subject: Subject, wanted: PlanLike, world: World) -> Prepared:
    from echelon.engine.ranks import Ranks

    ranks = Ranks(world)
    with ranks.together():
        mine = prepare(subject, wanted, ranks=world.size) if world.main else None
    text, fallback = ranks.gather((mine.plan.to_json(), mine.fallback) if mine else ("", ""))[0]
    return mine or Prepared(plan=Plan.from_json(text, source="the plan of rank 0"), fallback=fallback)
