"""What a search finds: plans with their forecasts, and the order of those that are nearly as good as each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.planner.goal import Objective

#: A plan must be this much better to be preferred to one with fewer processes: forecasts are not finer than that.
MIN_IMPROVEMENT = 0.02

#: Fills in how a plan cuts the model; it looks into the model, which the planner cannot.
CompletePlan = Callable[[Plan], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that can be executed, and its forecast."""

    plan: Plan
    forecast: Forecast


def simplest_first(candidates: Sequence[Candidate], objective: Objective, top: int) -> tuple[Candidate, ...]:
    """The `top` of what was found, the best first; among those that cost nearly the same the simplest one is the best."""
    if objective.goal.kind == "devices":
        return tuple(candidates[:top])
    limit = objective.cost_of(candidates[0].forecast) * (1 + MIN_IMPROVEMENT)
    simplest = min(
        (candidate for candidate in candidates if objective.cost_of(candidate.forecast) <= limit), key=_complexity_key
    )
    return (simplest, *[candidate for candidate in candidates if candidate is not simplest][: top - 1])


def _complexity_key(candidate: Candidate) -> tuple[int, bool, int, bool, int, float, float]:
    plan = candidate.plan
    return (
        plan.ranks,
        plan.uses_servers,
        plan.ranks // plan.mesh.dp,
        plan.recompute != "none",
        plan.zero,
        -(plan.micro or math.inf),
        candidate.forecast.time.step,
    )
