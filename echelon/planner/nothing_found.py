"""Explains why a search found no plan and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster, Interconnect
from echelon.plan.forecast import Forecast
from echelon.plan.format_units import format_seconds
from echelon.plan.profile import Profile
from echelon.planner.best_first import search_best_first
from echelon.planner.candidate import Candidate
from echelon.planner.goal import Goal, Objective
from echelon.planner.plan_space import PlanSpace

#: Reasons that are listed when no plan can be executed.
_MAX_REASONS = 8


def no_plan_error(space: PlanSpace, objective: Objective, errors: Sequence[PlanError]) -> PlanError:
    """The error for a search without a result. `errors`: of plans whose cuts the model does not allow."""
    if errors:
        return errors[0]
    goal, candidates = objective.goal, space.data_parallel_candidates() if space.simulator.is_measured else []
    if space.simulator.is_measured and not candidates:
        return _no_executable_plan_error(space)
    if goal.step_limit < math.inf:
        fastest = search_best_first(space, Objective(Goal(), space.cluster), top=1, tolerance=0.0)
        if fastest:
            return _refusal(
                f'no plan meets the deadline: the fastest, "{fastest[0].plan}", takes {format_seconds(fastest[0].time.step * goal.steps)} for '
                f"{goal.steps:,} step{'s' * (goal.steps > 1)}, and the limit is {format_seconds(goal.within or 0)}; allow more time, more "
                "devices or fewer steps"
            )
    if candidates:
        return _too_large_error(candidates, space.cluster.device_kind)
    profile, cluster = space.profile, space.cluster
    devices = devices_needed(profile, cluster, minimum=space.ranks or space.max_ranks)
    scope = f"{space.ranks} devices" if space.ranks is not None else f"{cluster.name} ({space.max_ranks} devices)"
    remedy = (
        f"{devices} devices of this kind would hold it"
        if devices is not None
        else "one sample of one block fills a device: use larger devices, smaller blocks or shorter samples"
    )
    return _refusal(f"{profile.name}: {profile.elements:,} parameters fit no plan of {scope}; {remedy}")


def devices_needed(profile: Profile, cluster: Cluster, *, minimum: int, maximum: int = 2**20) -> int | None:
    """The first power of two above `minimum` for which a plan fits that many devices; None: one sample fills a device under any plan."""
    per_node = min(len(node.devices) for node in cluster.nodes)
    for size in (1 << power for power in range(minimum.bit_length(), maximum.bit_length())):
        nodes = tuple(islice(cycle(cluster.nodes), -(-size // per_node)))
        larger = replace(cluster, nodes=nodes)
        if larger.network is None and len(nodes) > 1:
            larger = replace(larger, network=Interconnect(kind="assumed", rate=1e9))
        space = PlanSpace(profile, larger, ranks=size)
        for family in space.families(size):
            if family.micro == 1 and family.recompute in ("block", "none"):
                plans = (plan for plan in space.plans(family) if plan.zero in (0, 3))
                if any(space.simulator.fits(placed) for placed in map(space.simulator.place, plans)):
                    return size
    return None


def _refusal(message: str) -> PlanError:
    error = PlanError(message)
    error.exit_code = 1
    return error


def _no_executable_plan_error(space: PlanSpace) -> PlanError:
    """No plan can be executed: list each reason once."""
    reasons = {str(problem): problem for plan in space.data_parallel_plans() for problem in space.errors(plan)}
    scope = f" of {space.ranks} ranks" if space.ranks is not None else ""
    lines = [f"no plan{scope} can be executed:", *(f"  {reason}" for reason in list(reasons)[:_MAX_REASONS])]
    lines += [f"  and {len(reasons) - _MAX_REASONS} more"] if len(reasons) > _MAX_REASONS else []
    return PlanError("\n".join(lines), list(reasons.values()))


def _too_large_error(candidates: list[Candidate], device_kind: str) -> PlanError:
    """No plan fits: what the closest plan lacks, and what would help."""
    forecasts = [each.forecast for each in candidates]
    closest = min(forecasts, key=lambda forecast: forecast.memory.required / forecast.capacity)
    required, capacity = closest.memory.required / 1e9, closest.capacity / 1e9
    return _refusal(
        f'no plan fits: the closest, "{closest.plan}", needs up to {required:.2f} GB per rank of {capacity:.2f} GB: '
        f"{required - capacity:.2f} GB too much (the peak is at {closest.peak_at}); {_memory_remedy(candidates, closest, device_kind)}"
    )


def _memory_remedy(candidates: list[Candidate], closest: Forecast, device_kind: str) -> str:
    if device_kind == "cpu":
        # Ranks share the machine's memory: more of them do not help.
        smallest = min(each.forecast.memory.required * each.plan.ranks for each in candidates)
        return f"a machine with {smallest / 0.95 / 1e9:.1f} GB would hold it, or a smaller model"
    memory, plan = closest.memory, closest.plan
    # Parameters, gradients and optimizer state can be sharded over any number of ranks; the activations of a sample cannot.
    unshardable = memory.framework + (memory.activations + memory.temporary) * memory.high / memory.peak
    if closest.capacity <= unshardable:
        return "one sample fills a device: use a smaller model or shorter samples"
    sharded_over = plan.ranks if plan.zero == 3 or plan.mesh.dp == 1 else 1
    devices = math.ceil((memory.required - unshardable) * sharded_over / (closest.capacity - unshardable))
    return f"about {max(devices, plan.ranks + 1)} devices of this size under zero=3 would hold it"
