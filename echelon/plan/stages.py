"""Where the stages of a pipeline begin. Pure; stages are runs of visits, in the order of forward's calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from echelon.plan.plan import Plan

#: Stages per rank of schedules that interleave them.
VIRTUAL = 2
INTERLEAVING = ("interleaved", "zero-bubble")


def stage_count(plan: Plan) -> int:
    """How many stages a plan has, or will have once it is completed."""
    return len(plan.stages) + 1 if plan.stages else plan.mesh.pp * (VIRTUAL if plan.schedule in INTERLEAVING else 1)


def stage_ranges(plan: Plan, visits: int) -> list[range]:
    """The visits of each stage; stage `n` is on rank `n % pp` of the axis."""
    return [range(first, last) for first, last in pairwise((0, *plan.stages, visits))]


def divide(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Where `count` stages of consecutive visits begin, but the first, such that the heaviest is as light as can be."""
    sums = [0.0, *accumulate(weights)]
    size = len(weights)
    #: best[n]: (heaviest stage, where the last one begins) for the first n visits
    best: list[list[tuple[float, int]]] = [[(sums[n], 0) for n in range(size + 1)]]
    for stage in range(1, count):
        row = [(float("inf"), 0)] * (size + 1)
        for end in range(stage + 1, size + 1):
            row[end] = min((max(best[-1][begin][0], sums[end] - sums[begin]), begin) for begin in range(stage, end))
        best.append(row)
    bounds, end = [], size
    for stage in range(count - 1, 0, -1):
        end = best[stage][end][1]
        bounds.append(end)
    return tuple(reversed(bounds))
