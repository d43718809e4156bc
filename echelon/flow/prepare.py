"""From a job to a plan: profile it, measure the machine, search; what is known already is not made again.

A job is named by its file where there is one. While its profile, the cluster and the sources are unchanged nothing of torch
is imported here: the ranks then start at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import JobError, PlanError
from echelon.job import Job, load_job
from echelon.plan.check import require
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.store import Store, hash_files, installed_versions, user_files
from echelon.plan.text import from_text
from echelon.world import cache_folder

if TYPE_CHECKING:
    from echelon.plan.cluster import Cluster
    from echelon.plan.forecast import Forecast
    from echelon.planner import Candidate

JobLike = Job | Callable[[], Job] | str
PlanLike = Plan | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan that may be executed, and what is known about it."""

    plan: Plan
    profile: Profile | None = None
    cluster: Cluster | None = None
    forecast: Forecast | None = None
    candidates: tuple[Candidate, ...] = ()
    warnings: tuple[str, ...] = ()


class Subject:
    """A job and its file; the job is loaded only when somebody looks at it."""

    def __init__(self, job: JobLike) -> None:
        self._job = job
        self._given = isinstance(job, str)  # as file.py:name; the key must not change once the job is loaded
        self.spec = job if isinstance(job, str) else main_file()

    @property
    def job(self) -> Job:
        """The job itself."""
        if isinstance(self._job, str):
            self._job = load_job(self._job)
        elif not isinstance(self._job, Job) and callable(self._job):
            self._job = self._job()
        if not isinstance(self._job, Job):
            raise JobError(
                f"expected an echelon.Job, a function that returns one or file.py:name, found {type(self._job).__name__}"
            )
        return self._job

    @property
    def key(self) -> str | None:
        """Under which its documents are kept; None for a job without a file."""
        if self.spec is None:
            return None
        if self._given:
            file, _, name = self.spec.rpartition(".py:")
            return f"{Path(file + '.py' if file else self.spec).resolve()}:{name if file else 'job'}"
        return f"{Path(self.spec).resolve()}:{self.job.name}"

    def profile(self) -> Profile:
        """The job's profile, from the store or made now."""
        store, versions = Store(cache_folder()), installed_versions()
        if self.key is not None:
            known = store.get(Profile, self.key, versions=versions)
            if known is not None:
                return known
        from echelon.profiler import profile

        made = profile(self.job)
        if self.key is not None:
            files = {*user_files(sys.modules), Path(self.key.rpartition(":")[0])}
            store.put(self.key, made, versions=versions, sources=hash_files(files))
        return made


def main_file() -> str | None:
    """The script that Python runs, where it is a file of the user's."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(file) if file and Path(file).suffix == ".py" and Path(file).is_file() else None


def read_plan(wanted: PlanLike) -> Plan | None:
    """A plan given as such, in short form or as a file; None for `auto`."""
    if wanted is None or wanted == "auto":
        return None
    if isinstance(wanted, str):
        if wanted.endswith(".json") or Path(wanted).is_file():
            return Plan.load(wanted)
        return from_text(wanted)
    if not isinstance(wanted, Plan):
        raise PlanError(f'plan={wanted!r}: give a Plan, its short form ("dp=2 zero=1"), a plan file, or auto')
    return wanted


def prepare(subject: Subject, wanted: PlanLike = None, *, ranks: int | None = None, top: int = 5) -> Prepared:
    """The plan that was asked for, or the best one; `ranks` where their number is given."""
    plan = read_plan(wanted)
    if plan is not None:
        return _given(subject, plan)
    from echelon.planner import search
    from echelon.profiler import measure

    profile, cluster = subject.profile(), measure()
    candidates = search(profile, cluster, top=top, ranks=ranks)
    best = candidates[0]
    warnings = require(best.plan, profile, cluster)
    return Prepared(
        plan=best.plan, profile=profile, cluster=cluster, forecast=best.forecast, candidates=candidates,
        warnings=tuple(map(str, warnings)),
    )  # fmt: skip


def _given(subject: Subject, plan: Plan) -> Prepared:
    """A plan that the user wrote: checked against what is known without measuring, forecast if that is much."""
    from echelon.profiler import known_cluster

    cluster = known_cluster()
    profile = Store(cache_folder()).get(Profile, subject.key, versions=installed_versions()) if subject.key else None
    if plan.model is not None and profile is None:
        profile = subject.profile()
    warnings = tuple(map(str, require(plan, profile, cluster)))
    forecast = None
    if profile is not None and cluster is not None:
        from echelon.simulator import simulate

        forecast = simulate(profile, cluster, plan)
    return Prepared(plan=plan, profile=profile, cluster=cluster, forecast=forecast, warnings=warnings)
