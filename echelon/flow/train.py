"""The entries from Python: train from start to end, or keep your own loop."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.errors import EchelonError, LaunchError, UnverifiedPlanError
from echelon.events import Listener
from echelon.flow.broadcast_plan import run_first_proved_on_ranks, train_on_ranks
from echelon.flow.gate import candidate_plans, is_disproved, require_proof, run_first_proved, verification_limit
from echelon.flow.job_source import JobLike, JobSource
from echelon.flow.resolve_plan import PlanLike, ResolvedPlan
from echelon.flow.run_folder import require_writable
from echelon.flow.settings import Settings, resolve_train_settings
from echelon.flow.spawn import prepare_process, record_result, rerun_script
from echelon.flow.trainer import Trained, Trainer
from echelon.launchers.rank_ipc import format_error, take_previous_result
from echelon.world import World

if TYPE_CHECKING:
    import torch

    from echelon.engine.run import Run

__all__ = ["Settings", "Trained", "parallelize", "train"]


def train(job: JobLike, plan: PlanLike = None, *, listeners: Sequence[Listener] = (), **settings: Any) -> Trained:
    """Train `job` under `plan` (default: the best proved one for this machine) and keep everything in a run folder.

    A plan that no certificate covers yet is verified first, in a bounded time. Started alone with a plan for several ranks, it runs
    the script again in each of them and then ends the process. `settings`: folder, keep (last N checkpoints and the best), every
    (steps), resume, override, verify, fallback, certificate (required), quiet, workers; what is not given here is taken from ECHELON_*
    variables, else from echelon.toml, as the command line does.
    """
    world = prepare_process("train")
    if not world.launched:
        try:
            trained = _train_job(job, plan, world, listeners, settings)
        except Exception as error:  # a script may go on with another training
            record_result({"error": format_error(error)})
            raise
        record_result(trained.to_plain())
        return trained
    earlier_result = take_previous_result()
    if earlier_result is None:
        return _train_job(job, plan, world, listeners, settings)
    if "error" in earlier_result:
        raise LaunchError(f"this training failed before the script started its ranks: {earlier_result['error']}")
    return Trained.from_plain(earlier_result)


def _train_job(
    job: JobLike, plan: PlanLike, world: World, listeners: Sequence[Listener], settings: Mapping[str, Any]
) -> Trained:
    requested, resolved_settings = resolve_train_settings(plan, settings)
    if world.is_main:
        require_writable(Path("runs" if resolved_settings.folder is None else resolved_settings.folder))
    job_source = JobSource(job)
    attempt = PlanAttempt(job_source, world, resolved_settings, listeners)
    if world.launched:
        return train_on_ranks(job_source, requested, world, attempt, fallback=resolved_settings.fallback)
    plans = candidate_plans(job_source, requested, fallback=resolved_settings.fallback)
    trained: Trained = run_first_proved(plans, attempt, lambda candidate: verification_limit(job_source.job, candidate))
    return trained


class PlanAttempt:
    """One plan executed from the gate to the end, here or by ranks that this process starts. After a plan that the run itself
    disproved, the next one goes on in the same folder from its last good checkpoint."""

    def __init__(
        self,
        job_source: JobSource,
        world: World,
        settings: Settings,
        listeners: Sequence[Listener] = (),
        start_ranks: Callable[[ResolvedPlan, Settings], Any] = lambda prepared, settings: rerun_script(prepared),
    ) -> None:
        """`start_ranks` runs a plan on several ranks where this process is none of them."""
        self._job_source, self._world, self._settings = job_source, world, settings
        self._listeners, self._start_ranks = listeners, start_ranks

    def __call__(self, resolved: ResolvedPlan, world: World | None = None) -> Any:
        """What the training came to; where ranks were started, what `start` returned."""
        world = world or self._world
        try:
            if not world.launched and resolved.plan.ranks > 1:
                return self._start_ranks(resolved, self._settings)
            return self._train(resolved, world)
        except EchelonError as error:
            if is_disproved(error) and not isinstance(error, UnverifiedPlanError):
                self._settings = dataclasses.replace(self._settings, resume=True)
            raise

    def _train(self, resolved: ResolvedPlan, world: World) -> Trained:
        settings = self._settings
        verdict = require_proof(self._job_source, resolved, world, verify=settings.verify, quiet=settings.quiet)
        trainer = Trainer(self._job_source, resolved, world, settings, self._listeners, verdict)
        self._settings = dataclasses.replace(settings, folder=trainer.folder)
        return trainer.run()


def parallelize(
    job: JobLike,
    plan: PlanLike = None,
    *,
    device: torch.device | None = None,
    workers: int = 0,
    warn: Callable[[str], None] = lambda message: None,
    verify: bool | None = None,
) -> Run:
    """The job under a plan on this rank, for people who keep their own loop: `for batch in run.batches(): run.step(batch)`.

    A plan that no certificate covers yet is verified first, as `train` does; `verify=False` (or ECHELON_VERIFY=0) leaves that out. One that is
    disproved is replaced by the nearest proved one where this process starts the ranks itself; under torchrun it raises UnprovedPlan.
    """
    world = prepare_process("parallelize")
    job_source = JobSource(job)
    settings = resolve_train_settings(plan, {} if verify is None else {"verify": verify})[1]

    def execute(resolved: ResolvedPlan, world: World = world) -> Run:
        if not world.launched and resolved.plan.ranks > 1:
            rerun_script(resolved)
        verdict = require_proof(job_source, resolved, world, verify=settings.verify)
        if resolved.fallback and world.is_main:
            warnings.warn(resolved.fallback, stacklevel=4)
        from echelon.engine.run import Run

        run = Run(job_source.job, resolved.plan, world, device=device, workers=workers, warn=warn)
        run.attributes.is_unproved = verdict.certificate is None
        return run

    if world.launched:
        return run_first_proved_on_ranks(job_source, plan, world, execute)
    run: Run = run_first_proved(
        candidate_plans(job_source, plan, fallback=settings.fallback),
        execute,
        lambda candidate: verification_limit(job_source.job, candidate),
    )
    record_result(None)
    return run
