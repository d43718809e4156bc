"""Where the stages of a pipeline begin. Pure; stages are runs of visits, in the order of forward's calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence, Set
from functools import partial
from itertools import accumulate, pairwise
from math import inf

from echelon.plan.placement import Placement
from echelon.plan.plan import Plan
from echelon.plan.profile import PipelineUnit

#: Stages per rank of schedules that interleave them.
INTERLEAVED_STAGES_PER_RANK = 2
INTERLEAVED_SCHEDULES = ("interleaved", "zero-bubble")

#: Why a model has no visits.
NO_STAGES_REASON = (
    "the model cannot be cut into stages: it is a single module, its data decide what is called, or forward takes a derivative, changes a "
    "buffer between modules, or reads one there that a module changes"
)


def stage_count(plan: Plan) -> int:
    """How many stages a plan has, or will have once it is completed."""
    return (
        len(plan.pipeline.stages) + 1
        if plan.pipeline.stages
        else plan.mesh.pp * (INTERLEAVED_STAGES_PER_RANK if plan.pipeline.schedule in INTERLEAVED_SCHEDULES else 1)
    )


def stage_ranges(plan: Plan, unit_count: int) -> list[range]:
    """The visits of each stage; stage `n` is on rank `n % pp` of the axis."""
    return [range(first, last) for first, last in pairwise((0, *plan.pipeline.stages, unit_count))]


def column_row_pairs(plan: Plan) -> Iterator[tuple[list[Placement], Placement]]:
    """(columns, row) as they were placed: columns first, their row next."""
    columns: list[Placement] = []
    for placement in plan.tensor.placements:
        if placement.cut in ("column", "between"):
            columns.append(placement)
        elif placement.cut == "row":
            yield columns, placement
            columns = []


def forbidden_stage_starts(plan: Plan, pipeline_units: Sequence[PipelineUnit]) -> set[int]:
    """The places where no stage may begin: what is cut between a column and its row must not pass from one stage to another, and what
    changes a buffer must have one copy of it."""
    forbidden: set[int] = set()
    inseparable_groups = [{each.path for each in (*columns, row)} for columns, row in column_row_pairs(plan)]
    inseparable_groups += [{unit.path} for unit in pipeline_units if unit.changes_buffers]
    for paths in inseparable_groups:
        # What is cut may lie inside a unit.
        indices = [
            index
            for index, unit in enumerate(pipeline_units)
            if any(f"{each}.".startswith(f"{unit.path}.") for each in paths)
        ]
        forbidden |= set(range(min(indices) + 1, max(indices) + 1)) if indices else set()
    return forbidden


def find_stages(
    plan: Plan, pipeline_units: Sequence[PipelineUnit], stage_slowdowns: Sequence[float] = ()
) -> tuple[int, ...] | None:
    """Where the stages of `plan` begin, but the first; None: there are too few places. `stage_slowdowns`: see `balance_stages`."""
    return balance_stages(
        [unit.cost for unit in pipeline_units],
        stage_count(plan),
        forbidden_stage_starts(plan, pipeline_units),
        stage_slowdowns,
    )


def balance_stages(
    weights: Sequence[float],
    total_stages: int,
    forbidden: Set[int] = frozenset(),
    stage_slowdowns: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """Where `total_stages` stages of consecutive visits begin, but the first, such that the slowest is as fast as can be; none begins at a
    place in `forbidden`. None: that cannot be. `stage_slowdowns`: how long a weight of 1 takes on each stage, where devices differ."""
    slowdowns = stage_slowdowns or [1.0] * total_stages
    prefix_sums = [0.0, *accumulate(weights)]
    unit_count = len(weights)
    allowed = [position for position in range(1, unit_count) if position not in forbidden]
    #: For each number of stages: (slowest stage, where the last one begins) over the first n visits.
    best: list[list[tuple[float, int]]] = [[(prefix_sums[n] * slowdowns[0], 0) for n in range(unit_count + 1)]]
    for stage in range(1, total_stages):
        previous = best[-1]
        best_splits = [(inf, 0)] * (unit_count + 1)
        starts = allowed[bisect_left(allowed, stage) :]
        for end in range(stage + 1, unit_count + 1):
            if stage_slowdowns:
                # A stage of its own for one visit more may be a slow one: that others get slower is not certain.
                candidates = [start for start in starts if start < end]
            else:
                # Where the last stage begins later it is faster and those before it are slower: the best place is where that turns.
                crossover = bisect_left(starts, True, key=partial(_last_stage_not_slower, previous, prefix_sums, end))
                candidates = [start for start in starts[max(crossover - 1, 0) : crossover + 1] if start < end]
            best_splits[end] = min(
                (
                    (max(previous[start][0], (prefix_sums[end] - prefix_sums[start]) * slowdowns[stage]), start)
                    for start in candidates
                ),
                default=(inf, 0),
            )
        best.append(best_splits)
    if best[-1][unit_count][0] == inf:
        return None
    stage_starts, end = [], unit_count
    for stage in range(total_stages - 1, 0, -1):
        end = best[stage][end][1]
        stage_starts.append(end)
    return tuple(reversed(stage_starts))


def _last_stage_not_slower(previous: list[tuple[float, int]], prefix_sums: list[float], end: int, start: int) -> bool:
    """Whether a last stage from `start` to `end` is no slower than the slowest before it."""
    slowest = previous[start][0]
    # Where those before cannot be made yet a later place may do.
    return start >= end or (slowest < inf and slowest >= prefix_sums[end] - prefix_sums[start])
