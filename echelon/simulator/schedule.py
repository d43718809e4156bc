"""What a pipeline's schedule costs: how long ranks wait for each other, and how many micro-batches wait for their backward."""

from __future__ import annotations

from functools import lru_cache

from echelon.plan.plan import Plan
from echelon.plan.stages import stage_count
from echelon.simulator import order


def runs_as(plan: Plan, count: int) -> str:
    """The schedule that `count` micro-batches get: too few of them are run all forwards first, then all backwards, as gpipe does."""
    stages, pp = stage_count(plan), plan.mesh.pp
    return "gpipe" if count < stages else order.executed(plan.schedule, pp, stages // pp, count)


def bubble(plan: Plan, count: int) -> float:
    """Time in which a rank waits for others, as a share of the time in which it computes: stages alike, backward twice as long."""
    return _bubble(runs_as(plan, count), plan.mesh.pp, stage_count(plan), count)


@lru_cache(maxsize=1024)
def _bubble(schedule: str, ranks: int, stages: int, count: int) -> float:
    took = order.length(schedule, [1.0] * stages, [2.0] * stages, ranks=ranks, count=count)
    return took / (3.0 * count * (stages // ranks)) - 1.0


def in_flight(plan: Plan, count: int, rank: int) -> float:
    """How many of `count` micro-batches wait for their backward at once on a rank of pp, in activations of all its stages."""
    pp = plan.mesh.pp
    return 1.0 if pp == 1 else order.in_flight(runs_as(plan, count), pp, stage_count(plan) // pp, count, rank)
