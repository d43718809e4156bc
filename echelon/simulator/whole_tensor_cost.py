"""What optimizers cost that step on gathered whole tensors: the exchange, the owner's share of the step, its copies and state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.plan.plan import Plan
from echelon.plan.profile import Profile, Reads, Rule
from echelon.plan.whole_tensor_rules import gathered_axes, one_owner

#: Gradients and values go to the owners, values come back.
MESSAGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """What a rank owns of an optimizer's tensors, of the owners the one with most."""

    share: float  #: of the whole model's tensors: one exchange carries as much to the owner, as a gather over `ranks`
    ranks: int  #: that a tensor is gathered over


def owned(plan: Plan, reads: Reads, draws: bool) -> Owned | None:
    """None: the optimizer steps on what each rank holds."""
    axes = gathered_axes(plan, reads, draws)
    if not axes:
        return None
    ranks = math.prod(getattr(plan.mesh, axis) for axis in axes)
    # Stages are taken as equal.
    here = 1.0 if "pp" in axes else 1 / plan.mesh.pp
    share = here if one_owner(reads, draws) else here / ranks
    return Owned(share=share, ranks=ranks)


def trained_share(profile: Profile, rule: Rule) -> float:
    """Of the trained elements, those of this optimizer."""
    return rule.elements / max(sum(each.elements for each in profile.optimizers), 1)


def owner_bytes(whole: Profile, part: Profile, plan: Plan) -> tuple[float, float]:
    """(bytes that an owner keeps beyond what its shards' state would take, bytes that a step adds for gathered gradients)."""
    kept = added = 0.0
    for rule, mine in zip(whole.optimizers, part.optimizers, strict=True):
        found = owned(plan, rule.reads, rule.draws)
        if found is not None:
            size = found.share * trained_share(whole, rule) * whole.gradient_bytes
            kept += size + found.share * rule.state - mine.state / (plan.mesh.dp if plan.sharded else 1)
            added += size
    return kept, added
