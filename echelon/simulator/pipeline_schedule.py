"""What a pipeline's schedule costs: how long ranks wait for each other, and how many micro-batches wait for their backward."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.plan.plan import Plan
from echelon.plan.stages import stage_count
from echelon.simulator import pipeline_order


def effective_schedule(plan: Plan, micro_batch_count: int) -> str:
    """The schedule that `micro_batch_count` micro-batches get: too few of them are run all forwards first, then all backwards, as gpipe does."""
    stages, pp = stage_count(plan), plan.mesh.pp
    return (
        "gpipe"
        if micro_batch_count < stages
        else pipeline_order.effective_schedule(plan.pipeline.schedule, pp, stages // pp, micro_batch_count)
    )


def bubble_seconds(plan: Plan, micro_batch_count: int, busy_seconds: Sequence[float]) -> list[float]:
    """Seconds that each rank of pp waits for others where it is `busy_seconds` so long over `micro_batch_count` micro-batches, a third of it forward."""
    pp = plan.mesh.pp
    if pp == 1:
        return [0.0]
    stage_passes = micro_batch_count * (stage_count(plan) // pp)
    stage_seconds = [busy_seconds[stage % pp] / stage_passes for stage in range(stage_count(plan))]
    forward, backward = [seconds / 3 for seconds in stage_seconds], [seconds * 2 / 3 for seconds in stage_seconds]
    total_seconds = pipeline_order.makespan(
        effective_schedule(plan, micro_batch_count), forward, backward, ranks=pp, micro_batch_count=micro_batch_count
    )
    return [total_seconds - rank_seconds for rank_seconds in busy_seconds]


def in_flight_micro_batches(plan: Plan, micro_batch_count: int, rank: int) -> float:
    """How many of `micro_batch_count` micro-batches wait for their backward at once on a rank of pp, in activations of all its stages."""
    pp = plan.mesh.pp
    return (
        1.0
        if pp == 1
        else pipeline_order.in_flight_micro_batches(
            effective_schedule(plan, micro_batch_count), pp, stage_count(plan) // pp, micro_batch_count, rank
        )
    )
