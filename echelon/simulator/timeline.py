"""A step as events on the ranks of its pipeline, with the memory of each, for figures and traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.plan.cluster import Cluster
from echelon.plan.forecast import MemoryForecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.simulator.memory import rank_memories
from echelon.simulator.pipeline_schedule import timed_actions
from echelon.simulator.simulator import Simulator
from echelon.simulator.step import step_parts, step_time
from echelon.simulator.training_stack import TrainingStack

EventKind = Literal["forward", "backward", "weights", "exchange", "optimizer"]
#: Micro-batches that are shown: a longer step repeats the pattern.
MAX_MICRO_BATCHES = 24
_ACTION_KINDS: tuple[EventKind, ...] = ("forward", "backward", "weights")


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One action of a rank of pp."""

    rank: int
    kind: EventKind
    stage: int
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A forecast step, with the first `shown_micro_batches` of its `micro_batch_count` micro-batches."""

    plan: Plan
    events: tuple[TimelineEvent, ...]
    memory: tuple[MemoryForecast, ...]  #: of each rank of pp
    capacity: float
    shown_micro_batches: int
    micro_batch_count: int
    nodes: int
    ranks_per_node: int


def build_timeline(profile: Profile, cluster: Cluster, plan: Plan, *, stack: TrainingStack | None = None) -> Timeline:
    """The actions of every rank of pp in a step; all data ranks do the same."""
    pp, simulator = plan.mesh.pp, Simulator(profile, cluster, stack)
    placed = simulator.place(plan)
    if pp == 1:
        placed = [max(placed, key=lambda each: step_time([each]).step)]
    layout, cost, parts = placed[0].layout, placed[0].cost, step_parts(placed)
    shown = min(layout.micro_batches, max(MAX_MICRO_BATCHES, 2 * pp))
    if layout.chunks > 1:
        shown -= shown % pp
    actions = timed_actions(layout.schedule, parts.forward, parts.backward, ranks=pp, micro_batches=shown)
    events = [
        TimelineEvent(rank, _ACTION_KINDS[kind], stage, micro_batch, begin, end)
        for rank, kind, stage, micro_batch, begin, end in actions
    ]
    end = max((event.end for event in events), default=0.0)
    last_kinds: tuple[tuple[EventKind, float], ...] = (("exchange", parts.exchange), ("optimizer", parts.optimizer))
    for last_kind, seconds in last_kinds:
        if seconds > 0:
            events += [TimelineEvent(rank, last_kind, rank, 0, end, end + seconds) for rank in range(pp)]
            end += seconds
    devices = simulator.uniform_clusters[0].nodes[0].devices
    ranks_per_node = plan.ranks if simulator.is_measured else len(devices)
    return Timeline(
        plan=plan,
        events=tuple(events),
        # The memory of a rank does not depend on the kind of its device.
        memory=tuple(
            max(map(cost.memory_forecast, rank_memories(layout, rank)), key=lambda memory: memory.required)
            for rank in range(pp)
        ),
        capacity=simulator.forecast_placed(placed).capacity,
        shown_micro_batches=shown,
        micro_batch_count=layout.micro_batches,
        nodes=-(-plan.ranks // ranks_per_node),
        ranks_per_node=ranks_per_node,
    )
