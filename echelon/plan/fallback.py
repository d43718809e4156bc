"""The plan that replaces one which this model cannot follow, on the same ranks.

If an axis has nothing to cut, it is data parallelism, sharded where possible. If a setting is in the way, it is the plan without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from echelon.plan.mesh import Mesh
from echelon.plan.plan import PipelinePlan, Plan, TensorPlan
from echelon.plan.problem import Problem
from echelon.plan.profile import Profile


def fall_back_to_data_parallel(plan: Plan, profile: Profile | None) -> tuple[Plan, str]:
    """As many data ranks under zero=3, or with the whole model each where it cannot be sharded; and what that means.

    Micro-batches and the groups of samples that batch norms see keep their size where possible.
    """
    shards_as_one = profile is None or bool(profile.varying_blocks_reason)
    has_batch_norms = profile is None or bool(profile.batch_norms)
    obstacle = profile.unshardable_reason if profile is not None else ""
    ranks, dp = plan.ranks, plan.mesh.dp
    fallback = plan.replace(
        mesh=Mesh(dp=ranks),
        zero=0 if obstacle else 3,
        shard_as_one=not obstacle and (shards_as_one or plan.data.shard_as_one),
        keep_gradients=not obstacle and plan.data.keep_gradients,
        micro=None if plan.micro is None else max(plan.micro * dp // ranks, 1),
        batchnorm="sync" if has_batch_norms and dp == 1 else plan.batchnorm,
        tensor=TensorPlan(),
        pipeline=PipelinePlan(),
    )
    explanation = "which shares the memory too"
    if obstacle:
        explanation = f"where every rank has the whole model, because it cannot be sharded either ({obstacle})"
    keeps_norm_groups = fallback.batchnorm == "sync" and (plan.micro is None or plan.micro * dp % ranks == 0)
    if has_batch_norms and profile is not None and not keeps_norm_groups:
        explanation += " but has batch norms look at other groups of samples"
    return fallback, explanation


def apply_problem_changes(plan: Plan, problems: Iterable[Any]) -> tuple[Plan, str] | None:
    """`plan` with the changes that its problems suggest, and why; None where one of them suggests none."""
    errors = [problem for problem in problems if isinstance(problem, Problem) and problem.severity == "error"]
    if not errors or not all(problem.plan_changes for problem in errors):
        return None
    # zero=0 last: without shards the other changes of sharding have no effect.
    all_changes = [change for problem in errors for change in problem.plan_changes]
    changes = dict(sorted(all_changes, key=lambda change: change[0] == "zero"))
    if changes.get("zero") == 0:
        changes |= {"shard_as_one": False, "keep_gradients": False}
    return plan.replace(**changes), "; ".join(f"{each.path}={each.value}: {each.rule}" for each in errors)
