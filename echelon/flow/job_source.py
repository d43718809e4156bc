"""A job and what is derived from it: its identity, its profile, and plans completed or adapted for its model.

A job is named by its file where there is one. While its profile, the cluster and the sources are unchanged nothing of torch
is imported here: the ranks then start at once. A profile is kept only for a job that a file alone describes (`echelon VERB
file.py`): what a script passes may follow from its arguments or from a loop in it, and would be taken for another's.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from echelon.errors import EchelonError, JobError, PlanError, UnsplittableModelError
from echelon.flow.job_file import load_job, make_job
from echelon.flow.job_identity import JobIdentity, identify_job
from echelon.flow.job_inputs import RecordedInputs, record_inputs
from echelon.job import Job
from echelon.plan.check import require_executable
from echelon.plan.cluster import Cluster
from echelon.plan.document_cache import DocumentCache, hash_files, installed_versions, user_source_files
from echelon.plan.fallback import apply_problem_changes, fall_back_to_data_parallel
from echelon.plan.format_units import format_bytes, format_seconds
from echelon.plan.input_digests import digest_arguments
from echelon.plan.plan import Plan
from echelon.plan.problem import Problem
from echelon.plan.profile import Profile
from echelon.world import cache_folder, usable_cores, usable_memory

Made = TypeVar("Made", Profile, Plan)
JobLike = Job | Callable[[], Job] | str

#: What trying a model's cuts takes: its numbers so many times, runs of all of it, more for each block; operations of a core in a second (in
#: float64, about), and how many seconds one waits for a plan that somebody else will train by.
_TRIAL_COPIES, _BASE_RUNS, _RUNS_PER_BLOCK, _CORE_FLOPS, _MAX_TRIAL_SECONDS = 2.5, 10, 4, 1e10, 60.0
_HOST_PROGRAMS = {"pytest", "ipython", "ipykernel_launcher", "jupyter", "pydevconsole"}


class JobSource:
    """A job and its file; the job is loaded only when somebody looks at it."""

    def __init__(self, job: JobLike) -> None:
        self._original = self._job = job
        self.spec = job if isinstance(job, str) else main_file()
        #: Under which its documents are kept; None: they are not.
        self.cache_key: str | None = None
        if isinstance(job, str):
            file, function = _split_spec(job)
            self.cache_key = f"{Path(file).resolve()}:{function}"
        self._default_name = _default_name(job, self.spec)
        self._function_name = _split_spec(job)[1] if isinstance(job, str) else str(getattr(job, "__name__", "job"))
        #: What went wrong and does not matter enough to stop.
        self.warnings: list[str] = []
        self._profiling_failed = False
        self._model_fingerprint: str | None = None
        #: What was read while the job was made, and while its model was built and looked at.
        self.job_inputs, self._build_inputs = RecordedInputs(), RecordedInputs()
        self._identity: JobIdentity | None = None

    @property
    def job(self) -> Job:
        """The job itself."""
        if isinstance(self._job, str):
            try:
                with record_inputs(self.job_inputs):
                    self._job = load_job(self._job)
            except SyntaxError as error:
                raise JobError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
        elif not isinstance(self._job, Job) and callable(self._job):
            with record_inputs(self.job_inputs):
                self._job = make_job(self._job)
        if not isinstance(self._job, Job):
            raise JobError(
                f"expected an echelon.Job, a function that returns one or file.py:name, found {type(self._job).__name__}"
            )
        if not self._job.name:
            self._job = dataclasses.replace(self._job, name=self._default_name)
        path_fields = [name for name in ("data", "eval_data") if isinstance(getattr(self._job, name), str | Path)]
        if path_fields:
            from echelon.data.open_data import open_if_packed

            self._job = dataclasses.replace(
                self._job, **{name: open_if_packed(getattr(self._job, name)) for name in path_fields}
            )
        if self._identity is None:  # now: building a model may change what its factory holds (transformers' configs)
            recorded_inputs = {**self.job_inputs.digest_inputs(), **digest_arguments(self.arguments())}
            self._identity = identify_job(
                self._job, function=self._function_name, recorded_inputs=recorded_inputs, folder=self.folder
            )
        return self._job

    @property
    def is_file(self) -> bool:
        """Whether a job file was named, so that nobody else holds the job's objects."""
        return isinstance(self._original, str)

    @property
    def folder(self) -> Path | None:
        """The folder of the file that describes the job."""
        return None if self.spec is None else Path(self.spec).resolve().parent

    def reload(self) -> None:
        """Forget the job, so that it is made in the environment as it is now; one that was given as an object stays."""
        self._job, self._identity, self.job_inputs = self._original, None, RecordedInputs()

    @property
    def identity(self) -> JobIdentity:
        """What the job is made from, equal on all ranks; loads the job."""
        if self._identity is None:
            self.job  # noqa: B018 (it is found when the job is loaded)
        assert self._identity is not None
        return self._identity

    def record_build(self) -> AbstractContextManager[RecordedInputs]:
        """Record what is read meanwhile, while the model is built: it decides whether what is made can be used again."""
        return record_inputs(self._build_inputs)

    def digest_inputs(self) -> dict[str, str]:
        """Everything that was read so far, with absolute paths, for the store. Scratch files do not count."""
        own_folders = [Path.cwd(), *([self.folder] if self.folder is not None else [])]
        build_inputs = self._build_inputs.digest_inputs(own_folders=own_folders)
        return {**build_inputs, **self.job_inputs.digest_inputs(), **digest_arguments(self.arguments())}

    def arguments(self) -> tuple[str, ...]:
        """What the user's script was called with; the command line's own options are settings, not inputs."""
        script, package_folder = main_script(), Path(__file__).resolve().parent.parent
        if script is None or script.stem == "echelon" or script.resolve().is_relative_to(package_folder):
            return ()
        return tuple(sys.argv[1:])

    @property
    def name(self) -> str:
        """The job's own name, or that of its file."""
        return self.job.name or self._default_name

    def profile(self) -> Profile:
        """The job's profile, from the store or made now."""
        cached = self.cached_profile()
        if cached is not None:
            return cached
        from echelon.profiler import profile

        job = self.job
        with self.record_build():
            new_profile = profile(job)
        return self._save_cached(self.cache_key, new_profile)

    def cached_profile(self) -> Profile | None:
        """The job's profile, where the store has it; not one of another model, where `fingerprint_model` was called."""
        if self.cache_key is None:
            return None
        cached = self._load_cached(Profile, self.cache_key)
        return None if cached is not None and self._model_fingerprint not in (None, cached.model) else cached

    def fingerprint_model(self) -> None:
        """Build the model (without its values), so that what is kept of another is not taken for its: one file may
        describe several, by the environment or by what it reads. For plans that name a model's parts, which another has not."""
        if self.cache_key is None or self._model_fingerprint is not None:
            return
        from echelon.partition.complete_plan import compute_fingerprint

        try:
            self._model_fingerprint = compute_fingerprint(self.job)
        except EchelonError:
            raise
        except Exception:  # a model that cannot be built so: whoever needs it tells why
            self._model_fingerprint = ""

    def complete_plan(self, plan: Plan) -> Plan:
        """`plan` with what it leaves open about the model, from the store or found now."""
        if not plan.incomplete:
            return plan
        key = (
            f"{self.cache_key} {plan.digest} {self._model_fingerprint or ''}".rstrip()
            if self.cache_key is not None
            else None
        )
        cached = self._load_cached(Plan, key) if key is not None else None
        if cached is not None:
            return cached
        from echelon.partition.complete_plan import complete

        job, profile = self.job, self.cached_profile()
        with self.record_build():
            completed = complete(plan, job, profile)
        return self._save_cached(key, completed)

    def complete_if_cheap(self, plan: Plan, profile: Profile) -> Plan:
        """`plan`, completed where that is a matter of a minute on this machine, which need not be the one that trains: cuts over tp are found
        by running the model, so that one for a cluster is left open, with a word about it, and completed where it is trained."""
        needs_trials = plan.incomplete and (plan.mesh.tp > 1 or plan.tensor.sequence)
        reason = _why_too_large(profile) if needs_trials else ""
        if not reason:
            return self.complete_plan(plan)
        warning = f"which layers tp cuts is looked at when it is trained and taken as all of them here: {reason}"
        if warning not in self.warnings:
            self.warnings.append(warning)
        return plan

    def adapt_plan(self, plan: Plan, profile: Profile | None, cluster: Cluster | None) -> tuple[Plan, str]:
        """`plan`, completed; or the plan that takes its place where this model cannot follow it, and why."""
        if self._profiling_failed and plan.is_sharded and not plan.data.shard_as_one:
            replicated = plan.replace(shard_as_one=True)
            adapted_plan, further_reason = self.adapt_plan(replicated, profile, cluster)
            reason = f'"{plan}" runs as "{replicated}": whether samples decide which blocks run is not known'
            return adapted_plan, f"{reason}; then {further_reason}" if further_reason else reason
        try:
            require_executable(plan, profile, cluster)  # before its cuts are looked for, which takes longer
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
            adapted_plan, further_reason = self.adapt_plan(adaptation[0], profile, cluster)
            return adapted_plan, f'"{plan}" runs as "{adaptation[0]}": {adaptation[1]}' + (
                f"; then {further_reason}" if further_reason else ""
            )

    def _fall_back(
        self, plan: Plan, error: UnsplittableModelError, profile: Profile | None, cluster: Cluster | None
    ) -> tuple[Plan, str]:
        reasons = "; ".join(
            f"{problem.path}={problem.value}: {problem.rule}"
            for problem in error.problems
            if isinstance(problem, Problem)
        )
        profile = profile or self.try_profile()
        fallback_plan, explanation = fall_back_to_data_parallel(plan, profile)
        try:
            require_executable(fallback_plan, profile, cluster)
        except PlanError as fallback_error:
            if apply_problem_changes(fallback_plan, fallback_error.problems) is not None:
                adapted_plan, further_reason = self.adapt_plan(fallback_plan, profile, cluster)
                return adapted_plan, f'"{plan}" falls back to "{fallback_plan}": {reasons}; then {further_reason}'
            raise PlanError(
                f'{reasons}\nand "{fallback_plan}", {explanation}, cannot be executed either:\n'
                + "\n".join(f"  {problem}" for problem in fallback_error.problems),
                (*error.problems, *fallback_error.problems),
            ) from error
        return fallback_plan, f'"{plan}" falls back to "{fallback_plan}" on the same ranks, {explanation}: {reasons}'

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
            self.warnings.append(
                f"the model could not be profiled ({type(error).__name__}: {(str(error).splitlines() or [''])[0]}): whether its samples see "
                "each other, or decide which modules run, is not known; `echelon verify` tells whether the plan computes the same as one device"
            )
            return None

    def _load_cached(self, document_type: type[Made], key: str) -> Made | None:
        """What the store has, where all that it was made from is unchanged."""
        store = DocumentCache(cache_folder())
        return store.get(
            document_type, key, versions=installed_versions(), environment=os.environ, arguments=self.arguments()
        )

    def _save_cached(self, key: str | None, document: Made) -> Made:
        if key is None or self.cache_key is None:
            return document
        store, files = (
            DocumentCache(cache_folder()),
            {*user_source_files(sys.modules), Path(self.cache_key.rpartition(":")[0])},
        )
        try:
            store.put(
                key, document, versions=installed_versions(), sources=hash_files(files), inputs=self.digest_inputs()
            )
        except OSError as error:
            self.warnings.append(
                f"{store.folder}: the {document.KIND} could not be kept there ({error.strerror or error}) and is made again each time; "
                "make the folder writable, or name another in ECHELON_CACHE"
            )
        return document


def _why_too_large(profile: Profile) -> str:
    """Why the model cannot be run on this machine to see what can be cut of it; empty: it can."""
    trial_bytes, available_bytes = _TRIAL_COPIES * 8 * profile.elements, usable_memory()
    if trial_bytes > available_bytes:
        return f"the model takes {format_bytes(trial_bytes)} to be tried in float64, and this machine has {format_bytes(available_bytes)}"
    trial_seconds = (
        profile.flops(2, "forward")
        * (_BASE_RUNS + _RUNS_PER_BLOCK * len(profile.fsdp_units))
        / (usable_cores() * _CORE_FLOPS)
    )
    return (
        f"trying it in float64 would take this machine about {format_seconds(trial_seconds)}"
        if trial_seconds > _MAX_TRIAL_SECONDS
        else ""
    )


def _split_spec(spec: str) -> tuple[str, str]:
    """`file.py:name` as its two parts; the name is `job` unless given."""
    file, _, function = spec.rpartition(".py:")
    return (f"{file}.py", function) if file else (spec, "job")


def _default_name(job: JobLike, spec: str | None) -> str:
    """The job file's stem, and the name of the function where it is not `job`: every job has a run folder of its own."""
    if spec is None:
        return "job"
    file, function = _split_spec(spec) if isinstance(job, str) else (spec, getattr(job, "__name__", "job"))
    path = Path(file).resolve()
    stem = path.parent.name if path.stem == "__main__" else path.stem
    return f"{stem}-{function}" if function.isidentifier() and function != "job" else stem


def main_script() -> Path | None:
    """What Python runs, if it could be run again: not a prompt, nor what holds a notebook or tests."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    path = Path(file) if file else None
    return None if path is None or {path.stem, path.parent.name} & _HOST_PROGRAMS else path


def main_file() -> str | None:
    """The script that Python runs, where it is a source file."""
    path = main_script()
    return str(path) if path is not None and path.suffix == ".py" and path.is_file() else None
