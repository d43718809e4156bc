"""What a pipeline's schedule costs: how long ranks wait for each other, and how many micro-batches wait for their backward."""

from __future__ import annotations

from echelon.plan.plan import Plan
from echelon.plan.stages import INTERLEAVING, stage_count

#: Of an interleaved schedule's bubble, what is left when the weights' part of backward fills it (zero bubble, Qi et al. 2023: about a third).
_FILLED = 1 / 3


def runs_as(plan: Plan, count: int) -> str:
    """The schedule that `count` micro-batches get: too few of them are run all forwards first, then all backwards, as gpipe does."""
    several = plan.schedule in INTERLEAVING
    return "gpipe" if count < stage_count(plan) or (several and count % plan.mesh.pp) else plan.schedule


def bubble(plan: Plan, count: int) -> float:
    """Time in which a rank waits for others, as a share of the time in which it computes."""
    pp = plan.mesh.pp
    idle = (pp - 1) / count
    if plan.schedule in INTERLEAVING:
        idle *= pp / stage_count(plan)  # the pipe fills with smaller stages
    return idle * (_FILLED if runs_as(plan, count) == "zero-bubble" else 1.0)


def in_flight(plan: Plan, count: int, rank: int) -> float:
    """How many of `count` micro-batches wait for their backward at once on a rank of pp, in activations of all its stages."""
    pp = plan.mesh.pp
    if pp == 1:
        return 1.0
    kind = runs_as(plan, count)
    if kind == "gpipe":
        return float(count)
    if kind == "1f1b":
        return float(min(count, pp - rank))
    # Before its first backward a rank has run this many of its stages' forwards (Narayanan et al. 2021).
    each = stage_count(plan) // pp
    return min(count * each, 2 * (pp - rank - 1) + (each - 1) * pp + 1) / each
