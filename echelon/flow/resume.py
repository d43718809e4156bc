"""Resume a run with the settings that it had, or with the changes that the user names."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import CheckpointError, JobError
from echelon.flow import run_settings
from echelon.flow.job_source import main_script
from echelon.flow.run_folder import RunFolder, read_record
from echelon.flow.run_settings import JobRecord, ResumeChanges, Schedules

if TYPE_CHECKING:
    from echelon.engine.run import Run
    from echelon.flow.job_source import JobSource

_STEP = re.compile(r"step-([0-9]+)")


class Resumption:
    """The job's own settings, recorded before a checkpoint replaces them. Every rank has one."""

    def __init__(self, run: Run, source: JobSource) -> None:
        from echelon.engine.overrides import initial_settings

        self._run, self._initial_settings, self._changes = run, initial_settings(run), ResumeChanges()
        inputs, settings = run_settings.run_inputs(source), run_settings.resolve_settings(run, source)
        code = run_settings.hash_sources() if run.world.is_main else ""
        self._job_record = JobRecord(
            file=source.spec or "", sha256=source.file_hash, inputs=inputs, settings=settings, source=code
        )
        self._previous_record = JobRecord()
        self._path, self._requested_overrides, self._applied_overrides = Path(), list[str](), dict[str, int]()
        self._schedules: Schedules = {}
        run.close_callbacks.append(source.remember_changes)

    def check(self, folder: RunFolder, checkpoints: Sequence[str], requested_overrides: Sequence[str]) -> None:
        """Refuse to resume from `checkpoints` (newest first) a job that changed; rank 0 decides for all."""
        run = self._run
        self._path, self._requested_overrides = folder.path, list(requested_overrides)
        with run.ranks.raise_on_all_ranks():
            if run.world.is_main and checkpoints:
                step = next((int(match[1]) for path in checkpoints if (match := _STEP.fullmatch(Path(path).name))), 0)
                self._previous_record, warnings = _find_record(folder, checkpoints)
                previous, current = self._previous_record, self._job_record
                self._schedules = self._make_schedules([previous, *map(_checkpoint_record, checkpoints)])
                changes = run_settings.compare_records(
                    folder.path, previous, current, requested_overrides, step, self._schedules
                )
                self._changes = dataclasses.replace(changes, warnings=(*warnings, *changes.warnings))
        decision = run.ranks.broadcast_object((self._changes, self._previous_record, self._schedules))
        self._changes, self._previous_record, self._schedules = decision
        overridden = {*self._changes.overrides, *self._previous_record.overrides}
        run.replaces_schedules = any(name.startswith("lr_schedule") for name in overridden)

    def _make_schedules(self, records: Iterable[JobRecord]) -> Schedules:
        """The schedules for the lengths of the records, while the optimizers are as the job makes them."""
        from echelon.engine.overrides import schedule_settings

        schedules: Schedules = {}
        for total_steps in [(record.settings or {}).get("total_steps") for record in records]:
            if isinstance(total_steps, int) and total_steps not in (self._run.total_steps, *schedules):
                with suppress(Exception):  # not possible for that length: the differences are listed
                    schedules[total_steps] = run_settings.json_round_trip(schedule_settings(self._run, total_steps))
        return schedules

    def apply(self, warn: Callable[[str], None]) -> None:
        """After a checkpoint was loaded, set what is overridden and rebuild schedules for a new length."""
        from echelon.engine.overrides import apply_overrides

        run, changes = self._run, self._changes
        checkpoint_record = JobRecord.from_plain(run.loaded_record)
        with run.ranks.raise_on_all_ranks():
            overrides = [*self._requested_overrides, *changes.overrides]
            records = (checkpoint_record, self._previous_record, self._job_record)
            changed = run_settings.require_own_checkpoint(
                self._path, run.step_number, *records, overrides, self._schedules
            )
            stored_settings = checkpoint_record.settings or self._previous_record.settings or {}
            has_rebuilt_schedule = apply_overrides(run, self._initial_settings, stored_settings, changed)
        self._applied_overrides = dict.fromkeys(changes.overrides, run.step_number)
        if not run.world.is_main:
            return
        for line in changes.warnings:
            warn(line)
        previous_total = stored_settings.get("total_steps")
        if has_rebuilt_schedule and previous_total != run.total_steps:
            groups = [group for optimizer in run.optimizers for group in optimizer.param_groups[:4]]
            rates = ", ".join(f"{float(group['lr']):.4g}" for group in groups)
            lengths = f"{run.total_steps} steps ({previous_total} before)"
            warn(f"the schedule is rebuilt for {lengths}: learning rate {rates} at step {run.step_number}")

    def make_record(self, variables: Iterable[str] = ()) -> JobRecord:
        """The record for job.json and the checkpoints. `variables`: environment variables that a step has read."""
        names = [*(self._previous_record.inputs or {}), *(f"environment {name}" for name in variables)]
        record = dataclasses.replace(
            self._job_record,
            inputs=run_settings.with_variables(self._job_record.inputs or {}, names),
            settings=run_settings.keep_initial_values(
                self._previous_record, self._job_record, self._requested_overrides
            ),
            overrides={**self._previous_record.overrides, **self._applied_overrides},
        )
        self._run.job_record = dataclasses.asdict(record)
        return record


def _find_record(folder: RunFolder, checkpoints: Sequence[str]) -> tuple[JobRecord, tuple[str, ...]]:
    """The record of the job that trained in the folder: job.json, or the newest checkpoint's with a warning."""
    record = read_record(folder.path)
    if record.settings is not None and record.inputs is not None:
        return record, ()
    path = folder.path / "job.json"
    problem = "damaged" if path.exists() else "missing"
    for checkpoint in checkpoints:
        checkpoint_record = _checkpoint_record(checkpoint)
        if checkpoint_record.settings is not None:
            return checkpoint_record, (f"{path} is {problem}; its contents are restored from {Path(checkpoint).name}",)
    raise JobError(
        f"{path} is {problem}, and no checkpoint in the folder has a copy: whether the run is this job's is not known; put it back, or start over in another folder with --fresh (resume=False)"
    )


def _checkpoint_record(checkpoint: str) -> JobRecord:
    from echelon.checkpoint_files.checkpoint_reader import read_manifest

    try:
        return JobRecord.from_plain(read_manifest(Path(checkpoint)).get("record"))
    except CheckpointError:  # loading it reports the damage
        return JobRecord()


def resume_instructions(command: Sequence[str], folder: Path, *, fresh: bool) -> str:
    """How to resume an interrupted run: its own command, without the option that asks for a fresh start."""
    options = f"out={str(folder)!r} and resume=True"
    if not command or main_script() is None:
        return f"the same command with {options}" if fresh else "the same command"
    if not fresh:
        return shlex.join(command)
    if not any(word == "train" and program.endswith("echelon") for program, word in itertools.pairwise(command)):
        return f"{shlex.join(command)}, with {options} in it"
    return shlex.join([*(word for word in command if word != "--fresh"), "--resume", "--out", str(folder)])
