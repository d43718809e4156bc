"""Which optimizers step on gathered full tensors, and over which axes these are gathered."""

from __future__ import annotations

from echelon.plan.plan import Plan
from echelon.plan.profile import UpdateScope


def gathered_axes(plan: Plan, reads: UpdateScope, draws: bool) -> tuple[str, ...]:
    """The axes over which an optimizer's tensors are gathered for its step; empty: it steps on local shards.

    reads               zero 1-3   tp        pp
    element             -          -         -
    tensor              dp         tp        -      tensors are distributed over the ranks that share them
    model, or draws     dp         tp        pp     one rank steps all of them
    """
    if reads == "element" and not draws:
        return ()
    axes = [axis for axis, cut in (("dp", plan.is_sharded), ("tp", plan.mesh.tp > 1)) if cut]
    if needs_single_owner(reads, draws) and plan.mesh.pp > 1:
        axes.append("pp")
    return tuple(axes)


def needs_single_owner(reads: UpdateScope, draws: bool) -> bool:
    """Whether one rank must step all of the optimizer's tensors: they depend on each other, or on the order of random draws."""
    return reads == "model" or draws
