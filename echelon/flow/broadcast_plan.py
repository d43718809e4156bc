"""The one plan of all ranks: given, handed over by the launcher, or searched for by rank 0."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from echelon.errors import LaunchError, UnprovedPlan
from echelon.flow.gate import attempts, disproved, fallback_plans, first_proved, one_process, require_as_given
from echelon.flow.resolve_plan import PlanLike, Prepared, Subject, prepare, read_plan, receive
from echelon.flow.spawn import require_world
from echelon.launchers.rank_ipc import has_plan, in_words, take_plan
from echelon.plan.plan import Plan
from echelon.world import World, variables_of_one

if TYPE_CHECKING:
    from torch.distributed import Store

    from echelon.engine.process_groups import Ranks
    from echelon.flow.trainer import Trained

#: Ranks without work wait for the one that trains alone, however long that takes.
_FOREVER = timedelta(days=365)
_ENDED, _READ = "ended", "read"
#: Seconds that rank 0 waits in the end for ranks that may be gone.
_LINGER = 30.0

T = TypeVar("T")


def agree_plan(subject: Subject, wanted: PlanLike, world: World) -> Prepared:
    """The plan that this process is to execute, or to start ranks for."""
    if not world.launched:
        return prepare(subject, wanted)
    prepared = _settled(subject, wanted, world)
    require_world(prepared.plan, world)
    return prepared


def _settled(subject: Subject, wanted: PlanLike, world: World) -> Prepared:
    """The plan that was given or handed over, as this model can follow it: perhaps on fewer ranks."""
    handed = take_plan()
    if handed is not None:
        return receive(handed)
    if world.size == 1 or not _to_be_found(wanted):
        return prepare(subject, wanted, ranks=world.size)
    return _plans_of_rank_0(subject, wanted, world)[0]


def first_launched(subject: Subject, wanted: PlanLike, world: World, execute: Callable[[Prepared, World], T]) -> T:
    """What `execute` returns on ranks that a launcher started: for the plan that was given, or for the first that `auto` can prove."""
    if not _chooses(wanted):
        return execute(agree_plan(subject, wanted, world), world)
    if world.size == 1:
        return first_proved(attempts(subject, wanted, ranks=1), lambda prepared: execute(prepared, world))
    plans = _plans_of_rank_0(subject, wanted, world)
    if plans[0].plan.ranks != world.size:  # one process: no other plan was found
        raise UnprovedPlan(plans[0].fallback)
    return first_proved(iter(plans), lambda prepared: execute(prepared, world))


def train_launched(
    subject: Subject,
    wanted: PlanLike,
    world: World,
    execute: Callable[[Prepared, World], Trained],
    *,
    fallback: bool = True,
) -> Trained:
    """Train on ranks that a launcher started. If no plan for all of them is proved, or the model cannot follow the plan that was given on so
    many, rank 0 trains alone and the others wait."""

    def together_or_alone(prepared: Prepared) -> Trained:
        if prepared.plan.ranks == world.size:
            return execute(prepared, world)
        return _train_alone(subject, world, prepared, execute)

    if not _chooses(wanted):
        handed = has_plan()
        prepared = _settled(subject, wanted, world)
        if not fallback and not handed:
            require_as_given(prepared)
        if prepared.fallback and prepared.plan.ranks < world.size:
            return _train_alone(subject, world, one_process(prepared.fallback), execute)
        require_world(prepared.plan, world)
        if handed or not fallback:  # handed over: the process that started these ranks tries the next plan
            return execute(prepared, world)
        possible = (each for each in fallback_plans(prepared) if each.plan.ranks in (1, world.size))
        return first_proved(chain([prepared], possible), together_or_alone)
    try:
        return first_launched(subject, wanted, world, execute)
    except Exception as error:
        if world.size == 1 or not disproved(error):
            raise
        why = one_process(f"no plan for {world.size} ranks is proved: {error}")
    return _train_alone(subject, world, why, execute)


def _train_alone(
    subject: Subject, world: World, prepared: Prepared, execute: Callable[[Prepared, World], Trained]
) -> Trained:
    """Rank 0 trains in one process; every rank returns what it came to."""
    from echelon.engine.process_groups import shared_store
    from echelon.flow.trainer import Trained

    store = shared_store(world, "alone")
    if not world.main:
        store.wait([_ENDED], _FOREVER)
        values = json.loads(store.get(_ENDED))
        store.add(_READ, 1)
        if "error" in values:
            raise LaunchError(f"rank 0, which trained alone, failed: {values['error']}")
        return Trained.from_plain(values)
    values = {"error": "it was interrupted"}
    try:
        with _as_one_process():
            subject.reload()  # the job may have divided its data by the number of ranks
            trained = execute(prepared, World(launched=True))
        values = trained.to_plain()
        return trained
    except Exception as error:
        values = {"error": in_words(error)}
        raise
    finally:
        store.set(_ENDED, json.dumps(values))
        _wait_for_readers(store, world.size - 1)


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Have the environment describe one process, for code of the user's that reads it."""
    alone = variables_of_one()
    before = {name: os.environ[name] for name in alone}
    os.environ |= alone
    try:
        yield
    finally:
        os.environ |= before


def _wait_for_readers(store: Store, readers: int) -> None:
    """The store may end with this process: the others read it before."""
    last = time.monotonic() + _LINGER
    while store.add(_READ, 0) < readers and time.monotonic() < last:
        time.sleep(0.01)


def _chooses(wanted: PlanLike) -> bool:
    """Whether the plan is `auto`'s to choose: none was given, by the user or by the process that started this one."""
    return read_plan(wanted) is None and not has_plan()


def _to_be_found(wanted: PlanLike) -> bool:
    """Whether the plan is to be searched for, or leaves open how the model is cut."""
    plan = read_plan(wanted)
    return plan is None or plan.open


def _plans_of_rank_0(subject: Subject, wanted: PlanLike, world: World) -> list[Prepared]:
    """What rank 0 would try on all ranks, on every rank; only one process where that is all there is."""
    from echelon.engine.process_groups import Ranks

    ranks = Ranks(world)
    try:
        mine: list[Prepared] = []
        with ranks.together():
            if world.main:
                found = list(attempts(subject, wanted, ranks=world.size))
                mine = [each for each in found if each.plan.ranks == world.size and not each.is_fallback]
                mine = mine or [each for each in found if not each.is_fallback][-1:]
        texts = _broadcast(ranks, [(each.plan.to_json(), each.fallback) for each in mine])
    finally:
        ranks.close()
    return mine or [
        Prepared(plan=Plan.from_json(text, source="the plan of rank 0"), fallback=fallback) for text, fallback in texts
    ]


def _broadcast(ranks: Ranks, value: list[tuple[str, str]]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = ranks.gather(value)[0]
    return found
