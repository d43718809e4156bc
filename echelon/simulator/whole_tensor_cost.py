"""Which tensors a rank owns under optimizers that step on gathered full tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.plan.plan import Plan
from echelon.plan.profile import UpdateScope
from echelon.plan.whole_tensor_rules import gathered_axes, needs_single_owner

#: Gradients and values go to the owners, values return.
TRANSFERS_PER_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTensors:
    """Figures of the rank that owns most."""

    fraction: float  #: of all tensors of the model
    ranks: int  #: over which a tensor is gathered


def find_owned_tensors(plan: Plan, reads: UpdateScope, draws: bool) -> OwnedTensors | None:
    """None: the optimizer steps on the shards of each rank."""
    axes = gathered_axes(plan, reads, draws)
    if not axes:
        return None
    ranks = math.prod(getattr(plan.mesh, axis) for axis in axes)
    # Stages are assumed to be equal.
    stage_fraction = 1.0 if "pp" in axes else 1 / plan.mesh.pp
    fraction = stage_fraction if needs_single_owner(reads, draws) else stage_fraction / ranks
    return OwnedTensors(fraction=fraction, ranks=ranks)
