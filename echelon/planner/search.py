"""The best plans of a job on a cluster, forecast and sorted.

On a machine that was measured (`measured`): dp, ZeRO stages, micro-batches, tp, pp with its schedules, and what is computed again. On a cluster
that is known by its data sheets (`space`): all axes at once, over up to tens of thousands of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import get_args

from echelon.errors import PlanError
from echelon.plan.check import require_executable
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.format_units import format_seconds
from echelon.plan.plan import Plan, Precision
from echelon.plan.profile import Profile
from echelon.plan.stages import find_stages, forbidden_stage_starts
from echelon.planner import measured
from echelon.planner.candidate import MIN_IMPROVEMENT, Candidate, CompletePlan, simplest_first
from echelon.planner.goal import Goal, Objective
from echelon.planner.measured import MeasuredSpace
from echelon.planner.space import (
    DataSheetSpace,
    devices_needed,
    search_data_sheets,
    server_forecasts,
    uneven_share_forecasts,
)
from echelon.planner.tp_selection import replicate_faster_modules
from echelon.simulator.step import simulate_measured, uses_data_sheets

#: So many reasons are told when all plans are refused.
_MAX_REASONS = 8


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    top: int = 5,
    ranks: int | None = None,
    complete: CompletePlan | None = None,
    goal: Goal | None = None,
    exhaustive: bool = False,
    beyond: bool = False,
    precisions: tuple[Precision | None, ...] = (None,),
) -> tuple[Candidate, ...]:
    """The `top` plans that can be executed and fit, best first. `ranks`: only plans for so many ranks.

    `complete`: without it no plan of a measured machine has a tensor axis, whose cuts only a look into the model tells.
    `goal`: what the best is; the fastest where it is not given. `exhaustive`: forecast every plan, also those that cannot be the best.
    `beyond`: axes too that are forecast and not executed yet. `precisions`: other than the job's, None.
    """
    resolved_goal = goal or Goal()
    unknown_precision = next(
        (precision for precision in precisions if precision not in (None, *get_args(Precision))), None
    )
    if unknown_precision is not None:
        raise PlanError(f"precision={unknown_precision}: not one of {', '.join(get_args(Precision))}")
    if "fp8" in precisions and not beyond:
        raise PlanError("precision=fp8: it is forecast and not executed yet; with beyond (--beyond) it is searched too")
    if set(precisions) != {None} and not uses_data_sheets(cluster):
        raise PlanError(
            "precisions are searched on clusters that are known by their data sheets; here give the job's precision"
        )
    if uses_data_sheets(cluster):
        space = DataSheetSpace(profile, cluster, ranks=ranks, beyond=beyond, precisions=precisions)
        return _search_by_data_sheet(space, Objective(resolved_goal, cluster), top, complete, exhaustive=exhaustive)
    objective, measured_space = (
        Objective(resolved_goal, cluster),
        MeasuredSpace(profile, cluster, ranks=ranks, complete=complete),
    )
    tolerance = MIN_IMPROVEMENT if resolved_goal.kind != "devices" else 0.0
    result = measured.search_measured(measured_space, objective, top=top, tolerance=tolerance, exhaustive=exhaustive)
    if not result.forecasted:
        raise _no_executable_plan_error(measured_space)
    if not result.feasible:
        if any(candidate.forecast.fits for candidate in result.forecasted):
            raise _too_slow_error(result.forecasted, resolved_goal)
        raise _too_large_error(result.forecasted, cluster.device_kind)
    feasible = [candidate for _, candidate in result.feasible]
    return _keep_faster_modules_replicated(
        simplest_first(feasible, objective, top),
        objective,
        profile,
        lambda plan: simulate_measured(profile, cluster, plan),
    )


def _search_by_data_sheet(
    space: DataSheetSpace, objective: Objective, top: int, complete_plan: CompletePlan | None, *, exhaustive: bool
) -> tuple[Candidate, ...]:
    """On a cluster by its data sheets."""
    requested, goal = top, objective.goal
    completed_by_cut: dict[tuple[object, ...], Plan | PlanError] = {}
    extra_forecasts = [*uneven_share_forecasts(space, goal), *server_forecasts(space, goal)]
    while True:
        forecasts = search_data_sheets(
            space,
            objective,
            top=requested,
            tolerance=MIN_IMPROVEMENT if goal.kind != "devices" else 0.0,
            exhaustive=exhaustive,
        )
        candidates, errors = _complete_candidates(
            space, objective, (*forecasts, *extra_forecasts), complete_plan, completed_by_cut
        )
        # What was not looked at costs no less than the last that was found: with the cuts that the model allows plans may cost more than that.
        if len(forecasts) < requested or (
            candidates and objective.cost_of(candidates[0].forecast) <= objective.cost_of(forecasts[-1])
        ):
            break
        requested *= 4
    if not candidates:
        raise _no_fit_error(space, goal, errors)
    return _keep_faster_modules_replicated(
        simplest_first(candidates, objective, top), objective, space.profile, space.forecast
    )


def _complete_candidates(
    space: DataSheetSpace,
    objective: Objective,
    forecasts: Sequence[Forecast],
    complete_plan: CompletePlan | None,
    completed_by_cut: dict[tuple[object, ...], Plan | PlanError],
) -> tuple[list[Candidate], list[PlanError]]:
    """What was found, with its cuts and priced with them, best first; and why others have none. `completed_by_cut`: cuts by what decides them."""
    candidates: list[Candidate] = []
    errors: list[PlanError] = []
    for forecast in forecasts:
        if complete_plan is not None and forecast.plan.incomplete:
            try:
                plan = _complete_cuts(space, forecast.plan, complete_plan, completed_by_cut)
            except PlanError as error:
                errors.append(error)
                continue
            forecast = space.forecast(plan)
        if forecast.fits and forecast.time.step <= objective.goal.step_limit:
            candidates.append(Candidate(plan=forecast.plan, forecast=forecast))
    candidates.sort(
        key=lambda candidate: (objective.cost_of(candidate.forecast), candidate.forecast.time.step, str(candidate.plan))
    )
    return candidates, errors


def _complete_cuts(
    space: DataSheetSpace,
    plan: Plan,
    complete_plan: CompletePlan,
    completed_by_cut: dict[tuple[object, ...], Plan | PlanError],
) -> Plan:
    """A plan with its cuts, whose stages do not begin between a column and its row, and that can be executed."""
    cut_key = plan.mesh.tp, plan.tensor.sequence, plan.mesh.pp > 1
    if cut_key not in completed_by_cut:
        try:
            completed_by_cut[cut_key] = complete_plan(plan)
        except PlanError as error:
            completed_by_cut[cut_key] = error
    template, pipeline_units = completed_by_cut[cut_key], space.profile.pipeline_units
    if isinstance(template, PlanError):
        raise template
    plan = plan.replace(
        placements=template.tensor.placements, replicated=template.tensor.replicated, segments=template.tensor.segments
    )
    if set(plan.pipeline.stages) & forbidden_stage_starts(plan, pipeline_units):
        stages = find_stages(plan, pipeline_units, space.stage_slowdowns(plan))
        if stages is None:
            raise PlanError(f'"{plan}": too few places where a stage may begin; use a smaller pp')
        plan = plan.replace(stages=stages)
    if space.is_refused(plan):
        require_executable(plan, space.profile, space.pricer.cluster)
    return plan


def _no_fit_error(space: DataSheetSpace, goal: Goal, errors: Sequence[PlanError]) -> PlanError:
    if errors:
        return errors[0]
    if goal.step_limit < math.inf:
        fastest = search_data_sheets(space, Objective(Goal(), space.cluster), top=1, tolerance=0.0, exhaustive=False)
        if fastest:
            return _deadline_error(fastest[0], goal)
    profile, cluster = space.profile, space.cluster
    scope = (
        f" of {space.ranks} devices"
        if space.ranks is not None
        else f" of {cluster.name} ({space.device_count} devices)"
    )
    needed_devices = devices_needed(profile, cluster, minimum=space.ranks or space.device_count)
    error = PlanError(
        f"{profile.name}: {profile.elements:,} parameters fit no plan{scope}; "
        + (
            f"{needed_devices} devices of this kind would hold it"
            if needed_devices is not None
            else "one sample and one block alone fill a device: larger devices, smaller blocks or shorter samples are needed"
        )
    )
    error.exit_code = 1
    return error


def _deadline_error(fastest: Forecast, goal: Goal) -> PlanError:
    error = PlanError(
        f'no plan is done in time: the fastest, "{fastest.plan}", takes {format_seconds(fastest.time.step * goal.steps)} for {goal.steps:,} '
        f"step{'s' * (goal.steps > 1)} and there are {format_seconds(goal.within or 0)}; give more time, more devices or fewer steps"
    )
    error.exit_code = 1
    return error


def _too_slow_error(candidates: Sequence[Candidate], goal: Goal) -> PlanError:
    return _deadline_error(
        min(
            (candidate.forecast for candidate in candidates if candidate.forecast.fits),
            key=lambda forecast: forecast.time.step,
        ),
        goal,
    )


def _keep_faster_modules_replicated(
    candidates: tuple[Candidate, ...], objective: Objective, profile: Profile, forecast_plan: Callable[[Plan], Forecast]
) -> tuple[Candidate, ...]:
    """What was found with all that is faster whole left whole. Bounds are of plans that cut everything, so that this comes after the search."""
    if objective.goal.kind == "memory" or not any(each.plan.tensor.placements for each in candidates):
        return candidates
    better = [
        replicate_faster_modules(each.plan, profile, forecast_plan) if each.plan.tensor.placements else each.forecast
        for each in candidates
    ]
    improved = [Candidate(plan=each.plan, forecast=each) for each in better]
    return simplest_first(sorted(improved, key=lambda each: objective.cost_of(each.forecast)), objective, len(improved))


def _no_executable_plan_error(measured_space: MeasuredSpace) -> PlanError:
    """Every plan is refused: why, each reason once however many plans it refuses."""
    ranks, problems_by_plan = (
        measured_space.ranks,
        [measured_space.errors(plan) for plan in measured_space.data_parallel_plans()],
    )
    reasons = {str(problem): problem for problems in problems_by_plan for problem in problems}
    scope = f" of {ranks} ranks" if ranks is not None else ""
    shown_reasons = [f"  {reason}" for reason in list(reasons)[:_MAX_REASONS]]
    omitted_reasons = [f"  and {len(reasons) - _MAX_REASONS} more"] if len(reasons) > _MAX_REASONS else []
    return PlanError(
        "\n".join([f"no plan{scope} can be executed:", *shown_reasons, *omitted_reasons]), list(reasons.values())
    )


def _too_large_error(candidates: list[Candidate], device_kind: str) -> PlanError:
    """Nothing fits: what the closest one lacks, and what would help."""
    closest = min(candidates, key=lambda candidate: candidate.forecast.memory.required / candidate.forecast.capacity)
    forecast = closest.forecast
    error = PlanError(
        f'no plan fits: the closest, "{closest.plan}", needs up to {forecast.memory.required / 1e9:.2f} GB per rank and there are '
        f"{forecast.capacity / 1e9:.2f} GB: {(forecast.memory.required - forecast.capacity) / 1e9:.2f} GB are missing (the peak is at "
        f"{forecast.peak_at}); {_memory_remedy(candidates, closest, device_kind)}"
    )
    error.exit_code = 1
    return error


def _memory_remedy(candidates: list[Candidate], closest: Candidate, device_kind: str) -> str:
    if device_kind == "cpu":
        # The ranks of a machine share its memory: more of them do not help.
        smallest_total = min(candidate.forecast.memory.required * candidate.plan.ranks for candidate in candidates)
        return f"a machine with {smallest_total / 0.95 / 1e9:.1f} GB would hold it, or a smaller model"
    memory = closest.forecast.memory
    # Parameters, gradients and optimizer state can be sharded over any number of ranks; what a sample needs cannot.
    unshardable_bytes = memory.framework + (memory.activations + memory.temporary) * memory.high / memory.peak
    shardable_capacity = closest.forecast.capacity - unshardable_bytes
    if shardable_capacity <= 0:
        return "one sample alone fills a device: a smaller model or shorter samples are needed"
    plan = closest.plan
    shardable_bytes = (closest.forecast.memory.required - unshardable_bytes) * (
        plan.ranks if plan.zero == 3 or plan.mesh.dp == 1 else 1
    )
    return f"about {max(math.ceil(shardable_bytes / shardable_capacity), plan.ranks + 1)} devices of this size under zero=3 would hold it"
