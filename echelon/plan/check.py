"""Can this plan be executed? Every reason why not, each with where, what, the rule and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster
from echelon.plan.plan import Plan, Precision
from echelon.plan.profile import Profile

#: More ranks than cores prove numbers and memory, not speed; beyond this many per core a machine only thrashes.
RANKS_PER_CORE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One reason. An `error` cannot be executed; a `warning` can, but not as its author may think."""

    path: str
    value: object
    rule: str
    remedy: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.path}={self.value}: {self.rule}; {self.remedy}"


def check(plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None) -> tuple[Problem, ...]:
    """Every problem of `plan`, for a model and for devices where they are given."""
    found = list(_alone(plan))
    if profile is not None:
        found += _with_model(plan, profile)
    if cluster is not None:
        found += _with_devices(plan, cluster, plan.precision or (profile.precision if profile is not None else None))
    return tuple(found)


def require(plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None) -> tuple[Problem, ...]:
    """Raise if the plan cannot be executed; returns the warnings."""
    problems = check(plan, profile, cluster)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise PlanError(
            f'plan "{plan}" cannot be executed:\n' + "\n".join(f"  {problem}" for problem in errors), errors
        )
    return tuple(problem for problem in problems if problem.severity == "warning")


def _alone(plan: Plan) -> Iterator[Problem]:
    for axis, name in (("cp", "context"), ("ep", "expert")):
        size = getattr(plan.mesh, axis)
        if size > 1:
            yield Problem(
                path=axis, value=size, rule=f"the {name} axis is not executed yet", remedy=f"use dp instead of {axis}"
            )
    if plan.keep_gradients and plan.zero < 2:
        yield Problem(
            path="keep_gradients", value=True, rule=f"zero={plan.zero} keeps full gradients as it is",
            remedy="leave `keep` out, or use zero=2 or 3",
        )  # fmt: skip
    if plan.zero and plan.mesh.dp == 1:
        yield Problem(
            path="zero", value=plan.zero, rule="one data rank has nothing to shard over", remedy="it runs as zero=0",
            severity="warning",
        )  # fmt: skip


def _with_model(plan: Plan, profile: Profile) -> Iterator[Problem]:
    dp, batch = plan.mesh.dp, profile.batch
    if plan.model is not None and plan.model != profile.model:
        yield Problem(
            path="model", value=plan.model[:12], rule=f"this model is {profile.model[:12]}: the plan was made for another",
            remedy="plan again: echelon plan FILE",
        )  # fmt: skip
    if batch < dp:
        yield Problem(
            path="dp", value=dp, rule=f"a batch of {batch} gives some rank no sample", remedy=f"use dp={batch} or less"
        )
        return
    share = -(-batch // dp)
    if plan.micro is not None and plan.micro > share:
        yield Problem(
            path="micro", value=plan.micro, rule=f"a rank's share of batch={batch} over dp={dp} is {share} sample{'s' * (share > 1)}",
            remedy=f"use micro={share} or less",
        )  # fmt: skip
    if profile.coupled and (dp > 1 or (plan.micro is not None and plan.micro < batch)):
        parted = ("dp", dp) if dp > 1 else ("micro", plan.micro)
        yield Problem(
            path=parted[0], value=parted[1], rule="a sample's loss depends on the others of its batch: in parts another objective is trained",
            remedy="use dp=1 without micro; or give the loss as (sum, count) if it is a mean over unequal numbers of items",
        )  # fmt: skip
    if 0 < profile.samples < batch:
        yield Problem(
            path="batch", value=batch, rule=f"the data set has {profile.samples:,} sample{'s' * (profile.samples > 1)}: a step takes them all, an epoch is one step",
            remedy=f"say batch={profile.samples} if that is meant", severity="warning",
        )  # fmt: skip
    tail = profile.samples % batch if profile.samples else 0
    if 0 < tail < dp:
        yield Problem(
            path="dp", value=dp, rule=f"the last batch of an epoch has {tail} of {profile.samples:,} samples",
            remedy=f"use dp={tail} or less, or another batch",
        )  # fmt: skip
    if plan.zero and dp > 1 and not plan.whole and profile.traced == "real":
        yield Problem(
            path="zero", value=plan.zero,
            rule="the model could not be traced: if its samples decide which blocks run, ranks would wait for each other for ever",
            remedy="add `whole`, or use zero=0",
        )  # fmt: skip
    if plan.precision not in (None, profile.precision):
        yield Problem(
            path="precision", value=plan.precision, rule=f"the job asks for {profile.precision}",
            remedy=f"use precision={profile.precision}, or change the job", severity="warning",
        )  # fmt: skip


def _with_devices(plan: Plan, cluster: Cluster, precision: Precision | None) -> Iterator[Problem]:
    if cluster.kind != "cpu":
        if plan.ranks > cluster.ranks:
            yield Problem(
                path="dp", value=plan.mesh.dp, rule=f"the plan needs {plan.ranks} devices and there are {cluster.ranks}",
                remedy=f"use dp={cluster.ranks} or less",
            )  # fmt: skip
        return
    cores = cluster.cores
    threads = plan.threads or max(cores // plan.ranks, 1)
    if plan.ranks > RANKS_PER_CORE * cores:
        yield Problem(
            path="dp", value=plan.mesh.dp, rule=f"the plan needs {plan.ranks} devices and there are {cores} cores",
            remedy=f"use dp={cores} or less ({RANKS_PER_CORE} ranks per core at the very most, to prove numbers)",
        )  # fmt: skip
    elif plan.ranks * threads > cores:
        yield Problem(
            path="threads", value=threads, rule=f"{plan.ranks} ranks x {threads} threads share {cores} cores",
            remedy="right numbers, but slower than fewer ranks", severity="warning",
        )  # fmt: skip
    if precision in ("bf16", "fp16") and precision not in cluster.nodes[0].devices[0].instructions:
        yield Problem(
            path="precision", value=precision, rule=f"this CPU has no {precision} instructions: about 100 times slower",
            remedy="use precision=fp32", severity="warning",
        )  # fmt: skip
