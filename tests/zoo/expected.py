"""What becomes of each model of the zoo under each plan: verified, but for these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from echelon.plan.plan import Plan
from echelon.plan.text import from_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Unproved:
    """Models that are not verified under some plans, and why."""

    models: tuple[str, ...]
    plans: Callable[[Plan], bool]
    verdict: str
    why: str
    #: With this torch or a later one they are verified.
    until: tuple[int, int] | None = None


def _parted(plan: Plan) -> bool:
    return plan.mesh.dp > 1


def _staged(plan: Plan) -> bool:
    return plan.mesh.pp > 1


def _sharded(plan: Plan) -> bool:
    return plan.zero > 0 and plan.mesh.pp == 1


#: The first that fits counts.
UNPROVED = (
    Unproved(models=("moe-balanced", "hf-clip"), plans=_parted, verdict="refused", why="the loss couples samples"),
    Unproved(
        models=("early-exit", "ponder"), plans=_staged, verdict="falls back", why="its data decide what is called"
    ),
    Unproved(models=("forces",), plans=_staged, verdict="falls back", why="forward takes a derivative"),
    Unproved(
        models=("lstm", "tagger", "lora"), plans=lambda plan: plan.mesh.pp == 4, verdict="falls back", why="three units"
    ),
    Unproved(
        models=("keras",),
        plans=lambda plan: plan.mesh.pp > 1 or plan.mesh.tp > 1,
        verdict="falls back",
        why="layers compute with tensors that they hold beside their parameters",
    ),
    Unproved(
        models=("keras",),
        plans=_sharded,
        verdict="refused",
        why="layers compute with tensors that they hold beside their parameters",
    ),
    Unproved(
        models=("tagger", "hf-llama", "hf-bert-classifier"),
        plans=_staged,
        verdict="refused",
        why="values without a gradient pass between stages",
        until=(2, 13),
    ),
    Unproved(
        models=("hf-t5",),
        plans=lambda plan: plan.mesh.pp == 4,
        verdict="refused",
        why="values without a gradient pass between stages",
        until=(2, 13),
    ),
    Unproved(models=("forces",), plans=_sharded, verdict="refused", why="differentiates its own derivative"),
    Unproved(models=("records",), plans=_sharded, verdict="refused", why="gives a dataclass", until=(2, 13)),
)


def expected(model: str, plan: str, version: str = torch.__version__) -> str:
    """The verdict on a model under a plan in its short form, with a version of torch."""
    major, minor = (int(part) for part in version.split(".")[:2])
    for each in UNPROVED:
        if model in each.models and each.plans(from_text(plan)) and (each.until is None or (major, minor) < each.until):
            return each.verdict
    return "verified"
