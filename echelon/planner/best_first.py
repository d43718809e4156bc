"""Best-first search: visits plans in order of a lower bound on their cost, until no better plan can remain."""

from __future__ import annotations

import heapq
from bisect import insort
from itertools import count

from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.planner.goal import Objective
from echelon.planner.plan_space import PlanFamily, PlanSpace


def search_best_first(
    space: PlanSpace, objective: Objective, *, top: int, tolerance: float, exhaustive: bool = False
) -> list[Forecast]:
    """The `top` plans that fit, and all others within `tolerance` of the best; best first.

    The queue holds numbers of ranks, families and plans, each with its bound. Numbers of ranks expand into families, and families into
    plans. The search ends when the lowest bound exceeds the cost of the plans found. `exhaustive`: forecast every plan.
    """
    results: list[tuple[tuple[float, float, str], Forecast]] = []
    queue: list[tuple[float, int, int | PlanFamily | Plan]] = []
    limit, tie_breaker, cutoff = objective.goal.step_limit, count(), float("inf")

    def enqueue(seconds: float, entry: int | PlanFamily) -> None:
        if exhaustive or seconds <= limit:
            ranks = entry if isinstance(entry, int) else entry.mesh.ranks
            heapq.heappush(queue, (objective.cost(seconds, ranks, 0.0), next(tie_breaker), entry))

    for ranks in space.rank_counts(fine_grained=objective.goal.kind in ("devices", "cheapest")):
        enqueue(space.rank_count_bound(ranks), ranks)
    while queue:
        bound, _, entry = heapq.heappop(queue)
        if not exhaustive and bound > cutoff:
            break
        if isinstance(entry, int):
            for family in space.families(entry):
                enqueue(space.family_bound(family), family)
        elif isinstance(entry, PlanFamily):
            for plan in space.plans(entry):
                cost = 0.0 if exhaustive else _cost_bound(space, objective, plan)
                if cost is not None:
                    heapq.heappush(queue, (cost, next(tie_breaker), plan))
        elif not space.errors(entry):
            forecast = space.simulator.forecast(entry)
            if objective.accepts(forecast):
                insort(results, (objective.key(forecast), forecast), key=lambda result: result[0])
                if len(results) >= top:
                    cutoff = max(results[0][0][0] * (1 + tolerance), results[top - 1][0][0])
    return [forecast for index, ((cost, *_), forecast) in enumerate(results) if index < top or cost <= cutoff]


def _cost_bound(space: PlanSpace, objective: Objective, plan: Plan) -> float | None:
    """A lower bound on the plan's cost; None: it does not fit or misses the deadline."""
    simulator = space.simulator
    placed = simulator.place(plan)
    if not simulator.may_fit(placed):
        return None
    if objective.goal.kind == "memory":
        return simulator.peak_memory(placed)
    seconds = simulator.step_seconds_bound(placed)
    return objective.cost(seconds, plan.ranks, 0.0) if seconds <= objective.goal.step_limit else None
