"""Where the stages of a pipeline begin. Pure; stages are runs of visits, in the order of forward's calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence, Set
from functools import partial
from itertools import accumulate, pairwise
from math import inf

from echelon.plan.placement import Placement
from echelon.plan.plan import Plan
from echelon.plan.profile import Visit

#: Stages per rank of schedules that interleave them.
VIRTUAL = 2
INTERLEAVING = ("interleaved", "zero-bubble")

#: Why a model has no visits.
UNCUT = (
    "the model cannot be cut into stages: it is a single module, its data decide what is called, or forward takes a derivative, changes a "
    "buffer between modules, or reads one there that a module changes"
)


def stage_count(plan: Plan) -> int:
    """How many stages a plan has, or will have once it is completed."""
    return len(plan.stages) + 1 if plan.stages else plan.mesh.pp * (VIRTUAL if plan.schedule in INTERLEAVING else 1)


def stage_ranges(plan: Plan, visits: int) -> list[range]:
    """The visits of each stage; stage `n` is on rank `n % pp` of the axis."""
    return [range(first, last) for first, last in pairwise((0, *plan.stages, visits))]


def pairs(plan: Plan) -> Iterator[tuple[list[Placement], Placement]]:
    """(columns, row) as they were placed: columns first, their row next."""
    columns: list[Placement] = []
    for each in plan.placements:
        if each.cut in ("column", "between"):
            columns.append(each)
        elif each.cut == "row":
            yield columns, each
            columns = []


def bound(plan: Plan, visits: Sequence[Visit]) -> set[int]:
    """The places where no stage may begin: what is cut between a column and its row must not pass from one stage to another, and what
    changes a buffer must have one copy of it."""
    found: set[int] = set()
    together = [{each.path for each in (*columns, row)} for columns, row in pairs(plan)]
    together += [{visit.path} for visit in visits if visit.changes]
    for paths in together:
        # What is cut may lie inside a unit.
        places = [
            at for at, visit in enumerate(visits) if any(f"{each}.".startswith(f"{visit.path}.") for each in paths)
        ]
        found |= set(range(min(places) + 1, max(places) + 1)) if places else set()
    return found


def find_stages(plan: Plan, visits: Sequence[Visit], pace: Sequence[float] = ()) -> tuple[int, ...] | None:
    """Where the stages of `plan` begin, but the first; None: there are too few places. `pace`: see `divide`."""
    return divide([visit.work for visit in visits], stage_count(plan), bound(plan, visits), pace)


def divide(
    weights: Sequence[float], count: int, bound: Set[int] = frozenset(), pace: Sequence[float] = ()
) -> tuple[int, ...] | None:
    """Where `count` stages of consecutive visits begin, but the first, such that the slowest is as fast as can be; none begins at a
    place in `bound`. None: that cannot be. `pace`: how long a weight of 1 takes on each stage, where devices differ."""
    paces = pace or [1.0] * count
    sums = [0.0, *accumulate(weights)]
    size = len(weights)
    allowed = [place for place in range(1, size) if place not in bound]
    #: For each number of stages: (slowest stage, where the last one begins) over the first n visits.
    best: list[list[tuple[float, int]]] = [[(sums[n] * paces[0], 0) for n in range(size + 1)]]
    for stage in range(1, count):
        before = best[-1]
        row = [(inf, 0)] * (size + 1)
        places = allowed[bisect_left(allowed, stage) :]
        for end in range(stage + 1, size + 1):
            if pace:
                # A stage of its own for one visit more may be a slow one: that others get slower is not certain.
                near = [b for b in places if b < end]
            else:
                # Where the last stage begins later it is faster and those before it are slower: the best place is where that turns.
                turn = bisect_left(places, True, key=partial(_turned, before, sums, end))
                near = [b for b in places[max(turn - 1, 0) : turn + 1] if b < end]
            row[end] = min(
                ((max(before[b][0], (sums[end] - sums[b]) * paces[stage]), b) for b in near), default=(inf, 0)
            )
        best.append(row)
    if best[-1][size][0] == inf:
        return None
    bounds, end = [], size
    for stage in range(count - 1, 0, -1):
        end = best[stage][end][1]
        bounds.append(end)
    return tuple(reversed(bounds))


def _turned(before: list[tuple[float, int]], sums: list[float], end: int, begin: int) -> bool:
    """Whether a last stage from `begin` to `end` is no slower than the slowest before it."""
    slowest = before[begin][0]
    # Where those before cannot be made yet a later place may do.
    return begin >= end or (slowest < inf and slowest >= sums[end] - sums[begin])
