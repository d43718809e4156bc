"""From a job to a plan: profile it, measure the machine, search; what is known already is not made again.

A job is named by its file where there is one. While its profile, the cluster and the sources are unchanged nothing of torch
is imported here: the ranks then start at once. A profile is kept only for a job that a file alone describes (`echelon VERB
file.py`): what a script passes may follow from its arguments or from a loop in it, and would be taken for another's.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from echelon.errors import EchelonError, JobError, NothingToCut, PlanError
from echelon.flow.job_identity import JobIdentity, identify
from echelon.flow.job_inputs import Reads, recording
from echelon.flow.job_source import load_job, make_job
from echelon.job import Job
from echelon.plan.check import Problem, require
from echelon.plan.cluster import Cluster
from echelon.plan.document_cache import Store, hash_files, installed_versions, user_files
from echelon.plan.fallback import adapt, fall_back
from echelon.plan.format_units import seconds, size
from echelon.plan.input_digests import argument_parts
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.text import from_text
from echelon.world import cache_folder, usable_cores, usable_memory

if TYPE_CHECKING:
    from echelon.plan.forecast import Forecast
    from echelon.planner import Candidate

Made = TypeVar("Made", Profile, Plan)
JobLike = Job | Callable[[], Job] | str
PlanLike = Plan | str | None

#: Beside the plan that is handed over: why it is not the one that was asked for.
_FALLBACK = "fallback.txt"
#: What trying a model's cuts takes: its numbers so many times, runs of all of it, more for each block; operations of a core in a second (in
#: float64, about), and how many seconds one waits for a plan that somebody else will train by.
_COPIES, _RUNS, _TRIALS, _RATE, _PATIENCE = 2.5, 10, 4, 1e10, 60.0
_NOT_SCRIPTS = {"pytest", "ipython", "ipykernel_launcher", "jupyter", "pydevconsole"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
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

    def hand_over(self, folder: Path) -> Path:
        """Write to `folder` what ranks need so as not to make it again; the path of the plan, for `receive`."""
        for document in (self.plan, self.profile, self.cluster):
            if document is not None:
                document.save(folder / f"{document.KIND}.json")
        if self.fallback:
            (folder / _FALLBACK).write_text(self.fallback, encoding="utf-8")
        return folder / f"{Plan.KIND}.json"


class Subject:
    """A job and its file; the job is loaded only when somebody looks at it."""

    def __init__(self, job: JobLike) -> None:
        self._given = self._job = job
        self.spec = job if isinstance(job, str) else main_file()
        #: Under which its documents are kept; None: they are not.
        self.key: str | None = None
        if isinstance(job, str):
            file, function = _split(job)
            self.key = f"{Path(file).resolve()}:{function}"
        self._default = _default_name(job, self.spec)
        self._function = _split(job)[1] if isinstance(job, str) else str(getattr(job, "__name__", "job"))
        #: What went wrong and does not matter enough to stop.
        self.warnings: list[str] = []
        self._unprofiled = False
        self._model: str | None = None
        #: What was read while the job was made, and while its model was built and looked at.
        self.reads, self._later = Reads(), Reads()
        self._identity: JobIdentity | None = None

    @property
    def job(self) -> Job:
        """The job itself."""
        if isinstance(self._job, str):
            try:
                with recording(self.reads):
                    self._job = load_job(self._job)
            except SyntaxError as error:
                raise JobError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
        elif not isinstance(self._job, Job) and callable(self._job):
            with recording(self.reads):
                self._job = make_job(self._job)
        if not isinstance(self._job, Job):
            raise JobError(
                f"expected an echelon.Job, a function that returns one or file.py:name, found {type(self._job).__name__}"
            )
        if not self._job.name:
            self._job = dataclasses.replace(self._job, name=self._default)
        paths = [name for name in ("data", "evaluation") if isinstance(getattr(self._job, name), str | Path)]
        if paths:
            from echelon.data.source import opened

            self._job = dataclasses.replace(self._job, **{name: opened(getattr(self._job, name)) for name in paths})
        if self._identity is None:  # now: building a model may change what its factory holds (transformers' configs)
            file = Path(_split(self.spec)[0]).resolve() if self.spec is not None else None
            read = {**self.reads.parts(), **argument_parts(self.arguments())}
            folder = file.parent if file else None
            self._identity = identify(self._job, function=self._function, read=read, folder=folder)
        return self._job

    def reload(self) -> None:
        """Forget the job, so that it is made in the environment as it is now; one that was given as an object stays."""
        self._job, self._identity, self.reads = self._given, None, Reads()

    @property
    def identity(self) -> JobIdentity:
        """What the job is made from, equal on all ranks; loads the job."""
        if self._identity is None:
            self.job  # noqa: B018 (it is found when the job is loaded)
        assert self._identity is not None
        return self._identity

    def recording(self) -> AbstractContextManager[Reads]:
        """Record what is read meanwhile, while the model is built: it decides whether what is made can be used again."""
        return recording(self._later)

    def read_inputs(self) -> dict[str, str]:
        """Everything that was read so far, with absolute paths, for the store. Scratch files do not count."""
        own = [Path.cwd(), *([Path(self.spec).resolve().parent] if self.spec is not None else [])]
        later = self._later.parts(own=own)
        return {**later, **self.reads.parts(), **argument_parts(self.arguments())}

    def arguments(self) -> tuple[str, ...]:
        """What the user's script was called with; the command line's own options are settings, not inputs."""
        script, ours = main_script(), Path(__file__).resolve().parent.parent
        if script is None or script.stem == "echelon" or script.resolve().is_relative_to(ours):
            return ()
        return tuple(sys.argv[1:])

    @property
    def name(self) -> str:
        """The job's own name, or that of its file."""
        return self.job.name or self._default

    def profile(self) -> Profile:
        """The job's profile, from the store or made now."""
        known = self.known_profile()
        if known is not None:
            return known
        from echelon.profiler import profile

        job = self.job
        with self.recording():
            made = profile(job)
        return self._kept(self.key, made)

    def known_profile(self) -> Profile | None:
        """The job's profile, where the store has it; not one of another model, where `look` was called."""
        if self.key is None:
            return None
        known = self._stored(Profile, self.key)
        return None if known is not None and self._model not in (None, known.model) else known

    def look(self) -> None:
        """Build the model (without its values), so that what is kept of another is not taken for its: one file may
        describe several, by the environment or by what it reads. For plans that name a model's parts, which another has not."""
        if self.key is None or self._model is not None:
            return
        from echelon.partition.complete_plan import fingerprint_of

        try:
            self._model = fingerprint_of(self.job)
        except EchelonError:
            raise
        except Exception:  # a model that cannot be built so: whoever needs it tells why
            self._model = ""

    def complete(self, plan: Plan) -> Plan:
        """`plan` with what it leaves open about the model, from the store or found now."""
        if not plan.open:
            return plan
        key = f"{self.key} {plan.digest} {self._model or ''}".rstrip() if self.key is not None else None
        known = self._stored(Plan, key) if key is not None else None
        if known is not None:
            return known
        from echelon.partition.complete_plan import complete

        job, profile = self.job, self.known_profile()
        with self.recording():
            made = complete(plan, job, profile)
        return self._kept(key, made)

    def complete_here(self, plan: Plan, profile: Profile) -> Plan:
        """`plan`, completed where that is a matter of a minute on this machine, which need not be the one that trains: cuts over tp are found
        by running the model, so that one for a cluster is left open, with a word about it, and completed where it is trained."""
        wide = plan.open and (plan.mesh.tp > 1 or plan.sequence)
        why = _too_much(profile) if wide else ""
        if not why:
            return self.complete(plan)
        told = f"which layers tp cuts is looked at when it is trained and taken as all of them here: {why}"
        if told not in self.warnings:
            self.warnings.append(told)
        return plan

    def settle(self, plan: Plan, profile: Profile | None, cluster: Cluster | None) -> tuple[Plan, str]:
        """`plan`, completed; or the plan that takes its place where this model cannot follow it, and why."""
        if self._unprofiled and plan.sharded and not plan.whole:
            other = dataclasses.replace(plan, whole=True)
            settled, more = self.settle(other, profile, cluster)
            why = f'"{plan}" runs as "{other}": whether samples decide which blocks run is not known'
            return settled, f"{why}; then {more}" if more else why
        try:
            require(plan, profile, cluster)  # before its cuts are looked for, which takes longer
            completed = self.complete(plan)
            require(completed, profile, cluster)
            return completed, ""
        except NothingToCut as error:
            if not plan.open:  # a document, made for some model
                raise
            return self._instead(plan, error, profile, cluster)
        except PlanError as error:
            adapted = adapt(plan, error.problems)
            if adapted is None or adapted[0] == plan:
                raise
            settled, more = self.settle(adapted[0], profile, cluster)
            return settled, f'"{plan}" runs as "{adapted[0]}": {adapted[1]}' + (f"; then {more}" if more else "")

    def _instead(
        self, plan: Plan, error: NothingToCut, profile: Profile | None, cluster: Cluster | None
    ) -> tuple[Plan, str]:
        reasons = "; ".join(
            f"{each.path}={each.value}: {each.rule}" for each in error.problems if isinstance(each, Problem)
        )
        profile = profile or self.profile_or_none()
        other, told = fall_back(plan, profile)
        try:
            require(other, profile, cluster)
        except PlanError as second:
            if adapt(other, second.problems) is not None:
                settled, more = self.settle(other, profile, cluster)
                return settled, f'"{plan}" falls back to "{other}": {reasons}; then {more}'
            raise PlanError(
                f'{reasons}\nand "{other}", {told}, cannot be executed either:\n'
                + "\n".join(f"  {each}" for each in second.problems),
                (*error.problems, *second.problems),
            ) from error
        return other, f'"{plan}" falls back to "{other}" on the same ranks, {told}: {reasons}'

    def profile_or_none(self) -> Profile | None:
        """None with a warning for a model that cannot be profiled: it may still train."""
        if self._unprofiled:
            return None
        try:
            return self.profile()
        except EchelonError:
            raise
        except Exception as error:
            self._unprofiled = True
            self.warnings.append(
                f"the model could not be profiled ({type(error).__name__}: {(str(error).splitlines() or [''])[0]}): whether its samples see "
                "each other, or decide which modules run, is not known; `echelon verify` tells whether the plan computes the same as one device"
            )
            return None

    def _stored(self, kind: type[Made], key: str) -> Made | None:
        """What the store has, where all that it was made from is unchanged."""
        store = Store(cache_folder())
        return store.get(kind, key, versions=installed_versions(), environment=os.environ, arguments=self.arguments())

    def _kept(self, key: str | None, made: Made) -> Made:
        if key is None or self.key is None:
            return made
        store, files = Store(cache_folder()), {*user_files(sys.modules), Path(self.key.rpartition(":")[0])}
        try:
            store.put(key, made, versions=installed_versions(), sources=hash_files(files), inputs=self.read_inputs())
        except OSError as error:
            self.warnings.append(
                f"{store.folder}: the {made.KIND} could not be kept there ({error.strerror or error}) and is made again each time; "
                "make the folder writable, or name another in ECHELON_CACHE"
            )
        return made


def _too_much(profile: Profile) -> str:
    """Why the model cannot be run on this machine to see what can be cut of it; empty: it can."""
    held, memory = _COPIES * 8 * profile.elements, usable_memory()
    if held > memory:
        return f"the model takes {size(held)} to be tried in float64, and this machine has {size(memory)}"
    took = profile.flops(2, "forward") * (_RUNS + _TRIALS * len(profile.units)) / (usable_cores() * _RATE)
    return f"trying it in float64 would take this machine about {seconds(took)}" if took > _PATIENCE else ""


def _split(spec: str) -> tuple[str, str]:
    """`file.py:name` as its two parts; the name is `job` unless given."""
    file, _, function = spec.rpartition(".py:")
    return (f"{file}.py", function) if file else (spec, "job")


def _default_name(job: JobLike, spec: str | None) -> str:
    """The job file's stem, and the name of the function where it is not `job`: every job has a run folder of its own."""
    if spec is None:
        return "job"
    file, function = _split(spec) if isinstance(job, str) else (spec, getattr(job, "__name__", "job"))
    path = Path(file).resolve()
    stem = path.parent.name if path.stem == "__main__" else path.stem
    return f"{stem}-{function}" if function.isidentifier() and function != "job" else stem


def main_script() -> Path | None:
    """What Python runs, if it could be run again: not a prompt, nor what holds a notebook or tests."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    path = Path(file) if file else None
    return None if path is None or {path.stem, path.parent.name} & _NOT_SCRIPTS else path


def main_file() -> str | None:
    """The script that Python runs, where it is a source file."""
    path = main_script()
    return str(path) if path is not None and path.suffix == ".py" and path.is_file() else None


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
    from echelon.hardware import measure
    from echelon.planner import search

    profile, cluster = subject.profile(), measure()
    candidates = search(profile, cluster, top=top, ranks=ranks, complete=subject.complete)
    best = candidates[0]
    warnings = require(best.plan, profile, cluster)
    return Prepared(
        plan=best.plan, profile=profile, cluster=cluster, forecast=best.forecast, candidates=candidates,
        warnings=(*map(str, warnings), *subject.warnings),
    )  # fmt: skip


def _given(subject: Subject, plan: Plan) -> Prepared:
    """A plan that the user wrote: checked against what is known without measuring the machine."""
    from echelon.hardware import known_cluster

    cluster = known_cluster()
    # One that parts batches or parameters may train another objective, or have ranks wait for each other for ever.
    parts = plan.ranks > 1 or plan.micro is not None or plan.model is not None
    if plan.open:
        subject.look()
    profile = subject.profile_or_none() if parts else subject.known_profile()
    completed, fallback = subject.settle(plan, profile, cluster)
    return _checked(completed, profile, cluster, subject.warnings, fallback)


def receive(path: Path) -> Prepared:
    """What `Prepared.hand_over` wrote, on a rank."""
    profile, cluster = path.with_name(f"{Profile.KIND}.json"), path.with_name(f"{Cluster.KIND}.json")
    fallback = path.with_name(_FALLBACK)
    return _checked(
        Plan.load(path),
        Profile.load(profile) if profile.is_file() else None,
        Cluster.load(cluster) if cluster.is_file() else None,
        fallback=fallback.read_text(encoding="utf-8") if fallback.is_file() else "",
    )


def _checked(
    plan: Plan, profile: Profile | None, cluster: Cluster | None, told: Sequence[str] = (), fallback: str = ""
) -> Prepared:
    """A plan that can be executed as far as is known, forecast if enough is."""
    warnings = tuple(map(str, require(plan, profile, cluster)))
    forecast = None
    if profile is not None and cluster is not None:
        from echelon.simulator import simulate

        forecast = simulate(profile, cluster, plan)
    said = [fallback] if fallback else []
    return Prepared(
        plan=plan, profile=profile, cluster=cluster, forecast=forecast, warnings=(*said, *warnings, *told), fallback=fallback
    )  # fmt: skip
