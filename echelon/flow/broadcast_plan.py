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

from echelon.errors import LaunchError, UnverifiedPlanError
from echelon.flow.gate import (
    candidate_plans,
    fallback_plans,
    is_disproved,
    require_requested_plan,
    run_first_proved,
    single_process_plan,
)
from echelon.flow.job_source import JobSource
from echelon.flow.resolve_plan import PlanLike, ResolvedPlan, load_resolved_plan, parse_plan, resolve_plan
from echelon.flow.spawn import require_rank_count
from echelon.flow.train_result import TrainResult
from echelon.launchers.rank_ipc import format_error, has_plan, take_plan
from echelon.plan.plan import Plan
from echelon.world import World, single_process_variables

if TYPE_CHECKING:
    from torch.distributed import Store


#: Ranks without work wait for the one that trains alone, however long that takes.
_WAIT_LIMIT = timedelta(days=365)
_RESULT_KEY, _READ_COUNT_KEY = "ended", "read"
#: Seconds that rank 0 waits in the end for ranks that may be gone.
_READ_TIMEOUT = 30.0

T = TypeVar("T")


def agree_on_plan(job_source: JobSource, requested: PlanLike, world: World) -> ResolvedPlan:
    """The plan that this process is to execute, or to start ranks for."""
    if not world.launched:
        return resolve_plan(job_source, requested)
    resolved = _resolve_for_ranks(job_source, requested, world)
    require_rank_count(resolved.plan, world)
    return resolved


def _resolve_for_ranks(job_source: JobSource, requested: PlanLike, world: World) -> ResolvedPlan:
    """The plan that was given or handed over, as this model can follow it: perhaps on fewer ranks."""
    received = take_plan()
    if received is not None:
        return load_resolved_plan(received)
    if world.size == 1 or not _needs_search(requested):
        return resolve_plan(job_source, requested, ranks=world.size)
    return _share_rank_0_plans(job_source, requested, world)[0]


def run_first_proved_on_ranks(
    job_source: JobSource, requested: PlanLike, world: World, execute: Callable[[ResolvedPlan, World], T]
) -> T:
    """What `execute` returns on ranks that a launcher started: for the plan that was given, or for the first that `auto` can prove."""
    if not _is_auto(requested):
        return execute(agree_on_plan(job_source, requested, world), world)
    if world.size == 1:
        return run_first_proved(
            candidate_plans(job_source, requested, ranks=1), lambda resolved: execute(resolved, world)
        )
    plans = _share_rank_0_plans(job_source, requested, world)
    if plans[0].plan.ranks != world.size:  # one process: no other plan was found
        raise UnverifiedPlanError(plans[0].fallback)
    return run_first_proved(iter(plans), lambda resolved: execute(resolved, world))


def train_on_ranks(
    job_source: JobSource,
    requested: PlanLike,
    world: World,
    execute: Callable[[ResolvedPlan, World], TrainResult],
    *,
    fallback: bool = True,
) -> TrainResult:
    """Train on ranks that a launcher started. If no plan for all of them is proved, or the model cannot follow the plan that was given on so
    many, rank 0 trains alone and the others wait."""

    def train_all_or_rank_0(resolved: ResolvedPlan) -> TrainResult:
        if resolved.plan.ranks == world.size:
            return execute(resolved, world)
        return _train_on_rank_0(job_source, world, resolved, execute)

    if not _is_auto(requested):
        was_received = has_plan()
        resolved = _resolve_for_ranks(job_source, requested, world)
        if not fallback and not was_received:
            require_requested_plan(resolved)
        if resolved.fallback and resolved.plan.ranks < world.size:
            return _train_on_rank_0(job_source, world, single_process_plan(resolved.fallback), execute)
        require_rank_count(resolved.plan, world)
        if was_received or not fallback:  # handed over: the process that started these ranks tries the next plan
            return execute(resolved, world)
        candidates = (
            fallback_plan for fallback_plan in fallback_plans(resolved) if fallback_plan.plan.ranks in (1, world.size)
        )
        return run_first_proved(chain([resolved], candidates), train_all_or_rank_0)
    try:
        return run_first_proved_on_ranks(job_source, requested, world, execute)
    except Exception as error:
        if world.size == 1 or not is_disproved(error):
            raise
        single_process = single_process_plan(f"no plan for {world.size} ranks is proved: {error}")
    return _train_on_rank_0(job_source, world, single_process, execute)


def _train_on_rank_0(
    job_source: JobSource, world: World, resolved: ResolvedPlan, execute: Callable[[ResolvedPlan, World], TrainResult]
) -> TrainResult:
    """Rank 0 trains in one process; every rank returns what it came to."""
    from echelon.engine.process_groups import open_shared_store

    store = open_shared_store(world, "alone")
    if not world.is_main:
        store.wait([_RESULT_KEY], _WAIT_LIMIT)
        result = json.loads(store.get(_RESULT_KEY))
        store.add(_READ_COUNT_KEY, 1)
        if "error" in result:
            raise LaunchError(f"rank 0, which trained alone, failed: {result['error']}")
        return TrainResult.from_json(result["result"])
    result = {"error": "it was interrupted"}
    try:
        with _single_process_environment():
            job_source.reload()  # the job may have divided its data by the number of ranks
            trained = execute(resolved, World(launched=True))
        result = {"result": trained.to_json()}
        return trained
    except Exception as error:
        result = {"error": format_error(error)}
        raise
    finally:
        store.set(_RESULT_KEY, json.dumps(result))
        _wait_for_readers(store, world.size - 1)


@contextmanager
def _single_process_environment() -> Iterator[None]:
    """Have the environment describe one process, for code of the user's that reads it."""
    single_process = single_process_variables()
    saved = {name: os.environ[name] for name in single_process}
    os.environ |= single_process
    try:
        yield
    finally:
        os.environ |= saved


def _wait_for_readers(store: Store, reader_count: int) -> None:
    """The store may end with this process: the others read it before."""
    deadline = time.monotonic() + _READ_TIMEOUT
    while store.add(_READ_COUNT_KEY, 0) < reader_count and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_auto(requested: PlanLike) -> bool:
    """Whether the plan is `auto`'s to choose: none was given, by the user or by the process that started this one."""
    return parse_plan(requested) is None and not has_plan()


def _needs_search(requested: PlanLike) -> bool:
    """Whether the plan is to be searched for, or leaves open how the model is cut."""
    plan = parse_plan(requested)
    return plan is None or plan.incomplete


def _share_rank_0_plans(job_source: JobSource, requested: PlanLike, world: World) -> list[ResolvedPlan]:
    """What rank 0 would try on all ranks, on every rank; only one process where that is all there is."""
    from echelon.engine.process_groups import WorldCommunicator

    ranks = WorldCommunicator(world)
    try:
        own_plans: list[ResolvedPlan] = []
        with ranks.raise_on_all_ranks():
            if world.is_main:
                candidates = list(candidate_plans(job_source, requested, ranks=world.size))
                own_plans = [
                    candidate
                    for candidate in candidates
                    if candidate.plan.ranks == world.size and not candidate.is_fallback
                ]
                own_plans = own_plans or [candidate for candidate in candidates if not candidate.is_fallback][-1:]
        plan_documents = ranks.broadcast_object(
            [(candidate.plan.to_json(), candidate.fallback) for candidate in own_plans]
        )
    finally:
        ranks.close()
    return own_plans or [
        ResolvedPlan(plan=Plan.from_json(document, source="the plan of rank 0"), fallback=fallback)
        for document, fallback in plan_documents
    ]
