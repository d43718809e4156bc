"""Training from start to end: plan, ranks, steps, evaluations, checkpoints, and going on after an interruption."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from echelon.errors import CheckpointError, EchelonError, JobError, TrainingError
from echelon.events import Event, Listener
from echelon.flow.folder import RunFolder, choose
from echelon.flow.prepare import JobLike, PlanLike, Prepared, Subject, prepare
from echelon.flow.start import require_world, run_script_again, tell_launcher
from echelon.launchers.handover import handed_plan
from echelon.launchers.local import INTERRUPTED
from echelon.plan.store import installed_versions
from echelon.world import World, read_world

if TYPE_CHECKING:
    from echelon.data.loader import StepBatch
    from echelon.engine.run import Run, Step


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
    #: Steps between checkpoints; None: at the end of each epoch.
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
        run_script_again(prepared.plan)
    return Training(subject, prepared, world, chosen, listeners).run()


def parallelize(job: JobLike, plan: PlanLike = None, **options: Any) -> Run:
    """The job under a plan on this rank, for people who keep their own loop: `for batch in run.batches(): run.step(batch)`."""
    world = read_world()
    subject = Subject(job)
    prepared = agree_plan(subject, plan, world)
    if not world.launched and prepared.plan.ranks > 1:
        run_script_again(prepared.plan)
    require_world(prepared.plan, world)
    from echelon.engine.run import Run

    return Run(subject.job, prepared.plan, world, **options)


def agree_plan(subject: Subject, wanted: PlanLike, world: World) -> Prepared:
    """The plan: given, handed over by the launcher, or searched for; of ranks that were started together rank 0 searches."""
    handed = handed_plan()
    if world.launched:
        tell_launcher(world)
        if handed is not None:
            wanted = str(handed)
    if not world.launched or world.size == 1 or (wanted is not None and wanted != "auto"):
        prepared = prepare(subject, wanted, ranks=world.size if world.launched else None)
    else:
        from echelon.engine.ranks import Ranks
        from echelon.plan.plan import Plan

        ranks = Ranks(world)
        with ranks.together():
            mine = prepare(subject, wanted, ranks=world.size) if world.main else None
        text = ranks.gather(mine.plan.to_json() if mine else "")[0]
        prepared = mine or Prepared(plan=Plan.from_json(text, source="the plan of rank 0"))
    if world.launched:
        require_world(prepared.plan, world)
    return prepared


class Training:
    """One training on this rank. All ranks go through it in step."""

    def __init__(
        self, subject: Subject, prepared: Prepared, world: World, settings: Settings, listeners: Sequence[Listener]
    ) -> None:
        from echelon.observer import observers

        self._subject, self._prepared, self._world, self._settings = subject, prepared, world, settings
        fresh = not settings.resume and world.main
        self._folder = RunFolder(choose(settings.folder, subject.job.name, fresh=fresh), keep=settings.keep)
        self._observers = lambda: observers(
            self._folder.path, world=world, quiet=settings.quiet, forecast=prepared.forecast
        )
        self._listeners = list(listeners)
        self._started, self._early = False, list[str]()
        self._metrics: dict[str, float] = {}
        self._loss: float | None = None
        self._saved_at = -1
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
            self._require_certificate()
            if world.main:
                self._write_documents()
            run.ranks.barrier()
            self._listeners += self._observers()
            self._resume()
            self._emit("start", **self._start_facts())
            self._started = True
            for warning in (*self._prepared.warnings, *self._early):
                self._warn(warning)
            with self._signals():
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
            last = run.step_number == run.total_steps
            boundary = self._boundary()
            while len(waiting) > (0 if last or boundary else lag):
                asked = self._tell(*waiting.pop(0))
                if asked and not last:
                    return True
            if boundary:
                self._at_boundary()
                clock = time.perf_counter()
        return False

    def _tell(self, batch: StepBatch, step: Step, seconds: float) -> bool:
        """Report a step; True when any rank was asked to stop by then."""
        loss, asked, norm = step.read()
        if self._world.main:
            self._loss = loss
            rate = self._run.optimizers[0].param_groups[0]["lr"]
            self._emit(
                "step", step=batch.step + 1, epoch=batch.epoch, loss=self._loss, rate=float(rate),
                norm=norm, samples=step.samples, seconds=seconds, waited=batch.waited, skipped=step.skipped,
            )  # fmt: skip
        return asked

    def _boundary(self) -> bool:
        run, every = self._run, self._settings.every
        ends_epoch = bool(run.steps_per_epoch) and run.step_number % run.steps_per_epoch == 0
        return ends_epoch or run.step_number == run.total_steps or (every is not None and run.step_number % every == 0)

    def _at_boundary(self) -> None:
        """Evaluate at the end of an epoch; save there, or every N steps where that was asked for."""
        run, every = self._run, self._settings.every
        end = run.step_number == run.total_steps
        ends_epoch = bool(run.steps_per_epoch) and run.step_number % run.steps_per_epoch == 0
        if run.job.evaluation is not None and (ends_epoch or end):
            begin = time.perf_counter()
            self._metrics = run.evaluate()
            self._emit(
                "evaluation",
                epoch=self._epoch(),
                metrics=self._metrics,
                samples=len(run.job.evaluation) if hasattr(run.job.evaluation, "__len__") else None,
                seconds=time.perf_counter() - begin,
            )
        if end or (ends_epoch if every is None else run.step_number % every == 0):
            self._save(final=end)

    def _save(self, *, final: bool) -> None:
        run, folder = self._run, self._folder
        if run.step_number == self._saved_at:
            return
        begin, place = time.perf_counter(), folder.place(run.step_number)
        try:
            size = run.save(place)
        except CheckpointError as error:
            if final:
                raise
            # Hours of work must not end because a disk was full for a while: the next one is tried again.
            self._warn(f"{error}; training goes on, the last good checkpoint stays")
            return
        self._saved_at = run.step_number
        best = folder.best()
        better = "loss" in self._metrics and (best is None or self._metrics["loss"] < best[1])
        if self._world.main:
            if better:
                folder.note_best(place, self._metrics["loss"])
            folder.prune()
        self._emit("checkpoint", path=str(place), seconds=time.perf_counter() - begin, bytes=size, best=better)

    def _resume(self) -> None:
        """Load the newest checkpoint that is whole; a damaged one is passed over, loudly."""
        saved = self._folder.saved() if self._settings.resume else []
        for place in self._run.ranks.gather([str(path) for path in saved])[0]:
            try:
                self._run.load(place)
            except CheckpointError as error:
                if "made by another" in str(error) or "made with" in str(error) or "its optimizers cover" in str(error):
                    raise
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
            "job": job.name, "plan": str(run.plan), "ranks": self._world.size, "batch": job.batch, "steps": run.total_steps,
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

    def _write_documents(self) -> None:
        self._folder.checkpoints.mkdir(parents=True, exist_ok=True)
        documents = {
            "plan": self._prepared.plan, "forecast": self._prepared.forecast, "profile": self._prepared.profile,
            "cluster": self._prepared.cluster,
        }  # fmt: skip
        for name, document in documents.items():
            if document is not None:
                document.save(self._folder.path / f"{name}.json")

    def _require_certificate(self) -> None:
        if self._settings.certificate is None:
            return
        from echelon.verifier.gate import require
        from echelon.verifier.identity import job_hash, model_hash, versions

        if self._subject.spec is None:
            raise TrainingError(
                "a certificate covers a job file, and this job has none: train it with `echelon train file.py`"
            )
        require(
            self._settings.certificate, plan=self._prepared.plan, job=job_hash(self._subject.spec),
            model=model_hash(self._run.model), versions=versions(),
        )  # fmt: skip

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask for a stop after this step; a second one ends the process as usual."""
        before: dict[int, Any] = {}

        def ask(number: int, _: FrameType | None) -> None:
            self._run.stop_asked = True
            signal.signal(number, before[number])

        usual: Callable[..., Any] = signal.signal
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = usual(number, ask)
        except ValueError:
            pass  # not the main thread: whoever owns it decides
        try:
            yield
        finally:
            for saved, handler in before.items():
                usual(saved, handler)
