"""Where the stages of a pipeline begin. A stage is a run of units, in the order of forward's calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence, Set
from functools import partial
from itertools import accumulate, pairwise
from math import inf

from echelon.plan.placement import Placement
from echelon.plan.plan import Plan
from echelon.plan.profile import PipelineUnit, is_within

#: Stages per rank of schedules that interleave them.
INTERLEAVED_STAGES_PER_RANK = 2
INTERLEAVED_SCHEDULES = ("interleaved", "zero-bubble")

#: Why a model has no units.
NO_STAGES_REASON = (
    "the model cannot be cut into stages: it is a single module, its data decide what is called, or forward takes a derivative, changes a "
    "buffer between modules, or reads one there that a module changes"
)


def stage_count(plan: Plan) -> int:
    """How many stages a plan has, or will have once it is completed."""
    if plan.pipeline.stages:
        return len(plan.pipeline.stages) + 1
    return plan.mesh.pp * (INTERLEAVED_STAGES_PER_RANK if plan.pipeline.schedule in INTERLEAVED_SCHEDULES else 1)


def stage_ranges(plan: Plan, unit_count: int) -> list[range]:
    """The units of each stage; stage `n` is on rank `n % pp` of the axis."""
    return [range(first, last) for first, last in pairwise((0, *plan.pipeline.stages, unit_count))]


def column_row_pairs(plan: Plan) -> Iterator[tuple[list[Placement], Placement]]:
    """(columns, row) in the order of the placements: columns precede their row."""
    columns: list[Placement] = []
    for placement in plan.tensor.placements:
        if placement.cut in ("column", "between"):
            columns.append(placement)
        elif placement.cut == "row":
            yield columns, placement
            columns = []


def forbidden_stage_starts(plan: Plan, pipeline_units: Sequence[PipelineUnit]) -> set[int]:
    """Units at which no stage may begin: shards between a column and its row must not cross a stage boundary, and a module that changes a
    buffer must exist once."""
    forbidden: set[int] = set()
    inseparable_groups = [{placement.path for placement in (*columns, row)} for columns, row in column_row_pairs(plan)]
    inseparable_groups += [{unit.path} for unit in pipeline_units if unit.changes_buffers]
    for paths in inseparable_groups:
        units = enumerate(pipeline_units)
        indices = [index for index, unit in units if any(is_within(path, unit.path) for path in paths)]
        forbidden |= set(range(min(indices) + 1, max(indices) + 1)) if indices else set()
    return forbidden


def find_stages(
    plan: Plan, pipeline_units: Sequence[PipelineUnit], stage_slowdowns: Sequence[float] = ()
) -> tuple[int, ...] | None:
    """The stage starts of `plan` (see `balance_stages`), the first aside; None: too few places."""
    costs = [unit.cost for unit in pipeline_units]
    return balance_stages(costs, stage_count(plan), forbidden_stage_starts(plan, pipeline_units), stage_slowdowns)


def balance_stages(
    weights: Sequence[float],
    total_stages: int,
    forbidden: Set[int] = frozenset(),
    stage_slowdowns: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """Where `total_stages` runs of consecutive units begin, the first aside, such that the slowest is as fast as possible; none begins at an
    index in `forbidden`. None: impossible. `stage_slowdowns`: how long a weight of 1 takes on each stage, where devices differ."""
    slowdowns = stage_slowdowns or [1.0] * total_stages
    sums, count = [0.0, *accumulate(weights)], len(weights)
    allowed = [position for position in range(1, count) if position not in forbidden]
    #: For each number of stages: (slowest stage, start of the last one) over the first n units.
    best: list[list[tuple[float, int]]] = [[(sums[n] * slowdowns[0], 0) for n in range(count + 1)]]
    for stage in range(1, total_stages):
        previous, splits = best[-1], [(inf, 0)] * (count + 1)
        starts = allowed[bisect_left(allowed, stage) :]
        for end in range(stage + 1, count + 1):
            candidates = starts  # with unequal devices, one unit more may move the slowest stage to a faster device
            if not stage_slowdowns:
                # A later start makes the last stage faster and those before it slower: the best is where that crosses over.
                crossover = bisect_left(starts, True, key=partial(_last_stage_not_slower, previous, sums, end))
                candidates = starts[max(crossover - 1, 0) : crossover + 1]
            last_stages = ((start, (sums[end] - sums[start]) * slowdowns[stage]) for start in candidates if start < end)
            splits[end] = min(((max(previous[start][0], last), start) for start, last in last_stages), default=(inf, 0))
        best.append(splits)
    if best[-1][count][0] == inf:
        return None
    stage_starts, end = [], count
    for stage in range(total_stages - 1, 0, -1):
        end = best[stage][end][1]
        stage_starts.append(end)
    return tuple(reversed(stage_starts))


def _last_stage_not_slower(previous: list[tuple[float, int]], sums: list[float], end: int, start: int) -> bool:
    """Whether a last stage from `start` to `end` is no slower than the slowest before it."""
    slowest = previous[start][0]
    # An infinite value means too few units for the stages before: a later start may do.
    return start >= end or (slowest < inf and slowest >= sums[end] - sums[start])
