"""The entry points from Python: train a job, or keep your own loop."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import EchelonError, UnverifiedPlanError
from echelon.events import Listener
from echelon.flow.broadcast_plan import run_first_proved_on_ranks, train_on_ranks
from echelon.flow.gate import candidate_plans, is_disproved, require_proof, run_first_proved, verification_limit
from echelon.flow.job_source import JobLike, JobSource
from echelon.flow.resolve_plan import PlanLike, ResolvedPlan
from echelon.flow.run_folder import choose_run_folder, require_writable
from echelon.flow.script_calls import become_ranks, call_in_script, prepare_process, record_own_loop, rerun_script
from echelon.flow.settings import Settings, resolve_settings
from echelon.flow.train_result import TrainResult
from echelon.flow.trainer import Trainer
from echelon.world import World

if TYPE_CHECKING:
    import torch

    from echelon.engine.run import Run

#: Trains a plan on ranks that this process starts.
StartRanks = Callable[[ResolvedPlan, Settings], TrainResult]


def train(
    job: JobLike,
    plan: PlanLike = None,
    *,
    out: str | Path | None = None,
    keep: int | None = None,
    every: int | None = None,
    resume: bool | None = None,
    override: Sequence[str] | None = None,
    verify: bool | None = None,
    fallback: bool | None = None,
    require_certificate: str | Path | None = None,
    quiet: bool | None = None,
    workers: int | None = None,
    servers: str | None = None,
    secret_file: str | Path | None = None,
    listeners: Sequence[Listener] = (),
) -> TrainResult:
    """Train `job` under `plan` and keep checkpoints, events and a report in a run folder.

    A run that was interrupted is resumed. A plan without a certificate is verified first, in bounded time. A script that is
    started as one process with a plan for several ranks is run again in each rank up to this call; the ranks then end, and
    this process continues with their result. Settings that are left out come from ECHELON_* variables, else from
    echelon.toml, else from the defaults below.

    Args:
        job: A Job, a function that returns one, or `file.py[:name]`.
        plan: A Plan, its short form ("dp=2 zero=1"), a plan file, or "auto": the fastest proved plan for this machine. [auto]
        out: The run folder. [runs/NAME]
        keep: Checkpoints to keep, besides the best. [3]
        every: Steps between checkpoints. [an epoch; of a stream a tenth of the steps, at most 1000]
        resume: Resume from the last checkpoint; False starts over in a new folder. [True]
        override: Changed settings to apply on resume, as ["optimizer.lr"]; any other change is refused.
        verify: Prove a new job and plan before the first step. [True]
        fallback: If `plan` is disproved, train the nearest proved one; False raises instead. [True]
        require_certificate: Train only if the certificate in this file covers the run.
        quiet: Print warnings only. [False]
        workers: Processes per rank that read data ahead. [0]
        servers: Controller address (host:port) of parameter servers that already run.
        secret_file: The file with their secret.
        listeners: Called with every Event, in each process that trains.
    """
    options = locals()

    def execute(world: World) -> TrainResult:
        requested, settings = resolve_settings(options)
        return train_job(JobSource(job), requested, settings, world, listeners=listeners)

    return call_in_script("train", execute, TrainResult, lambda result: _load_into_module(JobSource(job), result))


def train_job(
    source: JobSource,
    requested: PlanLike,
    settings: Settings,
    world: World,
    *,
    listeners: Sequence[Listener] = (),
    start_ranks: StartRanks | None = None,
) -> TrainResult:
    """Train in this process, with the ranks to which it belongs, or on ranks that it starts (by `start_ranks`, else as a script)."""
    if world.is_main:
        require_writable(Path("runs" if settings.out is None else settings.out))
    if start_ranks is not None and not settings.resume and not world.launched:
        folder, _ = choose_run_folder(settings.out, source.name, fresh=True)
        settings = dataclasses.replace(settings, out=folder)  # the ranks of a second attempt resume the first one's run
    attempt = PlanAttempt(source, world, settings, listeners, start_ranks or _rerun_script)
    if world.launched:
        return train_on_ranks(source, requested, world, attempt, fallback=settings.fallback)
    plans = candidate_plans(source, requested, fallback=settings.fallback)
    return run_first_proved(plans, attempt, lambda candidate: verification_limit(source.job, candidate))


def _rerun_script(resolved: ResolvedPlan, _: Settings) -> TrainResult:
    return TrainResult.from_json(rerun_script(resolved))


def _load_into_module(source: JobSource, result: TrainResult) -> None:
    """Load the trained weights into a module that the caller holds, as a training in this process would leave it."""
    if source.is_file or result.checkpoint is None:
        return
    module = source.job.model
    if isinstance(module, type) or not hasattr(module, "load_state_dict"):
        return
    from echelon.engine.weights import load_weights

    load_weights(module, result.checkpoint, tp_shards={}, warn=source.warnings.append)  # type: ignore[arg-type]
    source.remember_changes()


@dataclasses.dataclass(slots=True)
class PlanAttempt:
    """Trains under one plan after another, from the gate to the end. After a plan that the run itself disproved, the next
    one continues in the same folder from the last good checkpoint."""

    source: JobSource
    world: World
    settings: Settings
    listeners: Sequence[Listener]
    start_ranks: StartRanks

    def __call__(self, resolved: ResolvedPlan, world: World | None = None) -> TrainResult:
        world = world or self.world
        try:
            if not world.launched and resolved.plan.ranks > 1:
                result = self.start_ranks(resolved, self.settings)
                _load_into_module(self.source, result)
                return result
            return self._train(resolved, world)
        except EchelonError as error:
            if is_disproved(error) and not isinstance(error, UnverifiedPlanError):
                self.settings = dataclasses.replace(self.settings, resume=True)
            raise

    def _train(self, resolved: ResolvedPlan, world: World) -> TrainResult:
        settings = self.settings
        verdict = require_proof(self.source, resolved, world, verify=settings.verify, quiet=settings.quiet)
        trainer = Trainer(self.source, resolved, world, settings, verdict)
        self.settings = dataclasses.replace(settings, out=trainer.folder)
        return trainer.run(self.listeners)


def parallelize(
    job: JobLike,
    plan: PlanLike = None,
    *,
    device: torch.device | None = None,
    workers: int = 0,
    warn: Callable[[str], None] = lambda message: None,
    verify: bool | None = None,
) -> Run:
    """Build `job` under `plan` on this rank, for your own loop: `for batch in run.batches(): loss = run.step(batch)`.

    A plan without a certificate is verified first, as in `train`. In a script that is started as one process, a plan for
    several ranks runs the whole script once per rank and then ends this process; a disproved plan is replaced by the nearest
    proved one. Under torchrun, Slurm or MPI a disproved plan raises UnverifiedPlanError.

    Args:
        job: A Job, a function that returns one, or `file.py[:name]`.
        plan: A Plan, its short form ("dp=2 zero=1"), a plan file, or None: the fastest proved plan for this machine.
        device: The device of this rank. [the GPU of its local rank, else the CPU]
        workers: Processes per rank that read data ahead. [0]
        warn: Called with each warning about the job or the plan.
        verify: Prove a new job and plan before the first step. [True, or ECHELON_VERIFY]
    """
    world = prepare_process("parallelize")
    source = JobSource(job)
    settings = resolve_settings({"plan": plan, "verify": verify})[1]

    def execute(resolved: ResolvedPlan, world: World = world) -> Run:
        if not world.launched and resolved.plan.ranks > 1:
            become_ranks(resolved)
        verdict = require_proof(source, resolved, world, verify=settings.verify)
        if resolved.fallback and world.is_main:
            warnings.warn(resolved.fallback, stacklevel=4)
        from echelon.engine.run import Run

        run = Run(source.job, resolved.plan, world, device=device, workers=workers, warn=warn)
        run.attributes.is_unproved = verdict.certificate is None
        return run

    if world.launched:
        return run_first_proved_on_ranks(source, plan, world, execute)
    plans = candidate_plans(source, plan, fallback=settings.fallback)
    run = run_first_proved(plans, execute, lambda candidate: verification_limit(source.job, candidate))
    record_own_loop()
    return run
