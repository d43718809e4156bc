"""Resume a run with the settings that it had, or with the changes that the user names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.flow.folder import RunFolder
from echelon.flow.run_settings import (
    Changes,
    JobRecord,
    compare,
    resolve_settings,
    run_inputs,
    source_hash,
    with_variables,
)

if TYPE_CHECKING:
    from echelon.engine.run import Run
    from echelon.flow.prepare import Subject


class Resumption:
    """What the job asks for, kept before a checkpoint is loaded. Every rank makes one."""

    def __init__(self, run: Run, subject: Subject) -> None:
        from echelon.engine.overrides import fresh_settings
        from echelon.verifier.identity import job_hash

        self._run, self._fresh, self._changes = run, fresh_settings(run), Changes()
        self._record = JobRecord(
            file=subject.spec or "",
            sha256=job_hash(subject.spec) if subject.spec is not None else "",
            inputs=run_inputs(subject),
            settings=resolve_settings(run, subject),
            source=source_hash() if run.world.main else "",
        )
        self._before = JobRecord()

    def check(self, folder: RunFolder, saved: Sequence[str], override: Sequence[str]) -> None:
        """Refuse to resume from `saved` (newest first) a job that changed; rank 0 decides for all."""
        run = self._run
        with run.ranks.together():
            if run.world.main and saved:
                step = int(Path(saved[0]).name.rpartition("-")[2])
                self._before = folder.record()
                self._changes = compare(
                    folder.path,
                    self._before,
                    self._record,
                    override=override,
                    step=step,
                    finished=step >= run.total_steps,
                )
        self._changes = run.ranks.gather(self._changes)[0]

    def apply(self, warn: Callable[[str], None]) -> None:
        """Set, after a checkpoint was loaded, what is overridden; rebuild schedules for a new length."""
        from echelon.engine.overrides import apply_overrides

        run, changes = self._run, self._changes
        apply_overrides(run, self._fresh, changes.overrides, rebuild=changes.rebuild)
        if not run.world.main:
            return
        for line in changes.warnings:
            warn(line)
        then = (self._before.settings or {}).get("total_steps")
        if changes.rebuild and run.schedules and then != run.total_steps:
            rates = ", ".join(f"{float(group['lr']):.4g}" for each in run.optimizers for group in each.param_groups[:4])
            warn(
                f"the schedule is rebuilt for {run.total_steps} steps ({then} before): learning rate {rates} at step {run.step_number}"
            )

    def record(self, variables: Iterable[str] = ()) -> JobRecord:
        """What job.json is to hold. `variables`: environment variables that a step has read."""
        names = [*(self._before.inputs or {}), *(f"environment {name}" for name in variables)]
        inputs = with_variables(self._record.inputs or {}, names)
        return dataclasses.replace(self._record, inputs=inputs, overrides=tuple(sorted(self._changes.overrides)))
