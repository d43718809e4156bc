"""The one plan of all ranks: given, handed over by the launcher, or searched for by rank 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import UnprovedPlan
from echelon.flow.gate import attempts, first_proved, one_process
from echelon.flow.prepare import PlanLike, Prepared, Subject, prepare, read_plan, receive
from echelon.flow.start import require_world
from echelon.launchers.handover import has_plan, take_plan
from echelon.plan.plan import Plan
from echelon.world import World

if TYPE_CHECKING:
    from echelon.engine.ranks import Ranks
    from echelon.flow.training import Trained

#: Ranks without work wait for the one that trains alone, however long that takes.
_FOREVER = timedelta(days=365)
_ENDED = "echelon/alone/ended"


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
        prepared = next(_plans_of_rank_0(subject, wanted, world))
    require_world(prepared.plan, world)
    return prepared


def train_launched(
    subject: Subject, wanted: PlanLike, world: World, execute: Callable[[Prepared, World], Trained]
) -> Trained:
    """Train on ranks that a launcher started. `auto` tries one plan after another over all of them; if none is proved, rank 0 trains
    alone and the others wait for it."""
    if world.size == 1 or read_plan(wanted) is not None or has_plan():
        return execute(agree_plan(subject, wanted, world), world)
    plans = _plans_of_rank_0(subject, wanted, world)
    try:
        return first_proved(plans, lambda prepared: execute(prepared, world))
    except UnprovedPlan as error:
        return _train_alone(world, f"no plan for {world.size} ranks is proved: {error}", execute)


def _train_alone(world: World, why: str, execute: Callable[[Prepared, World], Trained]) -> Trained:
    """Rank 0 trains in one process; every rank returns what it came to."""
    import torch.distributed as dist

    from echelon.flow.training import Trained

    store, _, _ = next(dist.rendezvous(world.address, world.rank, world.size))
    if world.main:
        trained = execute(one_process(why), World(launched=True))
        values = {"folder": str(trained.folder), "step": trained.step, "loss": trained.loss, "metrics": trained.metrics}
        store.set(_ENDED, json.dumps(values | {"seconds": trained.seconds}))
        return trained
    store.wait([_ENDED], _FOREVER)
    values = json.loads(store.get(_ENDED))
    return Trained(**values | {"folder": Path(values["folder"])})


def _to_be_found(wanted: PlanLike) -> bool:
    """Whether the plan is to be searched for, or leaves open how the model is cut."""
    plan = read_plan(wanted)
    return plan is None or plan.open


def _plans_of_rank_0(subject: Subject, wanted: PlanLike, world: World) -> Iterator[Prepared]:
    """What rank 0 would try, on every rank."""
    from echelon.engine.ranks import Ranks

    ranks = Ranks(world)
    try:
        mine: list[Prepared] = []
        with ranks.together():
            if world.main:
                found = attempts(subject, wanted, ranks=world.size)
                mine = [each for each in found if each.plan.ranks == world.size]
        texts = _broadcast(ranks, [(each.plan.to_json(), each.fallback) for each in mine])
    finally:
        ranks.close()
    for place, (text, fallback) in enumerate(texts):
        plan = Plan.from_json(text, source="the plan of rank 0")
        yield mine[place] if mine else Prepared(plan=plan, fallback=fallback)


def _broadcast(ranks: Ranks, value: list[tuple[str, str]]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = ranks.gather(value)[0]
    return found
