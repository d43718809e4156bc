"""What takes the place of a plan that this model cannot follow, on the same ranks.

Where an axis finds nothing to cut: data parallelism, sharded where that is possible. Where a setting alone is in the way: the plan without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.plan.problem import Problem
from echelon.plan.profile import Profile


def fall_back_to_data_parallel(plan: Plan, profile: Profile | None) -> tuple[Plan, str]:
    """As many data ranks under zero=3, or with the whole model each where it cannot be sharded; and what that means.

    The samples that go together stay so: micro-batches and the groups of batch norms are as large as they were where they can be.
    """
    shards_as_one, has_batch_norms = (
        profile is None or bool(profile.varying_blocks_reason),
        profile is None or bool(profile.batch_norms),
    )
    unsharded = profile.unshardable_reason if profile is not None else ""
    ranks, dp = plan.ranks, plan.mesh.dp
    fallback = plan.replace(
        mesh=Mesh(dp=ranks),
        zero=0 if unsharded else 3,
        shard_as_one=not unsharded and (shards_as_one or plan.data.shard_as_one),
        keep_gradients=not unsharded and plan.data.keep_gradients,
        micro=None if plan.micro is None else max(plan.micro * dp // ranks, 1),
        batchnorm="sync" if has_batch_norms and dp == 1 else plan.batchnorm,
        placements=(),
        replicated=(),
        sequence=False,
        segments=(),
        stages=(),
        schedule="1f1b",
    )
    explanation = "which shares the memory too"
    if unsharded:
        explanation = f"where every rank has the whole model, because it cannot be sharded either ({unsharded})"
    keeps_norm_groups = fallback.batchnorm == "sync" and (plan.micro is None or plan.micro * dp % ranks == 0)
    if has_batch_norms and profile is not None and not keeps_norm_groups:
        explanation += " but has batch norms look at other groups of samples"
    return fallback, explanation


def apply_problem_changes(plan: Plan, problems: Iterable[Any]) -> tuple[Plan, str] | None:
    """`plan` with the changes that its problems name, and why; None where one of them names none."""
    errors = [each for each in problems if isinstance(each, Problem) and each.severity == "error"]
    if not errors or not all(each.plan_changes for each in errors):
        return None
    # What shards nothing needs no other way to shard.
    changes = dict(
        sorted((change for each in errors for change in each.plan_changes), key=lambda each: each[0] == "zero")
    )
    if changes.get("zero") == 0:
        changes |= {"shard_as_one": False, "keep_gradients": False}
    adapted = plan.replace(**changes)
    return adapted, "; ".join(f"{each.path}={each.value}: {each.rule}" for each in errors)
