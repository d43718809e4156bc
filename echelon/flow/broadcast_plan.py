"""The one plan of all ranks: requested, passed on by the launcher, or searched for by rank 0."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import TypeVar

from echelon.errors import LaunchError, UnverifiedPlanError
from echelon.flow import gate
from echelon.flow.job_source import JobSource
from echelon.flow.resolve_plan import PlanLike, ResolvedPlan, load_resolved_plan, parse_plan, resolve_plan
from echelon.flow.spawn import require_rank_count
from echelon.flow.train_result import TrainResult
from echelon.launchers.rank_ipc import format_error, has_plan, take_plan
from echelon.plan.plan import Plan
from echelon.world import World, single_process_variables

#: Idle ranks wait for the one that trains alone, however long that takes.
_WAIT_LIMIT = timedelta(days=365)
_RESULT_KEY, _READ_COUNT_KEY = "ended", "read"
#: Seconds that rank 0 waits at the end for ranks that may be gone.
_READ_TIMEOUT = 30.0

T = TypeVar("T")
Execute = Callable[[ResolvedPlan, World], T]


def agree_on_plan(source: JobSource, requested: PlanLike, world: World) -> ResolvedPlan:
    """The plan that this process executes, or starts ranks for."""
    if not world.launched:
        return resolve_plan(source, requested)
    resolved = _resolve_for_ranks(source, requested, world)
    require_rank_count(resolved.plan, world)
    return resolved


def _resolve_for_ranks(source: JobSource, requested: PlanLike, world: World) -> ResolvedPlan:
    """The plan that was requested or passed on, as this model can follow it: perhaps on fewer ranks."""
    if received := take_plan():
        return load_resolved_plan(received)
    plan = parse_plan(requested)
    if world.size > 1 and (plan is None or plan.incomplete):
        return _share_rank_0_plans(source, requested, world)[0]
    return resolve_plan(source, requested, ranks=world.size)


def run_first_proved_on_ranks(source: JobSource, requested: PlanLike, world: World, execute: Execute[T]) -> T:
    """Call `execute` on ranks that a launcher started, with the requested plan or with the first of `auto` that is proved."""
    if not _is_auto(requested):
        return execute(agree_on_plan(source, requested, world), world)
    if world.size == 1:
        plans = gate.candidate_plans(source, requested, ranks=1)
    else:
        shared = _share_rank_0_plans(source, requested, world)
        if shared[0].plan.ranks != world.size:  # one process: no other plan was found
            raise UnverifiedPlanError(shared[0].fallback)
        plans = iter(shared)
    return gate.run_first_proved(plans, lambda resolved: execute(resolved, world))


def train_on_ranks(
    source: JobSource, requested: PlanLike, world: World, execute: Execute[TrainResult], *, fallback: bool
) -> TrainResult:
    """Train on ranks that a launcher started. If no plan for all of them is proved, or the model cannot follow the requested plan on that
    many, rank 0 trains alone and the others wait."""

    def train_all_or_rank_0(resolved: ResolvedPlan) -> TrainResult:
        if resolved.plan.ranks == world.size:
            return execute(resolved, world)
        return _train_alone(source, world, resolved, execute)

    if not _is_auto(requested):
        was_received = has_plan()
        resolved = _resolve_for_ranks(source, requested, world)
        if not fallback and not was_received:
            gate.require_requested_plan(resolved)
        if resolved.fallback and resolved.plan.ranks < world.size:
            return _train_alone(source, world, gate.single_process_plan(resolved.fallback), execute)
        require_rank_count(resolved.plan, world)
        if was_received or not fallback:  # passed on: the process that started these ranks tries the next plan
            return execute(resolved, world)
        candidates = (other for other in gate.fallback_plans(resolved) if other.plan.ranks in (1, world.size))
        return gate.run_first_proved(chain([resolved], candidates), train_all_or_rank_0)
    try:
        return run_first_proved_on_ranks(source, requested, world, execute)
    except Exception as error:
        if world.size == 1 or not gate.is_disproved(error):
            raise
        single_process = gate.single_process_plan(f"no plan for {world.size} ranks is proved: {error}")
    return _train_alone(source, world, single_process, execute)


def _train_alone(source: JobSource, world: World, resolved: ResolvedPlan, execute: Execute[TrainResult]) -> TrainResult:
    """Rank 0 trains in one process; every rank returns its result."""
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
            source.reload()  # the job may have divided its data by the number of ranks
            trained = execute(resolved, World(launched=True))
        result = {"result": trained.to_json()}
        return trained
    except Exception as error:
        result = {"error": format_error(error)}
        raise
    finally:
        store.set(_RESULT_KEY, json.dumps(result))
        deadline = time.monotonic() + _READ_TIMEOUT  # the store may end with this process
        while store.add(_READ_COUNT_KEY, 0) < world.size - 1 and time.monotonic() < deadline:
            time.sleep(0.01)


@contextmanager
def _single_process_environment() -> Iterator[None]:
    """Let the environment describe one process, for user code that reads it."""
    single_process = single_process_variables()
    saved = {name: os.environ[name] for name in single_process}
    os.environ |= single_process
    try:
        yield
    finally:
        os.environ |= saved


def _is_auto(requested: PlanLike) -> bool:
    """Whether `auto` chooses the plan: neither the user nor the process that started this one has given one."""
    return parse_plan(requested) is None and not has_plan()


def _share_rank_0_plans(source: JobSource, requested: PlanLike, world: World) -> list[ResolvedPlan]:
    """The plans that rank 0 would try on all ranks, on every rank; if there are none, its last one, for one process."""
    from echelon.engine.process_groups import WorldCommunicator

    ranks = WorldCommunicator(world)
    try:
        plans: list[ResolvedPlan] = []
        with ranks.raise_on_all_ranks():
            if world.is_main:
                candidates = [c for c in gate.candidate_plans(source, requested, ranks=world.size) if not c.is_fallback]
                plans = [candidate for candidate in candidates if candidate.plan.ranks == world.size] or candidates[-1:]
        documents = ranks.broadcast_object([(resolved.plan.to_json(), resolved.fallback) for resolved in plans])
    finally:
        ranks.close()
    received = [(Plan.from_json(text, source="the plan of rank 0"), reason) for text, reason in documents]
    return plans or [ResolvedPlan(plan=plan, fallback=reason) for plan, reason in received]
