"""The checkpoints of one training: which one it resumes from, which is the best, and which a failed check puts in doubt."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.errors import CheckpointError, DivergenceError, IncompatibleCheckpointError, JobError
from echelon.flow.job_source import JobSource
from echelon.flow.resume import Resumption
from echelon.flow.run_folder import RunFolder
from echelon.flow.settings import Settings
from echelon.plan.input_digests import hash_bytes

if TYPE_CHECKING:
    from echelon.engine.run import Run

Emit = Callable[..., None]


class Checkpoints:
    """Every rank has one; rank 0 writes the folder's notes. `emit` and `warn` report."""

    def __init__(self, run: Run, folder: RunFolder, source: JobSource, emit: Emit, warn: Callable[[str], None]) -> None:
        self._run, self._folder, self._source, self._emit, self._warn = run, folder, source, emit, warn
        self.saved_step = self.resumed_step = self.evaluated_step = -1
        #: Of the last evaluation.
        self.metrics: dict[str, float] = {}
        self._best_loss: float | None = None
        #: Path, bytes and seconds of a written checkpoint until its evaluation, which may make it the best.
        self._unreported: tuple[Path, int, float] | None = None

    @property
    def newest(self) -> Path | None:
        """The checkpoint that was saved or resumed last."""
        return self._folder.checkpoint_path(self.saved_step) if self.saved_step >= 0 else None

    def resume(self, resumption: Resumption, settings: Settings) -> None:
        """Load the newest intact checkpoint; warn about damaged ones."""
        run, ranks = self._run, self._run.ranks
        own_checkpoints = self._folder.list_checkpoints() if settings.resume else []
        # Rank 0's list counts: a network disk may show an older one to the others.
        checkpoints = ranks.broadcast_object([str(path) for path in own_checkpoints])
        resumption.check(self._folder, checkpoints, settings.override)
        reasons: list[str] = []
        for checkpoint in checkpoints:
            try:
                run.load(checkpoint)
            except IncompatibleCheckpointError:
                raise
            except CheckpointError as error:
                reasons.append(str(error))
                self._warn(f"{error}; trying the one before")
                continue
            self.saved_step = self.resumed_step = run.step_number
            if run.step_number > run.total_steps:
                problem = f"step {run.step_number}, but the job now ends at step {run.total_steps}, so nothing is left to train"
                remedy = "give it more epochs= or steps=, or --fresh to start over in another folder"
                raise JobError(f"{checkpoint}: {problem}; {remedy}")
            resumption.apply(self._warn)
            break
        else:
            if checkpoints:
                causes = "\n".join(f"  - {reason}" for reason in reasons)
                problem = f"none of {len(checkpoints)} checkpoints can be read; --fresh starts over in another folder"
                raise CheckpointError(f"{self._folder.checkpoints}: {problem}:\n{causes}")
        best = self._folder.best_checkpoint(self._evaluation_digest(), run.step_number)
        self._best_loss = ranks.broadcast_object(best and best[1])

    def clear_leftovers(self) -> list[str]:
        """Delete what earlier launches left unfinished, on rank 0; warnings."""
        stale_best = self._folder.drop_stale_best(self._evaluation_digest(), self._run.step_number)
        return [*self._folder.clear_leftovers(), *filter(None, [stale_best])]

    def evaluate(self) -> None:
        """Evaluate the present weights."""
        self.metrics, self.evaluated_step = self._run.evaluate(), self._run.step_number

    def is_best(self) -> bool:
        """Whether the present weights were evaluated and are the best so far."""
        loss = self.metrics.get("loss", math.nan)
        if self.evaluated_step != self._run.step_number or not math.isfinite(loss):
            return False
        return self._best_loss is None or loss < self._best_loss

    def save(self, *, is_final: bool) -> None:
        """Write a checkpoint of the present step, once; only the final one must succeed."""
        run = self._run
        if run.step_number == self.saved_step:
            return
        start_time, path = time.perf_counter(), self._folder.checkpoint_path(run.step_number)
        if run.world.is_main and os.path.lexists(path):
            self._folder.delete_checkpoint(path)  # damaged: it was skipped on resume and its steps were repeated
        try:
            size = run.save(path)
        except CheckpointError as error:
            if is_final:
                raise
            # A temporarily full disk must not end hours of work: the next checkpoint is tried again.
            self._warn(f"{error}; training continues, the last good checkpoint stays")
            return
        self.saved_step = run.step_number
        self._unreported = path, size, time.perf_counter() - start_time

    def report(self, note_checked_step: Callable[[], None]) -> None:
        """Report the last checkpoint, once its evaluation is known, and delete old ones."""
        if self._unreported is None:
            return
        (path, size, seconds), self._unreported = self._unreported, None
        is_best = self.is_best()
        if is_best:
            self._best_loss = self.metrics["loss"]
        if self._run.world.is_main:
            if is_best:
                self.write_best(path)
            note_checked_step()
            self._folder.prune()
        self._emit("checkpoint", path=str(path), seconds=seconds, bytes=size, best=is_best)

    def write_best(self, path: Path) -> None:
        """Note the best checkpoint, on rank 0."""
        try:
            self._folder.write_best(path, self.metrics["loss"], self._evaluation_digest())
        except OSError as error:  # a full disk: the checkpoint itself is there
            self._warn(f"{path} is the best so far, which could not be noted ({error.strerror})")

    def _evaluation_digest(self) -> str:
        """Digest of what decides an evaluation's loss besides the weights: losses with different digests are not comparable."""
        parts = self._source.identity.digests
        names = ("eval_data", "code loss", "code inputs", "code collate")
        return hash_bytes(json.dumps([parts.get(name) for name in names]).encode())

    def quarantine(self, error: Exception) -> None:
        """Set checkpoints after the last agreed step aside, on rank 0: they may contain the error that a check has found."""
        if not (isinstance(error, DivergenceError) and error.last_agreed_step is not None and self._run.world.is_main):
            return
        quarantined = self._folder.quarantine_after(error.last_agreed_step)
        if quarantined:
            self._folder.write_checked_step(error.last_agreed_step)
            remaining = self._folder.list_checkpoints()
            names = ", ".join(path.name for path in reversed(quarantined))
            start = remaining[0].name if remaining else "the beginning"
            reason = f"step {error.last_agreed_step} is the last that was checked and agreed"
            aside = f"later checkpoints may contain the error and are set aside: {names}"
            self._warn(f"{reason}, so {aside}; a resumed run starts from {start}")

    def evaluation_event(self, **data: Any) -> dict[str, Any]:
        """Data of the last evaluation's event."""
        eval_data = self._run.job.eval_data
        return {"metrics": self.metrics, "samples": len(eval_data) if hasattr(eval_data, "__len__") else None, **data}
