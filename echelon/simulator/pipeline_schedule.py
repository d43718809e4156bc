"""What a pipeline's schedule costs: how long ranks wait for each other, and how many micro-batches wait for their backward."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.plan.plan import Plan
from echelon.plan.stages import stage_count
from echelon.simulator import pipeline_order


def runs_as(plan: Plan, count: int) -> str:
    """The schedule that `count` micro-batches get: too few of them are run all forwards first, then all backwards, as gpipe does."""
    stages, pp = stage_count(plan), plan.mesh.pp
    return "gpipe" if count < stages else pipeline_order.executed(plan.schedule, pp, stages // pp, count)


def waiting(plan: Plan, count: int, busy: Sequence[float]) -> list[float]:
    """Seconds that each rank of pp waits for others where it is `busy` so long over `count` micro-batches, a third of it forward."""
    pp = plan.mesh.pp
    if pp == 1:
        return [0.0]
    each = count * (stage_count(plan) // pp)
    stages = [busy[stage % pp] / each for stage in range(stage_count(plan))]
    forward, backward = [seconds / 3 for seconds in stages], [seconds * 2 / 3 for seconds in stages]
    took = pipeline_order.length(runs_as(plan, count), forward, backward, ranks=pp, count=count)
    return [took - own for own in busy]


def in_flight(plan: Plan, count: int, rank: int) -> float:
    """How many of `count` micro-batches wait for their backward at once on a rank of pp, in activations of all its stages."""
    pp = plan.mesh.pp
    return 1.0 if pp == 1 else pipeline_order.in_flight(runs_as(plan, count), pp, stage_count(plan) // pp, count, rank)
