"""The result of a search: plans with their forecasts, and the order of plans that cost nearly the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.planner.goal import Objective

#: A plan must be better by this fraction to beat one with fewer processes: forecasts are not more precise.
MIN_IMPROVEMENT = 0.02

#: Fills in how a plan cuts the model, which only code with access to the model can find out.
CompletePlan = Callable[[Plan], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that can be executed, and its forecast."""

    plan: Plan
    forecast: Forecast


def simplest_first(candidates: Sequence[Candidate], objective: Objective, top: int) -> tuple[Candidate, ...]:
    """The best `top` candidates in order; among those that cost nearly the same, the simplest comes first."""
    if objective.goal.kind == "devices":
        return tuple(candidates[:top])
    limit = objective.cost_of(candidates[0].forecast) * (1 + MIN_IMPROVEMENT)
    similar = [each for each in candidates if objective.cost_of(each.forecast) <= limit]
    simplest = min(similar, key=_complexity_key)
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
