"""A training on one rank: steps, evaluations, checkpoints, and resuming after an interruption."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.errors import DataError, DivergenceError, EchelonError, TrainingError
from echelon.events import Event, Listener
from echelon.flow.checkpoints import Checkpoints
from echelon.flow.gate import Verdict, is_baseline, require_certificate, revoke_certificate
from echelon.flow.job_inputs import record_variables
from echelon.flow.job_source import JobSource
from echelon.flow.resolve_plan import ResolvedPlan
from echelon.flow.resume import Resumption, resume_instructions
from echelon.flow.run_folder import RunFolder, choose_run_folder
from echelon.flow.run_settings import run_inputs
from echelon.flow.settings import Settings
from echelon.flow.signals import stop_on_signal
from echelon.flow.train_result import TrainResult
from echelon.launchers.command import user_command
from echelon.launchers.local import SECOND_INTERRUPT_MESSAGE
from echelon.launchers.rank_ipc import report_start
from echelon.plan.document_cache import installed_versions
from echelon.world import World

if TYPE_CHECKING:
    from torch import nn

    from echelon.data.loader import StepBatch
    from echelon.engine.step_result import StepResult
    from echelon.job import Job
    from echelon.plan.certificate import Certificate
    from echelon.verifier.spot_check import SpotChecks

#: A stream has no epoch after which to save: a tenth of the steps, but never more than this many, may be lost to a kill.
STREAM_EVERY = 1000


class Trainer:
    """One training on this rank. All ranks execute it in step."""

    def __init__(
        self, source: JobSource, resolved: ResolvedPlan, world: World, settings: Settings, verdict: Verdict
    ) -> None:
        self._source, self._resolved, self._world, self._settings = source, resolved, world, settings
        self._verdict = verdict
        self._initial_model: nn.Module | None = None
        self._spot_checks: SpotChecks | None = None
        fresh = not settings.resume and world.is_main
        path, reason = choose_run_folder(settings.out, source.name, fresh=fresh, inputs=run_inputs(source))
        self._folder = RunFolder(path, keep=settings.keep)
        self._listeners: list[Listener] = []
        self._has_started = False
        self._early_warnings = [reason] if reason and world.is_main else []
        self._loss: float | None = None
        self._certificate: Certificate | None = None
        self._start_time = time.perf_counter()

    @property
    def folder(self) -> Path:
        return self._folder.path

    def run(self, listeners: Sequence[Listener] = ()) -> TrainResult:
        """Train from the last checkpoint, or the beginning, to the end. `listeners` receive the events."""
        from torch import nn

        from echelon.engine.backends.launch_servers import ExternalServers
        from echelon.engine.run import Run
        from echelon.trials.deep_copies import copy_module

        job, world, self._listeners = self._source.job, self._world, list(listeners)
        if self._verdict.certificate is not None and world.is_main and isinstance(job.model, nn.Module):
            self._initial_model = copy_module(job.model)  # the run takes the module itself
        settings, servers = self._settings, None
        if settings.servers is not None and settings.secret_file is not None:
            servers = ExternalServers(address=settings.servers, secret_file=Path(settings.secret_file))
        run = Run(job, self._resolved.plan, world, workers=settings.workers, warn=self._warn, external_servers=servers)
        self._run = run
        run.attributes.is_unproved = self._verdict.certificate is None
        # Only rank 0 searched for a free name.
        self._folder = RunFolder(Path(run.ranks.broadcast_object(str(self._folder.path))), keep=settings.keep)
        self._checkpoints = Checkpoints(run, self._folder, self._source, self._emit, self._warn)
        with contextlib.ExitStack() as exit_stack:
            exit_stack.callback(run.close)
            try:
                interrupted = self._train(exit_stack)
            except KeyboardInterrupt:
                if not self._has_started:
                    raise
                self._emit("end", reason="interrupted", seconds=self._elapsed(), message=SECOND_INTERRUPT_MESSAGE)
                raise KeyboardInterrupt(SECOND_INTERRUPT_MESSAGE) from None
            except Exception as error:
                self._checkpoints.quarantine(error)
                if isinstance(error, DivergenceError) and world.is_main and self._verdict.certificate is not None:
                    revoke_certificate(self._source, self._verdict.certificate, str(error))
                error.started = self._has_started  # type: ignore[attr-defined]
                if self._has_started and isinstance(error, EchelonError):
                    error.exit_code = 1  # of any class: a training that failed, not wrong use
                self._emit("end", reason="failed", seconds=self._elapsed(), message=str(error))
                raise
        return TrainResult(
            steps=run.step_number, loss=self._loss, metrics=self._checkpoints.metrics, seconds=self._elapsed(), folder=self._folder.path,
            checkpoint=self._checkpoints.newest, plan=run.plan, certificate=self._certificate, interrupted=interrupted,
        )  # fmt: skip

    def _train(self, exit_stack: contextlib.ExitStack) -> bool:
        """Train; True when asked to stop. Nothing in the folder changes before it is known that the run may continue there."""
        from echelon.observer import observers

        run, is_main = self._run, self._world.is_main
        with run.ranks.raise_on_all_ranks():
            _require_evaluation(self._source.job)
        self._certificate = self._require_certificate() or self._verdict.certificate
        with run.ranks.raise_on_all_ranks():
            if is_main:
                exit_stack.enter_context(self._folder.lock())
        resumption = Resumption(run, self._source)
        self._checkpoints.resume(resumption, self._settings)
        with run.ranks.raise_on_all_ranks():
            if is_main:
                self._write_documents()
                self._folder.write_record(resumption.make_record())
                self._early_warnings += [*self._checkpoints.clear_leftovers(), *self._warn_of_scaling()]
        forecast, quiet = self._resolved.forecast, self._settings.quiet
        self._listeners += observers(self._folder.path, world=self._world, quiet=quiet, forecast=forecast)
        self._emit_start()
        self._has_started = True
        report_start()
        if is_main and self._verdict.message:
            kind = "warning" if self._verdict.is_unproved else "verified"
            self._emit(kind, message=self._verdict.message, seconds=self._verdict.seconds)
        for warning in (*(self._resolved.warnings if is_main else ()), *self._early_warnings):
            self._warn(warning)
        with stop_on_signal(lambda: setattr(run, "stop_requested", True)):
            interrupted = self._run_steps(resumption)
            self._finish(interrupted)
        return interrupted

    def _warn_of_scaling(self) -> list[str]:
        """A warning if the job reads the number of processes: it may differ from the job on one device, which no proof shows."""
        names = self._source.job_inputs.world_sizes
        if not names or self._world.size == 1:
            return []
        problem = "if its rate, batch or data depend on the number of processes, it is another job than on one device"
        remedy = "echelon splits the job's batch between ranks, so nothing has to be scaled"
        return [f"the job reads {', '.join(names)}: {problem}; {remedy}"]

    def _run_steps(self, resumption: Resumption) -> bool:
        """Step until the end; True when asked to stop before it."""
        run, last_time = self._run, time.perf_counter()
        # An accelerator is still computing when `step` returns: its result is read one step later, so it never waits.
        pending: list[tuple[StepBatch, StepResult, float]] = []
        max_pending = 0 if run.device.type == "cpu" else 1
        spot_checks = self._spot_checks = self._make_spot_checks()
        first_step = run.step_number
        for batch in run.batches():
            is_first = batch.step == first_step
            with record_variables() if is_first else contextlib.nullcontext(set[str]()) as variables_read:
                step = run.step(batch) if spot_checks is None else spot_checks.step(batch)
            if is_first:
                self._record_variables(variables_read, resumption)
            now = time.perf_counter()
            pending.append((batch, step, now - last_time))
            last_time = now
            is_boundary, stop_requested = self._is_finished or self._is_epoch_end or self._is_save_due, False
            while len(pending) > (0 if is_boundary else max_pending):
                stop_requested |= self._report_step(*pending.pop(0))
            if is_boundary:
                self._handle_boundary()
                last_time = time.perf_counter()
            if stop_requested and not self._is_finished:
                for report in pending:
                    self._report_step(*report)
                return True
        return False

    def _record_variables(self, variables_read: set[str], resumption: Resumption) -> None:
        """Add the environment variables that the first step has read on any rank to the folder's record."""
        variables = set[str]().union(*self._run.ranks.all_gather_object(variables_read))
        if variables and self._world.is_main:
            self._folder.write_record(resumption.make_record(variables))

    def _make_spot_checks(self) -> SpotChecks | None:
        """Checks that compute steps again on one device; None for a plan that needs no proof or has none."""
        if self._verdict.certificate is None:
            return None
        from echelon.verifier.spot_check import SpotChecks

        spot_checks = SpotChecks(self._source.job, self._run, self._initial_model, self._resolved.profile)
        if self._checkpoints.resumed_step > 0:
            spot_checks.last_agreed_step = min(self._folder.last_checked_step(), self._checkpoints.resumed_step)
        return spot_checks

    def _note_checked_step(self) -> None:
        """Note up to which step checkpoints are known to be correct, on rank 0; the baseline is always correct."""
        if self._spot_checks is not None:
            self._folder.write_checked_step(self._spot_checks.last_agreed_step)
            return
        was_correct = self._folder.last_checked_step() >= self._checkpoints.resumed_step
        if was_correct and is_baseline(self._resolved.plan, self._source.job):
            self._folder.write_checked_step(self._run.step_number)

    def _report_step(self, batch: StepBatch, step: StepResult, seconds: float) -> bool:
        """Report a step; True if any rank was asked to stop by then."""
        self._loss, stop_requested, norm = step.read()
        if self._world.is_main:
            self._emit(
                "step", step=batch.step + 1, epoch=batch.epoch, loss=self._loss, rate=step.learning_rates[0],
                norm=norm, samples=step.sample_count, seconds=seconds, waited=batch.wait_seconds, skipped=step.skipped,
            )  # fmt: skip
        return stop_requested

    @property
    def _is_finished(self) -> bool:
        return self._run.step_number == self._run.total_steps

    @property
    def _is_epoch_end(self) -> bool:
        run = self._run
        done = run.step_number - run.warmup_steps
        return bool(run.steps_per_epoch) and done >= 0 and done % run.steps_per_epoch == 0

    @property
    def _is_save_due(self) -> bool:
        """Whether a checkpoint is due by the number of steps, regardless of evaluations."""
        run, save_interval = self._run, self._settings.every
        if save_interval is None and run.steps_per_epoch:
            return self._is_epoch_end
        save_interval = save_interval or max(min(run.total_steps // 10, STREAM_EVERY), 1)
        return run.step_number % save_interval == 0

    def _handle_boundary(self) -> None:
        """Save when that is due, evaluate at the end of an epoch, and save the best.

        A checkpoint that is due comes before the evaluation, and so does one before the first evaluation, the likeliest to fail: that
        must not lose what was trained.
        """
        from echelon.engine.checkpoint.schedule_state import takes_metric

        checkpoints, is_final = self._checkpoints, self._is_finished
        evaluates = self._run.job.eval_data is not None and (self._is_epoch_end or is_final)
        saves = is_final or self._is_save_due or (evaluates and checkpoints.evaluated_step < 0)
        # An evaluation that steps a schedule belongs to the step: resuming from a checkpoint before it would skip it.
        saves_afterwards = evaluates and any(takes_metric(schedule) for schedule in self._run.schedules)
        if saves and not saves_afterwards:
            checkpoints.save(is_final=is_final)
        if evaluates:
            try:
                self._evaluate()
            except Exception:
                if self._world.size == 1:  # other ranks may be waiting within the evaluation
                    checkpoints.save(is_final=False)
                checkpoints.report(self._note_checked_step)
                raise
        if (saves and saves_afterwards) or (not saves and checkpoints.is_best()):
            checkpoints.save(is_final=is_final)
        checkpoints.report(self._note_checked_step)

    def _evaluate(self) -> None:
        start_time = time.perf_counter()
        self._checkpoints.evaluate()
        seconds = time.perf_counter() - start_time
        run = self._run
        epoch = max(run.step_number - 1 - run.warmup_steps, 0) // run.steps_per_epoch if run.steps_per_epoch else 0
        self._emit("evaluation", **self._checkpoints.evaluation_event(epoch=epoch, seconds=seconds))

    def _finish(self, interrupted: bool) -> None:
        run, step, spot_checks = self._run, self._run.step_number, self._spot_checks
        is_old = step == self._checkpoints.resumed_step
        if is_old:
            self._restore_results()
        else:
            run.check_last_step()
            self._checkpoints.save(is_final=True)
            self._checkpoints.report(self._note_checked_step)
            self._emit("memory", **self._measure_memory())
            if spot_checks is not None and self._world.is_main:
                count, seconds, reason = spot_checks.count, spot_checks.seconds, spot_checks.stop_reason
                self._emit("checked", count=count, seconds=seconds, left_out=reason)
        if interrupted:
            command = resume_instructions(user_command(), self._folder.path, fresh=not self._settings.resume)
            message = f"stopped at step {step} of {run.total_steps} and saved; resume with: {command}"
        elif is_old:
            message = f"already finished at step {step}; --fresh starts over in another folder, more epochs= or steps= continue"
        else:
            message = f"{step} steps; everything is in {self._folder.path}"
        reason = "interrupted" if interrupted else "finished"
        self._emit("end", reason=reason, seconds=self._elapsed(), message=message)
        if self._world.is_main:
            from echelon.observer import write_report

            try:
                write_report(self._folder.path)
            except (EchelonError, OSError) as error:
                self._warn(f"no report was written: {error}")

    def _restore_results(self) -> None:
        """Read the results of a run that was finished before; evaluate if that failed or was killed then."""
        run, is_main, checkpoints = self._run, self._world.is_main, self._checkpoints
        results = self._folder.read_last_results(run.step_number) if is_main else None
        self._loss, metrics = run.ranks.broadcast_object(results)
        checkpoints.metrics = metrics or {}
        has_all_metrics = metrics is not None and {"loss", *run.job.metrics} <= metrics.keys()
        if has_all_metrics or run.job.eval_data is None or not self._is_finished:
            return
        self._evaluate()
        if checkpoints.is_best() and is_main:
            checkpoints.write_best(self._folder.checkpoint_path(run.step_number))

    def _emit(self, kind: str, *, step: int | None = None, **data: Any) -> None:
        number = self._run.step_number if step is None else step
        event = Event(kind=kind, step=number, rank=self._world.rank, data=data)
        for listener in self._listeners:
            listener(event)

    def _warn(self, message: str) -> None:
        if self._has_started:
            self._emit("warning", message=message)
        else:
            self._early_warnings.append(message)  # there are no listeners yet

    def _emit_start(self) -> None:
        run, job = self._run, self._source.job
        self._emit(
            "start", job=self._source.name, plan=str(run.plan), ranks=self._world.size, batch=job.batch_size, steps=run.total_steps,
            steps_per_epoch=run.steps_per_epoch, epochs=job.epochs, samples=run.sample_count,
            parameters=sum(map(math.prod, run.full_shapes.values())), resumed_from=run.step_number, device=str(run.device),
            run=str(self._folder.path), file=self._source.spec, seed=job.seed, versions=installed_versions(),
        )  # fmt: skip

    def _measure_memory(self) -> dict[str, int]:
        from echelon.engine.full_state import peak_memory_bytes, state_bytes

        run = self._run
        peaks = run.ranks.all_gather_object(peak_memory_bytes(run.device))
        held_bytes = run.ranks.all_gather_object(sum(state_bytes(run).values()))
        return {"peak": max(peaks), "held": max(held_bytes)}

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start_time

    def _write_documents(self) -> None:
        resolved, certificate = self._resolved, self._certificate or self._folder.read_certificate()
        if self._certificate is None and certificate and certificate.mismatch_reasons(**self._certificate_scope()):
            certificate = None  # the folder's own does not cover this run
        documents = [resolved.plan, resolved.forecast, resolved.profile, resolved.cluster, certificate]
        self._folder.write_documents(documents)

    def _certificate_scope(self) -> dict[str, Any]:
        """What a certificate has to cover."""
        source, profile = self._source, self._resolved.profile
        return {
            "plan": self._resolved.plan, "job": source.file_hash, "model": self._run.fingerprint,
            "versions": source.identity.versions, "inputs": source.identity.proof_inputs, "graph": profile.graph_hash if profile is not None else "",
        }  # fmt: skip

    def _require_certificate(self) -> Certificate | None:
        if self._settings.require_certificate is None:
            return None
        if self._source.spec is None:
            remedy = "train it with `echelon train file.py`"
            raise TrainingError(f"a certificate covers a job file, and this job has none: {remedy}")
        certificate = require_certificate(self._settings.require_certificate, **self._certificate_scope())
        if certificate.limitation and self._world.is_main:
            self._warn(f"{self._settings.require_certificate} is a weaker proof: {certificate.limitation}")
        return certificate


def _require_evaluation(job: Job) -> None:
    """Refuse evaluation data that cannot be opened, before hours of training."""
    from echelon.data.open_data import is_stream, open_source

    if job.eval_data is None or is_stream(job.eval_data):
        return
    try:
        open_source(job.eval_data, collate=job.collate, seed=job.seed)
    except DataError as error:
        raise DataError(f"eval_data=: {error}") from None
