"""Resume a run with the settings that it had, or with the changes that the user names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.errors import CheckpointError, JobError
from echelon.flow.job_identity import remember_changes
from echelon.flow.run_folder import RunFolder
from echelon.flow.run_settings import (
    JobRecord,
    ResumeChanges,
    compare_records,
    hash_sources,
    keep_initial_values,
    require_own_checkpoint,
    resolve_settings,
    run_inputs,
    with_variables,
)

if TYPE_CHECKING:
    from echelon.engine.run import Run
    from echelon.flow.job_source import JobSource

_STEP = re.compile(r"step-([0-9]+)")


class Resumption:
    """What the job asks for, kept before a checkpoint is loaded. Every rank makes one."""

    def __init__(self, run: Run, job_source: JobSource) -> None:
        from echelon.engine.overrides import initial_settings
        from echelon.verifier.fingerprints import job_hash

        self._run, self._initial_settings, self._changes = run, initial_settings(run), ResumeChanges()
        self._job_record = JobRecord(
            file=job_source.spec or "",
            sha256=job_hash(job_source.spec) if job_source.spec is not None else "",
            inputs=run_inputs(job_source),
            settings=resolve_settings(run, job_source),
            source=hash_sources() if run.world.is_main else "",
        )
        self._previous_record = JobRecord()
        self._path, self._requested_overrides, self._applied_overrides = Path(), list[str](), dict[str, int]()
        self._schedules: dict[int, dict[str, Any]] = {}
        changes = partial(remember_changes, job_source.job, job_source.identity, job_source.folder)
        run.close_callbacks.append(changes)

    def check(self, folder: RunFolder, checkpoints: Sequence[str], requested_overrides: Sequence[str]) -> None:
        """Refuse to resume from `checkpoints` (newest first) a job that changed; rank 0 decides for all."""
        run = self._run
        self._path, self._requested_overrides = folder.path, list(requested_overrides)
        with run.ranks.raise_on_all_ranks():
            if run.world.is_main and checkpoints:
                step = next((int(match[1]) for path in checkpoints if (match := _STEP.fullmatch(Path(path).name))), 0)
                self._previous_record, warnings = _find_record(folder, checkpoints)
                changes = compare_records(
                    folder.path,
                    self._previous_record,
                    self._job_record,
                    override=requested_overrides,
                    step=step,
                    finished=step >= run.total_steps,
                    schedule_for=self._schedule_for,
                )
                self._changes = dataclasses.replace(changes, warnings=(*warnings, *changes.warnings))
                for path in checkpoints:  # while the optimizers are as the job makes them
                    self._collect_schedule(path)
        self._changes, self._previous_record, self._schedules = run.ranks.all_gather_object(
            (self._changes, self._previous_record, self._schedules)
        )[0]
        overridden = {*self._changes.overrides, *self._previous_record.overrides}
        run.replaces_schedules = any(name.startswith("lr_schedule") for name in overridden)

    def _collect_schedule(self, checkpoint: str) -> None:
        settings = _checkpoint_record(checkpoint).settings or {}
        if isinstance(total_steps := settings.get("total_steps"), int) and total_steps != self._run.total_steps:
            self._schedule_for(total_steps)

    def _schedule_for(self, total_steps: int) -> dict[str, Any]:
        from echelon.engine.overrides import schedule_settings

        if total_steps not in self._schedules:
            try:
                self._schedules[total_steps] = schedule_settings(self._run, total_steps)
            except Exception:  # it cannot be made for that length: what differs is listed
                self._schedules[total_steps] = {}
        return self._schedules[total_steps]

    def apply(self, warn: Callable[[str], None]) -> None:
        """Set, after a checkpoint was loaded, what is overridden; rebuild schedules for a new length."""
        from echelon.engine.overrides import apply_overrides

        run, changes = self._run, self._changes
        checkpoint_record = JobRecord.from_plain(run.loaded_record)
        with run.ranks.raise_on_all_ranks():
            changed_settings = require_own_checkpoint(
                self._path,
                run.step_number,
                checkpoint_record,
                self._previous_record,
                self._job_record,
                override=[*self._requested_overrides, *changes.overrides],
                schedule_for=self._schedules.__getitem__,
            )
            stored_settings = checkpoint_record.settings or self._previous_record.settings or {}
            has_rebuilt_schedule = apply_overrides(run, self._initial_settings, stored_settings, changed_settings)
        self._applied_overrides = dict.fromkeys(changes.overrides, run.step_number)
        if not run.world.is_main:
            return
        for line in changes.warnings:
            warn(line)
        previous_total = stored_settings.get("total_steps")
        if has_rebuilt_schedule and previous_total != run.total_steps:
            rates = ", ".join(
                f"{float(group['lr']):.4g}" for optimizer in run.optimizers for group in optimizer.param_groups[:4]
            )
            warn(
                f"the schedule is rebuilt for {run.total_steps} steps ({previous_total} before): learning rate {rates} at step {run.step_number}"
            )

    def make_record(self, variables: Iterable[str] = ()) -> JobRecord:
        """What job.json and the checkpoints are to hold. `variables`: environment variables that a step has read."""
        names = [*(self._previous_record.inputs or {}), *(f"environment {name}" for name in variables)]
        record = dataclasses.replace(
            self._job_record,
            inputs=with_variables(self._job_record.inputs or {}, names),
            settings=keep_initial_values(self._previous_record, self._job_record, self._requested_overrides),
            overrides={**self._previous_record.overrides, **self._applied_overrides},
        )
        self._run.job_record = dataclasses.asdict(record)
        return record


def _find_record(folder: RunFolder, checkpoints: Sequence[str]) -> tuple[JobRecord, tuple[str, ...]]:
    """What is known of the job that trained in the folder: by job.json, or by the newest checkpoint where that is lost; and a warning."""
    record = folder.read_record()
    if record.settings is not None and record.inputs is not None:
        return record, ()
    path = folder.path / "job.json"
    problem = "damaged" if path.exists() else "missing"
    for checkpoint in checkpoints:
        checkpoint_record = _checkpoint_record(checkpoint)
        if checkpoint_record.settings is not None:
            return checkpoint_record, (f"{path} is {problem}; what it held is restored from {Path(checkpoint).name}",)
    raise JobError(
        f"{path} is {problem}, and no checkpoint in the folder holds what it held: whether the run is this job's is not known; put it back, or "
        "start over in another folder with --fresh (resume=False)"
    )


def _checkpoint_record(checkpoint: str) -> JobRecord:
    from echelon.checkpoint_files.checkpoint_reader import read_manifest

    try:
        return JobRecord.from_plain(read_manifest(Path(checkpoint)).get("record"))
    except CheckpointError:  # loading it says so
        return JobRecord()
