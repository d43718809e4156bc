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

#: Next to a plan that is passed to ranks: why it is not the requested one.
_FALLBACK_FILE = "fallback.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPlan:
    """A plan that can be executed, and what is known about it."""

    plan: Plan
    profile: Profile | None = None
    cluster: Cluster | None = None
    forecast: Forecast | None = None
    candidates: tuple[Candidate, ...] = ()
    warnings: tuple[str, ...] = ()
    #: Why this is not the requested plan; one of the warnings.
    fallback: str = ""
    #: Whether it replaces a requested plan that was disproved before it trained.
    is_fallback: bool = False

    def save_for_ranks(self, folder: Path) -> Path:
        """Write the documents for the ranks to `folder`; returns the path of the plan, for `load_resolved_plan`."""
        for document in (self.plan, self.profile, self.cluster):
            if document is not None:
                document.save(folder / f"{document.KIND}.json")
        if self.fallback:
            (folder / _FALLBACK_FILE).write_text(self.fallback, encoding="utf-8")
        return folder / f"{Plan.KIND}.json"


def parse_plan(requested: PlanLike) -> Plan | None:
    """A plan, from its short form or file if it is text; None for `auto`."""
    if requested is None or requested == "auto":
        return None
    if isinstance(requested, str):
        if requested.endswith(".json") or Path(requested).is_file():
            return Plan.load(requested)
        return from_text(requested)
    if not isinstance(requested, Plan):
        raise PlanError(f'plan={requested!r}: give a Plan, its short form ("dp=2 zero=1"), a plan file, or auto')
    return requested


def resolve_plan(source: JobSource, plan: PlanLike = None, *, ranks: int | None = None, top: int = 5) -> ResolvedPlan:
    """The requested plan, or the best one for `ranks` (any number: None)."""
    requested = parse_plan(plan)
    if requested is not None:
        return _resolve_requested_plan(source, requested)
    from echelon.hardware import measure
    from echelon.planner import search

    profile, cluster = source.profile(), measure()
    candidates = search(profile, cluster, top=top, ranks=ranks, complete=source.complete_plan)
    best = candidates[0]
    warnings = require_executable(best.plan, profile, cluster)
    return ResolvedPlan(
        plan=best.plan, profile=profile, cluster=cluster, forecast=best.forecast, candidates=candidates,
        warnings=(*map(str, warnings), *source.warnings),
    )  # fmt: skip


def _resolve_requested_plan(source: JobSource, plan: Plan) -> ResolvedPlan:
    """A requested plan, checked against what is known without measuring the machine."""
    from echelon.hardware import known_cluster

    cluster = known_cluster()
    # A plan that splits batches or parameters may train another objective, or deadlock.
    divides_work = plan.ranks > 1 or plan.micro is not None or plan.model is not None
    if plan.incomplete:
        source.fingerprint_model()
    profile = source.try_profile() if divides_work else source.cached_profile()
    completed, fallback = source.adapt_plan(plan, profile, cluster)
    return _check_plan(completed, profile, cluster, source.warnings, fallback)


def load_resolved_plan(path: Path) -> ResolvedPlan:
    """What `ResolvedPlan.save_for_ranks` wrote, on a rank."""
    profile, cluster = path.with_name(f"{Profile.KIND}.json"), path.with_name(f"{Cluster.KIND}.json")
    fallback = path.with_name(_FALLBACK_FILE)
    known_profile = Profile.load(profile) if profile.is_file() else None
    known_cluster = Cluster.load(cluster) if cluster.is_file() else None
    reason = fallback.read_text(encoding="utf-8") if fallback.is_file() else ""
    return _check_plan(Plan.load(path), known_profile, known_cluster, (), reason)


def _check_plan(
    plan: Plan, profile: Profile | None, cluster: Cluster | None, job_warnings: Sequence[str], fallback: str
) -> ResolvedPlan:
    """A plan that can be executed as far as is known, with a forecast if enough is."""
    warnings = [*([fallback] if fallback else []), *map(str, require_executable(plan, profile, cluster)), *job_warnings]
    forecast = None
    if profile is not None and cluster is not None:
        from echelon.simulator import simulate

        forecast = simulate(profile, cluster, plan)
    return ResolvedPlan(
        plan=plan, profile=profile, cluster=cluster, forecast=forecast, warnings=tuple(warnings), fallback=fallback
    )
