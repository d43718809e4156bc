"""What a search finds: plans with their forecasts, and the order of those that are nearly as good as each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.planner.goal import Costs

#: A plan must be this much better to be preferred to one with fewer processes: forecasts are not finer than that.
WORTH = 0.02

#: Fills in how a plan cuts the model; it looks into the model, which the planner cannot.
Complete = Callable[[Plan], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that can be executed, and its forecast."""

    plan: Plan
    forecast: Forecast


def simplest_first(found: Sequence[Candidate], costs: Costs, top: int) -> tuple[Candidate, ...]:
    """The `top` of what was found, the best first; among those that cost nearly the same the simplest one is the best."""
    if costs.goal.kind == "devices":
        return tuple(found[:top])
    limit = costs.of(found[0].forecast) * (1 + WORTH)
    chosen = min((each for each in found if costs.of(each.forecast) <= limit), key=_simplicity)
    return (chosen, *[each for each in found if each is not chosen][: top - 1])


def _simplicity(candidate: Candidate) -> tuple[int, bool, int, bool, int, float, float]:
    plan = candidate.plan
    return (
        plan.ranks,
        plan.served,
        plan.ranks // plan.mesh.dp,
        plan.recompute != "none",
        plan.zero,
        -(plan.micro or math.inf),
        candidate.forecast.time.step,
    )
