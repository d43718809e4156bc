"""A step of a plan as events on the ranks of its pipeline, and what each of them holds: for pictures and traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.plan.cluster import Cluster
from echelon.plan.forecast import MemoryForecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.stages import stage_count
from echelon.simulator.calibration import load_constants
from echelon.simulator.memory import forecast_memory
from echelon.simulator.node_load import compute_node_load, require_uniform_node
from echelon.simulator.pipeline_order import timed_actions
from echelon.simulator.pipeline_schedule import effective_schedule
from echelon.simulator.rank_profile import rank_profiles
from echelon.simulator.sheet_memory import rank_memories, with_overheads
from echelon.simulator.sheet_step import stage_seconds
from echelon.simulator.step import forecast_placed_plan, place_plan, rank_times, uses_data_sheets
from echelon.simulator.training_stack import TrainingStack

#: Micro-batches that are shown: a longer step repeats itself.
MAX_MICRO_BATCHES = 24


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One thing that a rank of pp does."""

    rank: int
    kind: Literal["forward", "backward", "weights", "exchange", "optimizer"]
    stage: int
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step as it is forecast. `shown_micro_batches` of `micro_batch_count` micro-batches are in it."""

    plan: Plan
    events: tuple[TimelineEvent, ...]
    memory: tuple[MemoryForecast, ...]  #: of each rank of pp
    capacity: float
    shown_micro_batches: int
    micro_batch_count: int
    nodes: int
    ranks_per_node: int


def build_timeline(profile: Profile, cluster: Cluster, plan: Plan, *, stack: TrainingStack | None = None) -> Timeline:
    """What every rank of pp does in a step, one data rank as all others."""
    pp = plan.mesh.pp
    if uses_data_sheets(cluster):
        constants = load_constants()
        placed = place_plan(profile, cluster, plan, stack)
        forecast = forecast_placed_plan(placed, constants)
        if pp == 1:
            placed = [max(placed, key=lambda each: forecast_placed_plan([each], constants).time.step)]
        layout = placed[0].layout
        forward, backward, exchange = stage_seconds(placed, constants)
        micro_batch_count, schedule = layout.micro_batch_count, layout.schedule
        # What a rank holds does not depend on the device that it is on.
        memories = tuple(with_overheads(rank_memories(layout, rank)[0], constants) for rank in range(pp))
        capacity, ranks_per_node = forecast.capacity, len(placed[0].cluster.nodes[0].devices)
        final_seconds = (exchange, forecast.time.optimizer)
    else:
        require_uniform_node(cluster)
        load = compute_node_load(profile, cluster, plan)
        times = rank_times(profile, cluster, plan)
        micro_batch_count = len(load.micro_batch_sizes)
        stages = stage_count(plan) if pp > 1 else 1
        each = stages // pp
        forward = [times[stage % pp].forward / micro_batch_count / each for stage in range(stages)]
        backward = [times[stage % pp].backward / micro_batch_count / each for stage in range(stages)]
        schedule = effective_schedule(plan, micro_batch_count) if pp > 1 else "1f1b"
        memories = tuple(
            forecast_memory(
                rank_part.profile, plan, load, rank_part.in_flight_bytes, rank_part.freed_bytes, full_profile=profile
            )[0]
            for rank_part in rank_profiles(profile, plan, load.micro_batch_sizes)
        )
        capacity, ranks_per_node = load.capacity, max(plan.ranks, 1)
        final_seconds = (max(each.exchange for each in times), max(each.optimizer for each in times))
    shown = min(micro_batch_count, max(MAX_MICRO_BATCHES, 2 * pp))
    if len(forward) > pp and shown % pp:
        shown -= shown % pp
    event_kinds: tuple[Literal["forward", "backward", "weights"], ...] = ("forward", "backward", "weights")
    actions = timed_actions(schedule, forward, backward, ranks=pp, micro_batch_count=shown)
    events = [
        TimelineEvent(rank, event_kinds[kind], stage, micro_batch, begin, end)
        for rank, kind, stage, micro_batch, begin, end in actions
    ]
    end_time = max((each.end for each in events), default=0.0)
    for phase, seconds in zip(("exchange", "optimizer"), final_seconds, strict=True):
        if seconds > 0:
            events += [TimelineEvent(rank, phase, rank, 0, end_time, end_time + seconds) for rank in range(pp)]  # type: ignore[arg-type]
            end_time += seconds
    return Timeline(
        plan=plan,
        events=tuple(events),
        memory=memories,
        capacity=capacity,
        shown_micro_batches=shown,
        micro_batch_count=micro_batch_count,
        nodes=-(-plan.ranks // ranks_per_node),
        ranks_per_node=ranks_per_node,
    )
