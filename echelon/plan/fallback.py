"""What takes the place of a plan whose axes find nothing to cut: data parallelism over the same ranks, sharded where that is possible."""

from __future__ import annotations

from dataclasses import replace

from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan


def shared(plan: Plan, *, whole: bool) -> Plan:
    """zero=3 over as many data ranks; `whole`: with the model as one unit, where samples may decide which blocks run."""
    return replace(copied(plan), zero=3, whole=whole or plan.whole, keep_gradients=plan.keep_gradients)


def copied(plan: Plan) -> Plan:
    """As many data ranks, each with the whole model."""
    return replace(
        plan,
        mesh=Mesh(dp=plan.ranks),
        zero=0,
        whole=False,
        keep_gradients=False,
        micro=None,
        placements=(),
        uncut=(),
        sequence=False,
        segments=(),
        stages=(),
        schedule=Plan().schedule,
    )
