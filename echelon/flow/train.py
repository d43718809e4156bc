"""The entries from Python: train from start to end, or keep your own loop."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.errors import EchelonError, LaunchError, UnprovedPlan
from echelon.events import Listener
from echelon.flow.broadcast_plan import first_launched, train_launched
from echelon.flow.gate import attempts, bound, disproved, first_proved, require_proof
from echelon.flow.resolve_plan import JobLike, PlanLike, Prepared, Subject
from echelon.flow.run_folder import require_writable
from echelon.flow.settings import Settings, settle
from echelon.flow.spawn import begin, note_done, run_script_again
from echelon.flow.trainer import Trained, Training
from echelon.launchers.rank_ipc import in_words, take_done
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
    world = begin("train")
    if not world.launched:
        try:
            trained = _trained(job, plan, world, listeners, settings)
        except Exception as error:  # a script may go on with another training
            note_done({"error": in_words(error)})
            raise
        note_done(trained.to_plain())
        return trained
    done = take_done()
    if done is None:
        return _trained(job, plan, world, listeners, settings)
    if "error" in done:
        raise LaunchError(f"this training failed before the script started its ranks: {done['error']}")
    return Trained.from_plain(done)


def _trained(
    job: JobLike, plan: PlanLike, world: World, listeners: Sequence[Listener], settings: Mapping[str, Any]
) -> Trained:
    wanted, chosen = settle(plan, settings)
    if world.main:
        require_writable(Path("runs" if chosen.folder is None else chosen.folder))
    subject = Subject(job)
    attempt = Attempt(subject, world, chosen, listeners)
    if world.launched:
        return train_launched(subject, wanted, world, attempt, fallback=chosen.fallback)
    plans = attempts(subject, wanted, fallback=chosen.fallback)
    trained: Trained = first_proved(plans, attempt, lambda each: bound(subject.job, each))
    return trained


class Attempt:
    """One plan executed from the gate to the end, here or by ranks that this process starts. After a plan that the run itself
    disproved, the next one goes on in the same folder from its last good checkpoint."""

    def __init__(
        self,
        subject: Subject,
        world: World,
        settings: Settings,
        listeners: Sequence[Listener] = (),
        start: Callable[[Prepared, Settings], Any] = lambda prepared, settings: run_script_again(prepared),
    ) -> None:
        """`start` runs a plan on several ranks where this process is none of them."""
        self._subject, self._world, self._settings = subject, world, settings
        self._listeners, self._start = listeners, start

    def __call__(self, prepared: Prepared, world: World | None = None) -> Any:
        """What the training came to; where ranks were started, what `start` returned."""
        world = world or self._world
        try:
            if not world.launched and prepared.plan.ranks > 1:
                return self._start(prepared, self._settings)
            return self._train(prepared, world)
        except EchelonError as error:
            if disproved(error) and not isinstance(error, UnprovedPlan):
                self._settings = dataclasses.replace(self._settings, resume=True)
            raise

    def _train(self, prepared: Prepared, world: World) -> Trained:
        settings = self._settings
        verdict = require_proof(self._subject, prepared, world, verify=settings.verify, quiet=settings.quiet)
        training = Training(self._subject, prepared, world, settings, self._listeners, verdict)
        self._settings = dataclasses.replace(settings, folder=training.folder)
        return training.run()


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
    world = begin("parallelize")
    subject = Subject(job)
    chosen = settle(plan, {} if verify is None else {"verify": verify})[1]

    def execute(prepared: Prepared, world: World = world) -> Run:
        if not world.launched and prepared.plan.ranks > 1:
            run_script_again(prepared)
        verdict = require_proof(subject, prepared, world, verify=chosen.verify)
        if prepared.fallback and world.main:
            warnings.warn(prepared.fallback, stacklevel=4)
        from echelon.engine.run import Run

        run = Run(subject.job, prepared.plan, world, device=device, workers=workers, warn=warn)
        run.attributes.unproved = verdict.certificate is None
        return run

    if world.launched:
        return first_launched(subject, plan, world, execute)
    run: Run = first_proved(
        attempts(subject, plan, fallback=chosen.fallback), execute, lambda each: bound(subject.job, each)
    )
    note_done(None)
    return run
