"""What optimizers cost that step on gathered whole tensors: the exchange, the owner's share of the step, its copies and state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.plan.plan import Plan
from echelon.plan.profile import OptimizerProfile, Profile, UpdateScope
from echelon.plan.whole_tensor_rules import gathered_axes, needs_single_owner

#: Gradients and values go to the owners, values come back.
TRANSFERS_PER_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTensors:
    """What a rank owns of an optimizer's tensors, of the owners the one with most."""

    fraction: (
        float  #: of the whole model's tensors: one exchange carries as much to the owner, as a gather over `ranks`
    )
    ranks: int  #: that a tensor is gathered over


def find_owned_tensors(plan: Plan, reads: UpdateScope, draws: bool) -> OwnedTensors | None:
    """None: the optimizer steps on what each rank holds."""
    axes = gathered_axes(plan, reads, draws)
    if not axes:
        return None
    ranks = math.prod(getattr(plan.mesh, axis) for axis in axes)
    # Stages are taken as equal.
    stage_fraction = 1.0 if "pp" in axes else 1 / plan.mesh.pp
    fraction = stage_fraction if needs_single_owner(reads, draws) else stage_fraction / ranks
    return OwnedTensors(fraction=fraction, ranks=ranks)


def trained_fraction(profile: Profile, optimizer: OptimizerProfile) -> float:
    """Of the trained elements, those of this optimizer."""
    return optimizer.trainable_elements / max(sum(other.trainable_elements for other in profile.optimizers), 1)


def owner_bytes(full_profile: Profile, rank_profile: Profile, plan: Plan) -> tuple[float, float]:
    """(bytes that an owner keeps beyond what its shards' state would take, bytes that a step adds for gathered gradients)."""
    kept_bytes = step_bytes = 0.0
    for optimizer, rank_optimizer in zip(full_profile.optimizers, rank_profile.optimizers, strict=True):
        owned = find_owned_tensors(plan, optimizer.update_scope, optimizer.uses_rng)
        if owned is not None:
            size = owned.fraction * trained_fraction(full_profile, optimizer) * full_profile.gradient_bytes
            kept_bytes += (
                size
                + owned.fraction * optimizer.state_bytes
                - rank_optimizer.state_bytes / (plan.mesh.dp if plan.is_sharded else 1)
            )
            step_bytes += size
    return kept_bytes, step_bytes
