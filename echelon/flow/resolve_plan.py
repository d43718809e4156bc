"""From a job to a plan: check a requested plan, or profile the job, measure the machine and search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import PlanError
from echelon.flow.job_source import JobSource
from echelon.plan.check import require_executable
from echelon.plan.cluster import Cluster
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.text import from_text

if TYPE_CHECKING:
    from echelon.plan.forecast import Forecast
    from echelon.planner import Candidate

PlanLike = Plan | str | None

#: Beside the plan that is handed over: why it is not the one that was asked for.
_FALLBACK_FILE = "fallback.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPlan:
    """A plan that may be executed, and what is known about it."""

    plan: Plan
    profile: Profile | None = None
    cluster: Cluster | None = None
    forecast: Forecast | None = None
    candidates: tuple[Candidate, ...] = ()
    warnings: tuple[str, ...] = ()
    #: Why this is not the plan that was asked for; one of the warnings.
    fallback: str = ""
    #: Whether it replaces a plan that the user gave and that was disproved before it trained.
    is_fallback: bool = False

    def save_for_ranks(self, folder: Path) -> Path:
        """Write to `folder` what ranks need so as not to make it again; the path of the plan, for `load_resolved_plan`."""
        for document in (self.plan, self.profile, self.cluster):
            if document is not None:
                document.save(folder / f"{document.KIND}.json")
        if self.fallback:
            (folder / _FALLBACK_FILE).write_text(self.fallback, encoding="utf-8")
        return folder / f"{Plan.KIND}.json"


def parse_plan(requested: PlanLike) -> Plan | None:
    """A plan given as such, in short form or as a file; None for `auto`."""
    if requested is None or requested == "auto":
        return None
    if isinstance(requested, str):
        if requested.endswith(".json") or Path(requested).is_file():
            return Plan.load(requested)
        return from_text(requested)
    if not isinstance(requested, Plan):
        raise PlanError(f'plan={requested!r}: give a Plan, its short form ("dp=2 zero=1"), a plan file, or auto')
    return requested


def resolve_plan(
    job_source: JobSource, requested: PlanLike = None, *, ranks: int | None = None, top: int = 5
) -> ResolvedPlan:
    """The plan that was asked for, or the best one; `ranks` where their number is given."""
    plan = parse_plan(requested)
    if plan is not None:
        return _resolve_given_plan(job_source, plan)
    from echelon.hardware import measure
    from echelon.planner import search

    profile, cluster = job_source.profile(), measure()
    candidates = search(profile, cluster, top=top, ranks=ranks, complete=job_source.complete_plan)
    best = candidates[0]
    warnings = require_executable(best.plan, profile, cluster)
    return ResolvedPlan(
        plan=best.plan, profile=profile, cluster=cluster, forecast=best.forecast, candidates=candidates,
        warnings=(*map(str, warnings), *job_source.warnings),
    )  # fmt: skip


def _resolve_given_plan(job_source: JobSource, plan: Plan) -> ResolvedPlan:
    """A plan that the user wrote: checked against what is known without measuring the machine."""
    from echelon.hardware import known_cluster

    cluster = known_cluster()
    # One that parts batches or parameters may train another objective, or have ranks wait for each other for ever.
    divides_work = plan.ranks > 1 or plan.micro is not None or plan.model is not None
    if plan.incomplete:
        job_source.fingerprint_model()
    profile = job_source.try_profile() if divides_work else job_source.cached_profile()
    completed, fallback = job_source.adapt_plan(plan, profile, cluster)
    return _check_plan(completed, profile, cluster, job_source.warnings, fallback)


def load_resolved_plan(path: Path) -> ResolvedPlan:
    """What `ResolvedPlan.save_for_ranks` wrote, on a rank."""
    profile, cluster = path.with_name(f"{Profile.KIND}.json"), path.with_name(f"{Cluster.KIND}.json")
    fallback = path.with_name(_FALLBACK_FILE)
    return _check_plan(
        Plan.load(path),
        Profile.load(profile) if profile.is_file() else None,
        Cluster.load(cluster) if cluster.is_file() else None,
        fallback=fallback.read_text(encoding="utf-8") if fallback.is_file() else "",
    )


def _check_plan(
    plan: Plan, profile: Profile | None, cluster: Cluster | None, extra_warnings: Sequence[str] = (), fallback: str = ""
) -> ResolvedPlan:
    """A plan that can be executed as far as is known, forecast if enough is."""
    warnings = tuple(map(str, require_executable(plan, profile, cluster)))
    forecast = None
    if profile is not None and cluster is not None:
        from echelon.simulator import simulate

        forecast = simulate(profile, cluster, plan)
    fallback_warnings = [fallback] if fallback else []
    return ResolvedPlan(
        plan=plan, profile=profile, cluster=cluster, forecast=forecast, warnings=(*fallback_warnings, *warnings, *extra_warnings), fallback=fallback
    )  # fmt: skip
