"""Training from start to end: plan, ranks, steps, evaluations, checkpoints, and going on after an interruption."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.errors import CheckpointError, EchelonError, ForeignCheckpoint, JobError, TrainingError
from echelon.events import Event, Listener
from echelon.flow.agree import agree_plan
from echelon.flow.folder import RunFolder, choose
from echelon.flow.prepare import JobLike, PlanLike, Prepared, Subject
from echelon.flow.signals import asking
from echelon.flow.start import run_script_again
from echelon.launchers.local import INTERRUPTED
from echelon.plan.store import installed_versions
from echelon.world import World, read_world

if TYPE_CHECKING:
    import torch

    from echelon.data.loader import StepBatch
    from echelon.engine.outcome import Step
    from echelon.engine.run import Run
    from echelon.plan.certificate import Certificate

#: A stream has no epoch after which to save: a tenth of the steps, but never more than this many, may be lost to a kill.
STREAM_EVERY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training came to."""

    folder: Path
    step: int
    loss: float | None  #: of the last step; None: there was nothing left to do
    metrics: dict[str, float]  #: of the last evaluation
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a training is run, apart from what and how it computes."""

    folder: str | Path | None = None
    keep: int = 3
    #: Steps between checkpoints; None: at the end of each epoch (a stream: a tenth of the steps, at most STREAM_EVERY).
    every: int | None = None
    resume: bool = True
    certificate: str | Path | None = None
    quiet: bool = False
    #: Processes that read data ahead, per rank.
    workers: int = 0

    def __post_init__(self) -> None:
        for name, least in (("keep", 1), ("every", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise JobError(f"{name}={value!r}: a whole number of at least {least}")


def train(job: JobLike, plan: PlanLike = None, *, listeners: Sequence[Listener] = (), **settings: Any) -> Trained:
    """Train `job` under `plan` (default: the best for this machine) and keep everything in a run folder.

    Started alone with a plan for several ranks, it runs the script again in each of them and then ends the process. `settings`:
    folder, keep (last N checkpoints and the best), every (steps), resume, certificate (required), quiet, workers.
    """
    try:
        chosen = Settings(**settings)
    except TypeError as error:
        raise JobError(
            f"train: {str(error).replace('Settings.__init__() ', '')}; it takes {', '.join(Settings.__slots__)}"
        ) from None
    world = read_world()
    subject = Subject(job)
    prepared = agree_plan(subject, plan, world)
    if not world.launched and prepared.plan.ranks > 1:
        run_script_again(prepared)
    return Training(subject, prepared, world, chosen, listeners).run()


def parallelize(
    job: JobLike,
    plan: PlanLike = None,
    *,
    device: torch.device | None = None,
    workers: int = 0,
    warn: Callable[[str], None] = lambda message: None,
) -> Run:
    """The job under a plan on this rank, for people who keep their own loop: `for batch in run.batches(): run.step(batch)`."""
    world = read_world()
    subject = Subject(job)
    prepared = agree_plan(subject, plan, world)
    if not world.launched and prepared.plan.ranks > 1:
        run_script_again(prepared)
    from echelon.engine.run import Run

    return Run(subject.job, prepared.plan, world, device=device, workers=workers, warn=warn)


class Training:
    """One training on this rank. All ranks go through it in step."""

    def __init__(
        self, subject: Subject, prepared: Prepared, world: World, settings: Settings, listeners: Sequence[Listener]
    ) -> None:
        from echelon.observer import observers

        self._subject, self._prepared, self._world, self._settings = subject, prepared, world, settings
        fresh = not settings.resume and world.main
        self._folder = RunFolder(choose(settings.folder, subject.name, fresh=fresh), keep=settings.keep)
        self._observers = lambda: observers(
            self._folder.path, world=world, quiet=settings.quiet, forecast=prepared.forecast
        )
        self._listeners = list(listeners)
        self._started, self._early = False, list[str]()
        self._metrics: dict[str, float] = {}
        self._loss: float | None = None
        self._evaluated_at = self._saved_at = -1
        self._best: float | None = None
        self._begin = time.perf_counter()

    def run(self) -> Trained:
        """From the last checkpoint, or the beginning, to the end."""
        from echelon.engine.run import Run

        job, world = self._subject.job, self._world
        run = Run(job, self._prepared.plan, world, workers=self._settings.workers, warn=self._warn)
        self._run = run
        # Only rank 0 looked for a free name; the others follow it.
        self._folder = RunFolder(Path(run.ranks.gather(str(self._folder.path))[0]), keep=self._settings.keep)
        try:
            certificate = self._require_certificate()
            with run.ranks.together():
                if world.main:
                    self._write_documents(certificate)
            self._listeners += self._observers()
            self._resume()
            with run.ranks.together():
                if world.main:
                    self._note_job()
            self._emit("start", **self._start_facts())
            self._started = True
            for warning in (*(self._prepared.warnings if world.main else ()), *self._early):
                self._warn(warning)
            with asking(self._ask):
                interrupted = self._loop()
            self._finish(interrupted)
        except Exception as error:
            self._emit("end", reason="failed", seconds=self._seconds(), message=str(error))
            raise
        finally:
            run.close()
        if interrupted:
            raise SystemExit(INTERRUPTED)
        return Trained(
            folder=self._folder.path,
            step=run.step_number,
            loss=self._loss,
            metrics=self._metrics,
            seconds=self._seconds(),
        )

    def _ask(self) -> None:
        self._run.stop_asked = True

    # The parts of it

    def _loop(self) -> bool:
        """Step until the end; True when asked to stop before it."""
        run, clock = self._run, time.perf_counter()
        # An accelerator is still computing when `step` returns: its result is read one step later, so that it never waits.
        waiting: list[tuple[StepBatch, Step, float]] = []
        lag = 0 if run.device.type == "cpu" else 1
        for batch in run.batches():
            step = run.step(batch)
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
        return bool(run.steps_per_epoch) and run.step_number % run.steps_per_epoch == 0

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
        """Evaluate at the end of an epoch; save when that is due, and whenever an evaluation was the best so far."""
        if self._run.job.evaluation is not None and (self._epoch_ended or self._ended):
            self._evaluate()
        if self._ended or self._save_due or self._better():
            self._save(final=self._ended)

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
        if self._world.main and place.exists():
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
        better = self._better()
        if better:
            self._best = self._metrics["loss"]
        if self._world.main:
            if better:
                folder.note_best(place, self._metrics["loss"])
            folder.prune()
        self._emit("checkpoint", path=str(place), seconds=time.perf_counter() - begin, bytes=size, best=better)

    def _resume(self) -> None:
        """Load the newest checkpoint that is whole; a damaged one is passed over, loudly."""
        mine, best = self._folder.saved() if self._settings.resume else [], self._folder.best()
        # What rank 0 sees counts: a network disk may show the others something older.
        saved, self._best = self._run.ranks.gather(([str(path) for path in mine], best and best[1]))[0]
        for place in saved:
            try:
                self._run.load(place)
            except ForeignCheckpoint:
                raise
            except CheckpointError as error:
                self._warn(f"{error}; trying the one before")
                continue
            self._saved_at = self._run.step_number
            return
        if saved:
            raise CheckpointError(
                f"{self._folder.checkpoints}: none of {len(saved)} checkpoints can be read; --fresh starts anew beside them"
            )

    def _finish(self, interrupted: bool) -> None:
        self._run.settle()
        self._save(final=True)
        self._emit("memory", **self._memory())
        step, total = self._run.step_number, self._run.total_steps
        if interrupted:
            again = f"echelon train {self._subject.spec}" if self._subject.spec else "the same command"
            message = f"stopped at step {step} of {total} and saved; go on with: {again}"
            self._emit("end", reason="interrupted", seconds=self._seconds(), message=message)
        else:
            self._emit(
                "end",
                reason="finished",
                seconds=self._seconds(),
                message=f"{step} steps; everything is in {self._folder.path}",
            )
        if self._world.main:
            self._report()

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
            "parameters": sum(value.numel() for value in run.model.parameters()), "resumed_from": run.step_number,
            "device": str(run.device), "run": str(self._folder.path), "file": self._subject.spec, "seed": job.seed, "versions": installed_versions(),
        }  # fmt: skip

    def _memory(self) -> dict[str, int]:
        from echelon.engine.memory import peak

        run = self._run
        peaks = run.ranks.gather(peak(run.device))
        held = run.ranks.gather(sum(run.held().values()))
        return {"peak": max(peaks), "held": max(held)}

    def _epoch(self) -> int:
        return (self._run.step_number - 1) // self._run.steps_per_epoch if self._run.steps_per_epoch else 0

    def _seconds(self) -> float:
        return time.perf_counter() - self._begin

    def _write_documents(self, certificate: Certificate | None) -> None:
        made, kept = self._prepared, self._folder.certificate()
        if certificate is None and kept is not None and not kept.stale(**self._identity()):
            certificate = kept  # nobody required it, but somebody put it there, and it covers this run
        self._folder.write_documents([made.plan, made.forecast, made.profile, made.cluster, certificate])

    def _note_job(self) -> None:
        """Remember the job file's text; say so where the checkpoint that was loaded is of another."""
        from echelon.verifier.identity import job_hash

        if self._subject.spec is None:
            return
        digest, before = job_hash(self._subject.spec), self._folder.noted_job()
        if self._saved_at >= 0 and before not in (None, digest):
            self._warn(
                f"{self._folder.path} was trained by another text of the job file (then {str(before)[:12]}, {self._subject.spec} now "
                f"{digest[:12]}); it goes on as the file is now; --fresh starts anew in another folder"
            )
        self._folder.note_job(self._subject.spec, digest)

    def _identity(self) -> dict[str, Any]:
        """What a certificate has to cover."""
        from echelon.verifier.identity import job_hash, model_hash, versions

        spec = self._subject.spec
        return {
            "plan": self._prepared.plan, "job": job_hash(spec) if spec else "", "model": model_hash(self._run.model),
            "versions": versions(),
        }  # fmt: skip

    def _require_certificate(self) -> Certificate | None:
        if self._settings.certificate is None:
            return None
        from echelon.verifier.gate import require

        if self._subject.spec is None:
            raise TrainingError(
                "a certificate covers a job file, and this job has none: train it with `echelon train file.py`"
            )
        return require(self._settings.certificate, **self._identity())
