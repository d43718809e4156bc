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
    Changes,
    JobRecord,
    compare,
    first_values,
    require_own,
    resolve_settings,
    run_inputs,
    source_hash,
    with_variables,
)

if TYPE_CHECKING:
    from echelon.engine.run import Run
    from echelon.flow.resolve_plan import Subject

_STEP = re.compile(r"step-([0-9]+)")


class Resumption:
    """What the job asks for, kept before a checkpoint is loaded. Every rank makes one."""

    def __init__(self, run: Run, subject: Subject) -> None:
        from echelon.engine.overrides import fresh_settings
        from echelon.verifier.fingerprints import job_hash

        self._run, self._fresh, self._changes = run, fresh_settings(run), Changes()
        self._record = JobRecord(
            file=subject.spec or "",
            sha256=job_hash(subject.spec) if subject.spec is not None else "",
            inputs=run_inputs(subject),
            settings=resolve_settings(run, subject),
            source=source_hash() if run.world.main else "",
        )
        self._before = JobRecord()
        self._path, self._override, self._overrides = Path(), list[str](), dict[str, int]()
        self._schedules: dict[int, dict[str, Any]] = {}
        folder = Path(subject.spec.partition(".py:")[0]).resolve().parent if subject.spec is not None else None
        run.at_close.append(partial(remember_changes, subject.job, subject.identity, folder))

    def check(self, folder: RunFolder, saved: Sequence[str], override: Sequence[str]) -> None:
        """Refuse to resume from `saved` (newest first) a job that changed; rank 0 decides for all."""
        run = self._run
        self._path, self._override = folder.path, list(override)
        with run.ranks.together():
            if run.world.main and saved:
                step = next((int(found[1]) for path in saved if (found := _STEP.fullmatch(Path(path).name))), 0)
                self._before, said = _known_record(folder, saved)
                changes = compare(
                    folder.path,
                    self._before,
                    self._record,
                    override=override,
                    step=step,
                    finished=step >= run.total_steps,
                    schedule_for=self._schedule_for,
                )
                self._changes = dataclasses.replace(changes, warnings=(*said, *changes.warnings))
                for path in saved:  # while the optimizers are as the job makes them
                    self._note_length(path)
        self._changes, self._before, self._schedules = run.ranks.gather((self._changes, self._before, self._schedules))[
            0
        ]
        named = {*self._changes.overrides, *self._before.overrides}
        run.replaces_schedules = any(name.startswith("schedule") for name in named)

    def _note_length(self, path: str) -> None:
        settings = _stored_record(path).settings or {}
        if isinstance(total := settings.get("total_steps"), int) and total != self._run.total_steps:
            self._schedule_for(total)

    def _schedule_for(self, total: int) -> dict[str, Any]:
        from echelon.engine.overrides import schedule_settings

        if total not in self._schedules:
            try:
                self._schedules[total] = schedule_settings(self._run, total)
            except Exception:  # it cannot be made for that length: what differs is listed
                self._schedules[total] = {}
        return self._schedules[total]

    def apply(self, warn: Callable[[str], None]) -> None:
        """Set, after a checkpoint was loaded, what is overridden; rebuild schedules for a new length."""
        from echelon.engine.overrides import apply_overrides

        run, changes = self._run, self._changes
        stored = JobRecord.read(run.loaded_record)
        with run.ranks.together():
            changed = require_own(
                self._path,
                run.step_number,
                stored,
                self._before,
                self._record,
                override=[*self._override, *changes.overrides],
                schedule_for=self._schedules.__getitem__,
            )
            then = stored.settings or self._before.settings or {}
            rebuilt = apply_overrides(run, self._fresh, then, changed)
        self._overrides = dict.fromkeys(changes.overrides, run.step_number)
        if not run.world.main:
            return
        for line in changes.warnings:
            warn(line)
        before = then.get("total_steps")
        if rebuilt and before != run.total_steps:
            rates = ", ".join(f"{float(group['lr']):.4g}" for each in run.optimizers for group in each.param_groups[:4])
            warn(
                f"the schedule is rebuilt for {run.total_steps} steps ({before} before): learning rate {rates} at step {run.step_number}"
            )

    def record(self, variables: Iterable[str] = ()) -> JobRecord:
        """What job.json and the checkpoints are to hold. `variables`: environment variables that a step has read."""
        names = [*(self._before.inputs or {}), *(f"environment {name}" for name in variables)]
        made = dataclasses.replace(
            self._record,
            inputs=with_variables(self._record.inputs or {}, names),
            settings=first_values(self._before, self._record, self._override),
            overrides={**self._before.overrides, **self._overrides},
        )
        self._run.job_record = dataclasses.asdict(made)
        return made


def _known_record(folder: RunFolder, saved: Sequence[str]) -> tuple[JobRecord, tuple[str, ...]]:
    """What is known of the job that trained in the folder: by job.json, or by the newest checkpoint where that is lost; and a warning."""
    record = folder.record()
    if record.settings is not None and record.inputs is not None:
        return record, ()
    path = folder.path / "job.json"
    what = "damaged" if path.exists() else "missing"
    for each in saved:
        stored = _stored_record(each)
        if stored.settings is not None:
            return stored, (f"{path} is {what}; what it held is restored from {Path(each).name}",)
    raise JobError(
        f"{path} is {what}, and no checkpoint in the folder holds what it held: whether the run is this job's is not known; put it back, or "
        "start over in another folder with --fresh (resume=False)"
    )


def _stored_record(checkpoint: str) -> JobRecord:
    from echelon.engine.checkpoint.checkpoint_reader import read_manifest

    try:
        return JobRecord.read(read_manifest(Path(checkpoint)).get("record"))
    except CheckpointError:  # loading it says so
        return JobRecord()
