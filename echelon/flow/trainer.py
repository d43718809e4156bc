"""A training on one rank: steps, evaluations, checkpoints, and going on after an interruption."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.errors import CheckpointError, DivergenceError, EchelonError, ForeignCheckpoint, JobError, TrainingError
from echelon.events import Event, Listener
from echelon.flow.folder_lock import held
from echelon.flow.gate import Verdict, is_plain, revoke
from echelon.flow.job_inputs import recording_variables
from echelon.flow.preflight import require_evaluation
from echelon.flow.resolve_plan import Prepared, Subject
from echelon.flow.resume import Resumption
from echelon.flow.resume_hint import how_to_go_on
from echelon.flow.run_folder import RunFolder, choose
from echelon.flow.run_settings import run_inputs
from echelon.flow.settings import Settings
from echelon.flow.signals import asking
from echelon.launchers.command import given_command
from echelon.launchers.local import AGAIN, INTERRUPTED
from echelon.launchers.rank_ipc import note_start
from echelon.plan.document_cache import installed_versions
from echelon.plan.input_digests import hashed
from echelon.world import World

if TYPE_CHECKING:
    from torch import nn

    from echelon.data.loader import StepBatch
    from echelon.engine.backends.launch_servers import Elsewhere
    from echelon.engine.step_result import Step
    from echelon.plan.certificate import Certificate
    from echelon.verifier.spot_check import SpotChecks

#: A stream has no epoch after which to save: a tenth of the steps, but never more than this many, may be lost to a kill.
STREAM_EVERY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training came to."""

    folder: Path
    step: int
    loss: float | None  #: of the last step, whenever that was; None: its log is lost
    metrics: dict[str, float]  #: of the last evaluation
    seconds: float

    def to_plain(self) -> dict[str, Any]:
        """For another process, as JSON."""
        return asdict(self) | {"folder": str(self.folder)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Trained:
        """What `to_plain` returned."""
        return cls(**{**values, "folder": Path(values["folder"])})


class Training:
    """One training on this rank. All ranks go through it in step."""

    def __init__(
        self,
        subject: Subject,
        prepared: Prepared,
        world: World,
        settings: Settings,
        listeners: Sequence[Listener],
        verdict: Verdict | None = None,
    ) -> None:
        from echelon.observer import observers

        self._subject, self._prepared, self._world, self._settings = subject, prepared, world, settings
        self._verdict = verdict or Verdict()
        self._pristine: nn.Module | None = None
        self._checks: SpotChecks | None = None
        fresh = not settings.resume and world.main
        path, why = choose(settings.folder, subject.name, fresh=fresh, inputs=run_inputs(subject))
        self._folder = RunFolder(path, keep=settings.keep)
        self._observers = lambda: observers(
            self._folder.path, world=world, quiet=settings.quiet, forecast=prepared.forecast
        )
        self._listeners = list(listeners)
        self._started, self._early = False, [why] if why and world.main else list[str]()
        self._metrics: dict[str, float] = {}
        self._loss: float | None = None
        self._evaluated_at = self._saved_at = self._resumed_at = -1
        #: Of a checkpoint that was written and not told of yet: whether it is the best is known once it is evaluated.
        self._written: tuple[Path, int, float] | None = None
        self._best: float | None = None
        self._begin = time.perf_counter()

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        return self._folder.path

    def _elsewhere(self) -> Elsewhere | None:
        address, secret = self._settings.servers, self._settings.secret_file
        if address is None or secret is None:
            return None
        from echelon.engine.backends.launch_servers import Elsewhere

        return Elsewhere(address=address, secret_file=Path(secret))

    def run(self) -> Trained:
        """From the last checkpoint, or the beginning, to the end."""
        from torch import nn

        from echelon.engine.run import Run
        from echelon.trials.deep_copies import copy_module

        job, world = self._subject.job, self._world
        if self._verdict.certificate is not None and world.main and isinstance(job.model, nn.Module):
            self._pristine = copy_module(job.model)  # the run takes the module itself
        run = Run(
            job,
            self._prepared.plan,
            world,
            workers=self._settings.workers,
            warn=self._warn,
            elsewhere=self._elsewhere(),
        )
        self._run = run
        run.attributes.unproved = self._verdict.certificate is None
        # Only rank 0 looked for a free name; the others follow it.
        self._folder = RunFolder(Path(run.ranks.gather(str(self._folder.path))[0]), keep=self._settings.keep)
        with contextlib.ExitStack() as holding:
            holding.callback(run.close)
            try:
                interrupted = self._go(holding)
            except KeyboardInterrupt:
                if not self._started:
                    raise
                self._emit("end", reason="interrupted", seconds=self._seconds(), message=AGAIN)
                raise KeyboardInterrupt(AGAIN) from None
            except Exception as error:
                self._set_doubted_aside(error)
                if isinstance(error, DivergenceError) and world.main and self._verdict.certificate is not None:
                    revoke(self._subject, self._verdict.certificate, str(error))
                error.started = self._started  # type: ignore[attr-defined]
                if self._started and isinstance(error, EchelonError):
                    error.exit_code = 1  # whatever it is called: a training that failed, not a wrong use
                self._emit("end", reason="failed", seconds=self._seconds(), message=str(error))
                raise
        if interrupted:
            raise SystemExit(INTERRUPTED)
        return Trained(
            folder=self._folder.path,
            step=run.step_number,
            loss=self._loss,
            metrics=self._metrics,
            seconds=self._seconds(),
        )

    def _go(self, holding: contextlib.ExitStack) -> bool:
        """All of it; True when asked to stop. Nothing in the folder changes before it is known that the run may go on there."""
        run, main = self._run, self._world.main
        with run.ranks.together():
            require_evaluation(self._subject.job)
        certificate = self._require_certificate() or self._verdict.certificate
        with run.ranks.together():
            if main:
                holding.enter_context(held(self._folder.path))
        self._resume()
        best = self._folder.best(self._judge(), run.step_number)
        self._best = run.ranks.gather(best and best[1])[0]
        with run.ranks.together():
            if main:
                self._write_documents(certificate)
                self._folder.write_record(self._resumption.record())
                said = [*self._folder.clear_leftovers(), self._folder.drop_best(self._judge(), run.step_number)]
                self._early.extend(filter(None, [*said, self._scaled_by_hand()]))
        self._listeners += self._observers()
        self._emit("start", **self._start_facts())
        self._started = True
        note_start()
        if main and self._verdict.line:
            kind = "warning" if self._verdict.skipped else "verified"
            self._emit(kind, message=self._verdict.line, seconds=self._verdict.seconds)
        for warning in (*(self._prepared.warnings if main else ()), *self._early):
            self._warn(warning)
        with asking(self._ask):
            interrupted = self._loop()
            self._finish(interrupted)
        return interrupted

    def _ask(self) -> None:
        self._run.stop_asked = True

    def _scaled_by_hand(self) -> str:
        """A warning where the job asks for the number of processes: then it is another job than on one device, and no proof compares the two."""
        names = self._subject.reads.world_sizes
        if not names or self._world.size == 1:
            return ""
        return (
            f"the job reads {', '.join(names)}: if its rate, batch or data depend on the number of processes, it is another job than on one device. "
            "echelon splits the job's batch between ranks, so that nothing has to be scaled"
        )

    # The parts of it

    def _loop(self) -> bool:
        """Step until the end; True when asked to stop before it."""
        run, clock = self._run, time.perf_counter()
        # An accelerator is still computing when `step` returns: its result is read one step later, so that it never waits.
        waiting: list[tuple[StepBatch, Step, float]] = []
        lag = 0 if run.device.type == "cpu" else 1
        checks = self._checks = self._spot_checks()
        first = run.step_number
        for batch in run.batches():
            with recording_variables() if batch.step == first else contextlib.nullcontext(set[str]()) as read:
                step = run.step(batch) if checks is None else checks.step(batch)
            if batch.step == first:
                self._note_variables(read)
            now = time.perf_counter()
            waiting.append((batch, step, now - clock))
            clock = now
            boundary, asked = self._boundary(), False
            while len(waiting) > (0 if boundary else lag):
                asked |= self._tell(*waiting.pop(0))
            if boundary:
                self._at_boundary()
                clock = time.perf_counter()
            if asked and not self._ended:
                for told in waiting:
                    self._tell(*told)
                return True
        return False

    def _note_variables(self, read: set[str]) -> None:
        """Have the folder's record include environment variables that the first step has read on any rank."""
        found = set[str]().union(*self._run.ranks.gather(read))
        if found and self._world.main:
            self._folder.write_record(self._resumption.record(found))

    def _spot_checks(self) -> SpotChecks | None:
        """Steps that are computed again on one device; None where that is off or would compare the run with itself."""
        if self._verdict.certificate is None:
            return None
        from echelon.verifier.spot_check import SpotChecks

        checks = SpotChecks(self._subject.job, self._run, self._pristine, self._prepared.profile)
        if self._resumed_at > 0:
            checks.agreed = min(self._folder.agreed(), self._resumed_at)
        return checks

    def _note_agreed(self) -> None:
        """Record up to which step the checkpoints are known to be right, on rank 0: one process has nothing that it could depart from."""
        if self._checks is not None:
            self._folder.note_agreed(self._checks.agreed)
        elif is_plain(self._prepared.plan, self._subject.job) and self._folder.agreed() >= self._resumed_at:
            self._folder.note_agreed(self._run.step_number)

    def _set_doubted_aside(self, error: Exception) -> None:
        """After a check that failed, on rank 0: checkpoints since the last one that agreed may contain the error."""
        if not (isinstance(error, DivergenceError) and error.agreed is not None and self._world.main):
            return
        aside = self._folder.doubt(error.agreed)
        if aside:
            self._folder.note_agreed(error.agreed)
            left = self._folder.saved()
            self._warn(
                f"step {error.agreed} is the last that was checked and agreed, so later checkpoints may contain the error and are set aside: "
                f"{', '.join(path.name for path in reversed(aside))}; "
                + (f"a resumed run goes on from {left[0].name}" if left else "a resumed run starts from the beginning")
            )

    def _tell(self, batch: StepBatch, step: Step, seconds: float) -> bool:
        """Report a step; True when any rank was asked to stop by then."""
        self._loss, asked, norm = step.read()
        if self._world.main:
            self._emit(
                "step", step=batch.step + 1, epoch=batch.epoch, loss=self._loss, rate=step.rates[0],
                norm=norm, samples=step.samples, seconds=seconds, waited=batch.waited, skipped=step.skipped,
            )  # fmt: skip
        return asked

    @property
    def _ended(self) -> bool:
        return self._run.step_number == self._run.total_steps

    @property
    def _epoch_ended(self) -> bool:
        run = self._run
        done = run.step_number - run.warmup
        return bool(run.steps_per_epoch) and done >= 0 and done % run.steps_per_epoch == 0

    @property
    def _save_due(self) -> bool:
        """Whether a checkpoint is due by the clock of steps, whatever an evaluation says."""
        run, every = self._run, self._settings.every
        if every is None and run.steps_per_epoch:
            return self._epoch_ended
        every = every or max(min(run.total_steps // 10, STREAM_EVERY), 1)
        return run.step_number % every == 0

    def _boundary(self) -> bool:
        return self._ended or self._epoch_ended or self._save_due

    def _at_boundary(self) -> None:
        """Save when that is due, evaluate at the end of an epoch, and save whenever an evaluation was the best so far.

        What is due is saved before it is evaluated, and so is the first that is evaluated at all: an evaluation that fails, as the
        first one does if any, must not cost what was trained.
        """
        from echelon.engine.checkpoint.schedule_state import takes_metric

        evaluating = self._run.job.evaluation is not None and (self._epoch_ended or self._ended)
        due = self._ended or self._save_due or (evaluating and self._evaluated_at < 0)
        # An evaluation that steps a schedule belongs to the step: a checkpoint before it would go on without it.
        last = evaluating and any(takes_metric(schedule) for schedule in self._run.schedules)
        if due and not last:
            self._save(final=self._ended)
        if evaluating:
            try:
                self._evaluate()
            except Exception:
                if self._world.size == 1:  # other ranks may be waiting within the evaluation
                    self._save(final=False)
                self._tell_saved()
                raise
        if due and last:
            self._save(final=self._ended)
        if not due and self._better():
            self._save(final=False)
        self._tell_saved()

    def _evaluate(self) -> None:
        run, begin = self._run, time.perf_counter()
        self._metrics, self._evaluated_at = run.evaluate(), run.step_number
        self._emit(
            "evaluation",
            epoch=self._epoch(),
            metrics=self._metrics,
            samples=len(run.job.evaluation) if hasattr(run.job.evaluation, "__len__") else None,
            seconds=time.perf_counter() - begin,
        )

    def _better(self) -> bool:
        """Whether these very weights were evaluated, and are the best so far."""
        loss = self._metrics.get("loss", math.nan)
        if self._evaluated_at != self._run.step_number or not math.isfinite(loss):
            return False
        return self._best is None or loss < self._best

    def _save(self, *, final: bool) -> None:
        run, folder = self._run, self._folder
        if run.step_number == self._saved_at:
            return
        begin, place = time.perf_counter(), folder.place(run.step_number)
        if self._world.main and os.path.lexists(place):
            folder.discard(place)  # it could not be read when the run was resumed, so its steps were done again
        try:
            size = run.save(place)
        except CheckpointError as error:
            if final:
                raise
            # Hours of work must not end because a disk was full for a while: the next one is tried again.
            self._warn(f"{error}; training goes on, the last good checkpoint stays")
            return
        self._saved_at = run.step_number
        self._written = place, size, time.perf_counter() - begin

    def _tell_saved(self) -> None:
        """Tell of the checkpoint that was written last, note whether it is the best, and make room."""
        if self._written is None:
            return
        (place, size, seconds), self._written = self._written, None
        better = self._better()
        if better:
            self._best = self._metrics["loss"]
        if self._world.main:
            if better:
                self._note_best(place)
            self._note_agreed()
            self._folder.prune()
        self._emit("checkpoint", path=str(place), seconds=seconds, bytes=size, best=better)

    def _note_best(self, place: Path) -> None:
        try:
            self._folder.note_best(place, self._metrics["loss"], self._judge())
        except OSError as error:  # a full disk: the checkpoint is there
            self._warn(f"{place}: the best so far, which could not be noted ({error.strerror})")

    def _judge(self) -> str:
        """Digest of what decides an evaluation's loss besides the weights: losses by another one are not comparable."""
        parts = self._subject.identity.parts
        names = ("evaluation", "code loss", "code inputs", "code collate")
        return hashed(json.dumps([parts.get(name) for name in names]).encode())

    def _resume(self) -> None:
        """Load the newest checkpoint that is whole; a damaged one is passed over, loudly."""
        mine = self._folder.saved() if self._settings.resume else []
        # What rank 0 sees counts: a network disk may show the others something older.
        saved = self._run.ranks.gather([str(path) for path in mine])[0]
        self._resumption = Resumption(self._run, self._subject)
        self._resumption.check(self._folder, saved, self._settings.override)
        reasons = []
        for place in saved:
            try:
                self._run.load(place)
            except ForeignCheckpoint:
                raise
            except CheckpointError as error:
                reasons.append(str(error))
                self._warn(f"{error}; trying the one before")
                continue
            self._saved_at = self._resumed_at = self._run.step_number
            self._require_room(place)
            self._resumption.apply(self._warn)
            return
        if saved:
            raise CheckpointError(
                f"{self._folder.checkpoints}: none of {len(saved)} checkpoints can be read; --fresh starts anew beside them:\n"
                + "\n".join(f"  - {reason}" for reason in reasons)
            )

    def _require_room(self, place: str) -> None:
        """A job that ends before the checkpoint does was not meant to go on from it."""
        step, total = self._run.step_number, self._run.total_steps
        if step > total:
            raise JobError(
                f"{place}: step {step}, and the job now ends at step {total}: there is nothing left to train; give it more epochs= or "
                "steps=, or --fresh to start anew in another folder"
            )

    def _finish(self, interrupted: bool) -> None:
        run = self._run
        step, total = run.step_number, run.total_steps
        if step == self._resumed_at:
            self._recall()
        else:
            run.settle()
            self._save(final=True)
            self._tell_saved()
            self._emit("memory", **self._memory())
            if self._checks is not None and self._world.main:
                checks = self._checks
                self._emit("checked", count=checks.count, seconds=checks.seconds, left_out=checks.left_out)
        if interrupted:
            again = how_to_go_on(given_command(), self._folder.path, fresh=not self._settings.resume)
            reason, message = "interrupted", f"stopped at step {step} of {total} and saved; go on with: {again}"
        elif step == self._resumed_at:
            reason = "finished"
            message = (
                f"already finished at step {step}; --fresh starts anew in another folder, more epochs= or steps= go on"
            )
        else:
            reason, message = "finished", f"{step} steps; everything is in {self._folder.path}"
        self._emit("end", reason=reason, seconds=self._seconds(), message=message)
        if self._world.main:
            self._report()

    def _recall(self) -> None:
        """Have the results of a run that was finished before; evaluate where that failed or was killed then."""
        run, main = self._run, self._world.main
        self._loss, found = run.ranks.gather(self._folder.recall(run.step_number) if main else None)[0]
        self._metrics = found or {}
        known = found is not None and {"loss", *run.job.metrics} <= found.keys()
        if known or run.job.evaluation is None or not self._ended:
            return
        self._evaluate()
        if self._better() and main:
            self._note_best(self._folder.place(run.step_number))

    def _report(self) -> None:
        from echelon.observer import write_report

        try:
            write_report(self._folder.path)
        except (EchelonError, OSError) as error:
            self._warn(f"no report was written: {error}")

    # What is told

    def _emit(self, kind: str, *, step: int | None = None, **data: Any) -> None:
        number = self._run.step_number if step is None else step
        event = Event(kind=kind, step=number, rank=self._world.rank, data=data)
        for listener in self._listeners:
            listener(event)

    def _warn(self, message: str) -> None:
        if self._started:
            self._emit("warning", message=message)
        else:
            self._early.append(message)  # nobody listens yet

    def _start_facts(self) -> dict[str, Any]:
        run, job = self._run, self._subject.job
        return {
            "job": self._subject.name, "plan": str(run.plan), "ranks": self._world.size, "batch": job.batch, "steps": run.total_steps,
            "steps_per_epoch": run.steps_per_epoch, "epochs": job.epochs, "samples": run.samples,
            "parameters": sum(map(math.prod, run.shapes.values())), "resumed_from": run.step_number,
            "device": str(run.device), "run": str(self._folder.path), "file": self._subject.spec, "seed": job.seed, "versions": installed_versions(),
        }  # fmt: skip

    def _memory(self) -> dict[str, int]:
        from echelon.engine.peak_memory import peak

        run = self._run
        peaks = run.ranks.gather(peak(run.device))
        held = run.ranks.gather(sum(run.held().values()))
        return {"peak": max(peaks), "held": max(held)}

    def _epoch(self) -> int:
        run = self._run
        return max(run.step_number - 1 - run.warmup, 0) // run.steps_per_epoch if run.steps_per_epoch else 0

    def _seconds(self) -> float:
        return time.perf_counter() - self._begin

    def _write_documents(self, certificate: Certificate | None) -> None:
        made, kept = self._prepared, self._folder.certificate()
        if certificate is None and kept is not None and not kept.stale(**self._identity()):
            certificate = kept  # nobody required it, but somebody put it there, and it covers this run
        self._folder.write_documents([made.plan, made.forecast, made.profile, made.cluster, certificate])

    def _identity(self) -> dict[str, Any]:
        """What a certificate has to cover."""
        from echelon.verifier.fingerprints import job_hash

        spec, identity, profile = self._subject.spec, self._subject.identity, self._prepared.profile
        return {
            "plan": self._prepared.plan, "job": job_hash(spec) if spec else "", "model": self._run.fingerprint,
            "versions": identity.versions, "inputs": identity.proof_inputs, "graph": profile.graph if profile is not None else "",
        }  # fmt: skip

    def _require_certificate(self) -> Certificate | None:
        if self._settings.certificate is None:
            return None
        from echelon.verifier.require_certificate import require

        if self._subject.spec is None:
            raise TrainingError(
                "a certificate covers a job file, and this job has none: train it with `echelon train file.py`"
            )
        certificate = require(self._settings.certificate, **self._identity())
        if certificate.weakness and self._world.main:
            self._warn(f"{self._settings.certificate} is a weaker proof: {certificate.weakness}")
        return certificate
