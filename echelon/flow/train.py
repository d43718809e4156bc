"""The entries from Python: train from start to end, or keep your own loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.events import Listener
from echelon.flow.agree import agree_plan
from echelon.flow.folder import require_writable
from echelon.flow.prepare import JobLike, PlanLike, Subject
from echelon.flow.settings import Settings, settle
from echelon.flow.start import begin, run_script_again
from echelon.flow.training import Trained, Training

if TYPE_CHECKING:
    import torch

    from echelon.engine.run import Run

__all__ = ["Settings", "Trained", "parallelize", "train"]


def train(job: JobLike, plan: PlanLike = None, *, listeners: Sequence[Listener] = (), **settings: Any) -> Trained:
    """Train `job` under `plan` (default: the best for this machine) and keep everything in a run folder.

    Started alone with a plan for several ranks, it runs the script again in each of them and then ends the process. `settings`:
    folder, keep (last N checkpoints and the best), every (steps), resume, certificate (required), quiet, workers; what is not
    given here is taken from ECHELON_* variables, else from echelon.toml, as the command line does.
    """
    world = begin("train")
    wanted, chosen = settle(plan, settings)
    if world.main:
        require_writable(Path("runs" if chosen.folder is None else chosen.folder))
    subject = Subject(job)
    prepared = agree_plan(subject, wanted, world)
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
    world = begin("parallelize")
    subject = Subject(job)
    prepared = agree_plan(subject, plan, world)
    if not world.launched and prepared.plan.ranks > 1:
        run_script_again(prepared)
    if prepared.fallback and world.main:
        warnings.warn(prepared.fallback, stacklevel=2)
    from echelon.engine.run import Run

    return Run(subject.job, prepared.plan, world, device=device, workers=workers, warn=warn)
