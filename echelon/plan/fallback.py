"""What takes the place of a plan whose axes find nothing to cut: sharded data parallelism over the same ranks."""

from __future__ import annotations

from dataclasses import replace

from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan


def shared(plan: Plan, *, whole: bool) -> Plan:
    """zero=3 over as many data ranks; `whole`: with the model as one unit, where samples may decide which blocks run."""
    return replace(
        plan,
        mesh=Mesh(dp=plan.ranks),
        zero=3,
        whole=whole or plan.whole,
        micro=None,
        placements=(),
        uncut=(),
        sequence=False,
        segments=(),
        stages=(),
        schedule=Plan().schedule,
    )
