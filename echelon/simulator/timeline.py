"""A step of a plan as events on the ranks of its pipeline, and what each of them holds: for pictures and traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Memory
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.stages import stage_count
from echelon.simulator.calibration import fitted
from echelon.simulator.memory import memory
from echelon.simulator.node_load import load_of, require_one_kind
from echelon.simulator.pipeline_order import walk
from echelon.simulator.pipeline_schedule import runs_as
from echelon.simulator.rank_profile import parts
from echelon.simulator.sheet_memory import held_by_ranks, put_together
from echelon.simulator.sheet_step import stage_seconds
from echelon.simulator.step import by_sheet, forecast_of, laid_out, rank_times
from echelon.simulator.training_stack import Stack

#: Micro-batches that are shown: a longer step repeats itself.
SHOWN = 24


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a rank of pp does."""

    rank: int
    kind: Literal["forward", "backward", "weights", "exchange", "optimizer"]
    stage: int
    micro: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step as it is forecast. `shown` of `count` micro-batches are in it."""

    plan: Plan
    events: tuple[Event, ...]
    memory: tuple[Memory, ...]  #: of each rank of pp
    capacity: float
    shown: int
    count: int
    nodes: int
    per_node: int


def timeline(profile: Profile, cluster: Cluster, plan: Plan, *, stack: Stack | None = None) -> Timeline:
    """What every rank of pp does in a step, one data rank as all others."""
    pp = plan.mesh.pp
    if by_sheet(cluster):
        constants = fitted()
        placed = laid_out(profile, cluster, plan, stack)
        forecast = forecast_of(placed, constants)
        if pp == 1:
            placed = [max(placed, key=lambda each: forecast_of([each], constants).time.step)]
        layout = placed[0].layout
        forward, backward, exchange = stage_seconds(placed, constants)
        count, schedule = layout.count, layout.schedule
        # What a rank holds does not depend on the device that it is on.
        held = tuple(put_together(held_by_ranks(layout, rank)[0], constants) for rank in range(pp))
        capacity, per_node = forecast.capacity, len(placed[0].cluster.nodes[0].devices)
        tail = (exchange, forecast.time.optimizer)
    else:
        require_one_kind(cluster)
        load = load_of(profile, cluster, plan)
        times = rank_times(profile, cluster, plan)
        count = len(load.micros)
        stages = stage_count(plan) if pp > 1 else 1
        each = stages // pp
        forward = [times[stage % pp].forward / count / each for stage in range(stages)]
        backward = [times[stage % pp].backward / count / each for stage in range(stages)]
        schedule = runs_as(plan, count) if pp > 1 else "1f1b"
        held = tuple(
            memory(part.profile, plan, load, part.waiting, part.freed, whole=profile)[0]
            for part in parts(profile, plan, load.micros)
        )
        capacity, per_node = load.capacity, max(plan.ranks, 1)
        tail = (max(each.exchange for each in times), max(each.optimizer for each in times))
    shown = min(count, max(SHOWN, 2 * pp))
    if len(forward) > pp and shown % pp:
        shown -= shown % pp
    kinds: tuple[Literal["forward", "backward", "weights"], ...] = ("forward", "backward", "weights")
    done = walk(schedule, forward, backward, ranks=pp, count=shown)
    events = [Event(rank, kinds[kind], stage, micro, begin, end) for rank, kind, stage, micro, begin, end in done]
    after = max((each.end for each in events), default=0.0)
    for what, seconds in zip(("exchange", "optimizer"), tail, strict=True):
        if seconds > 0:
            events += [Event(rank, what, rank, 0, after, after + seconds) for rank in range(pp)]  # type: ignore[arg-type]
            after += seconds
    return Timeline(
        plan=plan,
        events=tuple(events),
        memory=held,
        capacity=capacity,
        shown=shown,
        count=count,
        nodes=-(-plan.ranks // per_node),
        per_node=per_node,
    )
