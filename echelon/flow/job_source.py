"""A job and what is derived from it: its identity, its profile, and plans completed or adapted for its model.

While a job's profile, the cluster and the sources are unchanged, nothing here imports torch: the ranks start at once. A profile is
cached only for a job that a file alone describes (`echelon VERB file.py`): a script may make jobs by its arguments or in a loop.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from echelon.errors import EchelonError, JobError, PlanError, UnsplittableModelError
from echelon.flow.job_file import load_job, make_job
from echelon.flow.job_identity import JobIdentity, identify_job, remember_changes
from echelon.flow.job_inputs import RecordedInputs, record_inputs
from echelon.job import Job
from echelon.plan.check import require_executable
from echelon.plan.cluster import Cluster
from echelon.plan.codec import Document
from echelon.plan.document_cache import DocumentCache, hash_files, installed_versions, user_source_files
from echelon.plan.fallback import apply_problem_changes, fall_back_to_data_parallel
from echelon.plan.format_units import format_bytes, format_seconds
from echelon.plan.input_digests import digest_arguments
from echelon.plan.plan import Plan
from echelon.plan.problem import Problem
from echelon.plan.profile import Profile
from echelon.world import cache_folder, usable_cores, usable_memory

Made = TypeVar("Made", bound=Document)
JobLike = Job | Callable[[], Job] | str

#: The cost of trying a model's cuts: copies of its parameters, runs of the model and more for each block, float64 operations of a core
#: per second; and the seconds one waits for a plan for another machine.
_TRIAL_COPIES, _BASE_RUNS, _RUNS_PER_BLOCK, _CORE_FLOPS, _MAX_TRIAL_SECONDS = 2.5, 10, 4, 1e10, 60.0
_HOST_PROGRAMS = {"pytest", "ipython", "ipykernel_launcher", "jupyter", "pydevconsole"}


class JobSource:
    """A job and its file; the job is loaded on first use."""

    def __init__(self, job: JobLike) -> None:
        self._original = self._job = job
        self.spec = job if isinstance(job, str) else main_file()
        #: Key of its documents in the cache; None: they are not cached.
        self.cache_key: str | None = None
        self._function_name = str(getattr(job, "__name__", "job"))
        file = self.spec
        if isinstance(job, str):
            file, self._function_name = _split_spec(job)
            self.cache_key = f"{Path(file).resolve()}:{self._function_name}"
        self._default_name = "job" if file is None else _default_name(Path(file).resolve(), self._function_name)
        self.warnings: list[str] = []
        self._profiling_failed = False
        self._model_fingerprint: str | None = None
        #: What was read while the job was made, and while its model was built and profiled.
        self.job_inputs, self._build_inputs = RecordedInputs(), RecordedInputs()
        self._identity: JobIdentity | None = None

    @property
    def job(self) -> Job:
        if not isinstance(self._job, Job):
            with record_inputs(self.job_inputs):
                self._job = _make(self._job)
        if not self._job.name:
            self._job = dataclasses.replace(self._job, name=self._default_name)
        path_fields = [name for name in ("data", "eval_data") if isinstance(getattr(self._job, name), str | Path)]
        if path_fields:
            from echelon.data.open_data import open_if_packed

            opened = {name: open_if_packed(getattr(self._job, name)) for name in path_fields}
            self._job = dataclasses.replace(self._job, **opened)
        if self._identity is None:  # now: building a model may change what its factory holds (transformers' configs)
            inputs = {**self.job_inputs.digest_inputs(), **digest_arguments(self.arguments())}
            self._identity = identify_job(self._job, self._function_name, inputs, self.folder)
        return self._job

    @property
    def is_file(self) -> bool:
        """Whether a job file was named, so the caller does not hold the job's objects."""
        return isinstance(self._original, str)

    @property
    def file_hash(self) -> str:
        """Hash of the job file's text; empty without a file."""
        from echelon.verifier.fingerprints import job_hash

        return "" if self.spec is None else job_hash(self.spec)

    @property
    def folder(self) -> Path | None:
        """The folder of the file that describes the job."""
        return None if self.spec is None else Path(self.spec).resolve().parent

    def reload(self) -> None:
        """Forget the job, so that it is made again in the present environment; one that was passed as an object stays."""
        self._job, self._identity, self.job_inputs = self._original, None, RecordedInputs()

    @property
    def identity(self) -> JobIdentity:
        """What the job is made from, equal on all ranks; loads the job."""
        if self._identity is None:
            self.job  # noqa: B018 (loading the job sets it)
        assert self._identity is not None
        return self._identity

    def remember_changes(self) -> None:
        remember_changes(self.job, self.identity, self.folder)

    def record_build(self) -> AbstractContextManager[RecordedInputs]:
        """Record what building the model reads: cached documents depend on it."""
        return record_inputs(self._build_inputs)

    def digest_inputs(self) -> dict[str, str]:
        """Everything that was read so far, with absolute paths, for the cache. Scratch files do not count."""
        own_folders = [Path.cwd(), *([self.folder] if self.folder is not None else [])]
        build_inputs = self._build_inputs.digest_inputs(own_folders=own_folders)
        return {**build_inputs, **self.job_inputs.digest_inputs(), **digest_arguments(self.arguments())}

    def arguments(self) -> tuple[str, ...]:
        """The arguments of the user's script; those of our command line are settings, not inputs."""
        return tuple(sys.argv[1:]) if is_user_script() else ()

    @property
    def name(self) -> str:
        return self.job.name or self._default_name

    def profile(self) -> Profile:
        """The job's profile, cached or made now."""
        cached = self.cached_profile()
        if cached is not None:
            return cached
        from echelon.profiler import profile

        job = self.job
        with self.record_build():
            new_profile = profile(job)
        return self._save_own(self.cache_key, new_profile)

    def cached_profile(self) -> Profile | None:
        """The job's cached profile; none of another model if `fingerprint_model` was called."""
        if self.cache_key is None:
            return None
        cached = self.load_cached(Profile, self.cache_key)
        return None if cached is not None and self._model_fingerprint not in (None, cached.model) else cached

    def fingerprint_model(self) -> None:
        """Build the model (without parameter values), so that another model's documents are not used: one file may describe several,
        by the environment or by what it reads. For plans that name a model's modules."""
        if self.cache_key is None or self._model_fingerprint is not None:
            return
        from echelon.partition.complete_plan import compute_fingerprint

        try:
            self._model_fingerprint = compute_fingerprint(self.job)
        except EchelonError:
            raise
        except Exception:  # a model that cannot be built so; its first real use reports why
            self._model_fingerprint = ""

    def complete_plan(self, plan: Plan) -> Plan:
        """`plan` with what it leaves open about the model, cached or determined now."""
        if not plan.incomplete:
            return plan
        key = self.cache_key and f"{self.cache_key} {plan.digest} {self._model_fingerprint or ''}".rstrip()
        cached = self.load_cached(Plan, key) if key else None
        if cached is not None:
            return cached
        from echelon.partition.complete_plan import complete

        job, profile = self.job, self.cached_profile()
        with self.record_build():
            completed = complete(plan, job, profile)
        return self._save_own(key, completed)

    def complete_if_cheap(self, plan: Plan, profile: Profile) -> Plan:
        """`plan`, completed if that takes at most a minute on this machine, which need not be the one that trains. Cuts over tp are found by
        running the model: those of a large one are left open, with a warning, until it is trained."""
        needs_trials = plan.incomplete and (plan.mesh.tp > 1 or plan.tensor.sequence)
        reason = _why_too_large(profile) if needs_trials else ""
        if not reason:
            return self.complete_plan(plan)
        warning = f"which layers tp cuts is determined when it is trained; here all are assumed to be: {reason}"
        if warning not in self.warnings:
            self.warnings.append(warning)
        return plan

    def adapt_plan(self, plan: Plan, profile: Profile | None, cluster: Cluster | None) -> tuple[Plan, str]:
        """`plan`, completed; or the plan that takes its place where this model cannot follow it, and why."""
        if self._profiling_failed and plan.is_sharded and not plan.data.shard_as_one:
            replicated = plan.replace(shard_as_one=True)
            reason = f'"{plan}" runs as "{replicated}": whether samples decide which blocks run is not known'
            return self._readapt(replicated, reason, profile, cluster)
        try:
            require_executable(plan, profile, cluster)  # before its cuts are searched for, which takes longer
            completed = self.complete_plan(plan)
            require_executable(completed, profile, cluster)
            return completed, ""
        except UnsplittableModelError as error:
            if not plan.incomplete:  # a document, made for some model
                raise
            return self._fall_back(plan, error, profile, cluster)
        except PlanError as error:
            adaptation = apply_problem_changes(plan, error.problems)
            if adaptation is None or adaptation[0] == plan:
                raise
            reason = f'"{plan}" runs as "{adaptation[0]}": {adaptation[1]}'
            return self._readapt(adaptation[0], reason, profile, cluster)

    def _readapt(self, plan: Plan, reason: str, profile: Profile | None, cluster: Cluster | None) -> tuple[Plan, str]:
        adapted_plan, further_reason = self.adapt_plan(plan, profile, cluster)
        return adapted_plan, f"{reason}; then {further_reason}" if further_reason else reason

    def _fall_back(
        self, plan: Plan, error: UnsplittableModelError, profile: Profile | None, cluster: Cluster | None
    ) -> tuple[Plan, str]:
        problems = [problem for problem in error.problems if isinstance(problem, Problem)]
        reasons = "; ".join(f"{problem.path}={problem.value}: {problem.rule}" for problem in problems)
        profile = profile or self.try_profile()
        fallback, explanation = fall_back_to_data_parallel(plan, profile)
        try:
            require_executable(fallback, profile, cluster)
        except PlanError as fallback_error:
            if apply_problem_changes(fallback, fallback_error.problems) is not None:
                reason = f'"{plan}" falls back to "{fallback}": {reasons}'
                return self._readapt(fallback, reason, profile, cluster)
            lines = "\n".join(f"  {problem}" for problem in fallback_error.problems)
            message = f'{reasons}\nand "{fallback}", {explanation}, cannot be executed either:\n{lines}'
            raise PlanError(message, (*error.problems, *fallback_error.problems)) from error
        return fallback, f'"{plan}" falls back to "{fallback}" on the same ranks, {explanation}: {reasons}'

    def try_profile(self) -> Profile | None:
        """None with a warning for a model that cannot be profiled: it may still train."""
        if self._profiling_failed:
            return None
        try:
            return self.profile()
        except EchelonError:
            raise
        except Exception as error:
            self._profiling_failed = True
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            unknown = "whether its samples see each other, or decide which modules run, is not known"
            remedy = "`echelon verify` shows whether the plan computes the same as one device"
            self.warnings.append(f"the model could not be profiled ({reason}): {unknown}; {remedy}")
            return None

    def load_cached(self, kind: type[Made], key: str, versions: Mapping[str, str] | None = None) -> Made | None:
        """The cached document, if all that it was made from is unchanged."""
        cache, versions = DocumentCache(cache_folder()), versions or installed_versions()
        return cache.get(kind, key, versions=versions, environment=os.environ, arguments=self.arguments())

    def save_cached(
        self, key: str, document: Document, versions: Mapping[str, str], sources: Mapping[str, str] | None = None
    ) -> None:
        """Cache a document that was made from the job's inputs; a warning if that fails."""
        cache = DocumentCache(cache_folder())
        try:
            cache.put(key, document, versions=versions, sources=sources, inputs=self.digest_inputs())
        except OSError as error:
            problem = f"the {document.KIND} could not be kept there ({error.strerror or error}) and is made each time"
            remedy = "make the folder writable, or name another in ECHELON_CACHE"
            self.warnings.append(f"{cache.folder}: {problem}; {remedy}")

    def _save_own(self, key: str | None, document: Made) -> Made:
        if key is not None and self.cache_key is not None:
            files = {*user_source_files(sys.modules), Path(self.cache_key.rpartition(":")[0])}
            self.save_cached(key, document, installed_versions(), hash_files(files))
        return document


def _make(job: JobLike) -> Job:
    if isinstance(job, str):
        try:
            return load_job(job)
        except SyntaxError as error:
            raise JobError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    if callable(job):
        return make_job(job)
    raise JobError(f"expected an echelon.Job, a function that returns one or file.py:name, found {type(job).__name__}")


def _why_too_large(profile: Profile) -> str:
    """Why the model cannot be run on this machine to find out how it can be cut; empty: it can."""
    trial_bytes, available_bytes = _TRIAL_COPIES * 8 * profile.elements, usable_memory()
    if trial_bytes > available_bytes:
        return f"the model takes {format_bytes(trial_bytes)} to be tried in float64, and this machine has {format_bytes(available_bytes)}"
    runs = _BASE_RUNS + _RUNS_PER_BLOCK * len(profile.fsdp_units)
    seconds = profile.flops(2, "forward") * runs / (usable_cores() * _CORE_FLOPS)
    if seconds <= _MAX_TRIAL_SECONDS:
        return ""
    return f"trying it in float64 would take this machine about {format_seconds(seconds)}"


def _split_spec(spec: str) -> tuple[str, str]:
    """`file.py:name` as its two parts; the name is `job` unless given."""
    file, _, function = spec.rpartition(".py:")
    return (f"{file}.py", function) if file else (spec, "job")


def _default_name(path: Path, function: str) -> str:
    """The job file's stem, with the name of the function unless that is `job`: every job has its own run folder."""
    stem = path.parent.name if path.stem == "__main__" else path.stem
    return f"{stem}-{function}" if function.isidentifier() and function != "job" else stem


def main_script() -> Path | None:
    """What Python runs, if it could be run again: neither a prompt nor the host of a notebook or of tests."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    path = Path(file) if file else None
    return None if path is None or {path.stem, path.parent.name} & _HOST_PROGRAMS else path


def main_file() -> str | None:
    """The script that Python runs, if it is a source file."""
    path = main_script()
    return str(path) if path is not None and path.suffix == ".py" and path.is_file() else None


def is_user_script() -> bool:
    """Whether Python runs a script of the user's, not our command line."""
    script, package_folder = main_script(), Path(__file__).resolve().parent.parent
    return script is not None and script.stem != "echelon" and not script.resolve().is_relative_to(package_folder)
