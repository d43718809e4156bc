"""Proofs of the zoo's jobs, called on every rank of the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echelon.engine.parallel.shard_layout import to_local
from echelon.engine.run import Run
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.text import from_text
from echelon.verifier.verify import verify
from echelon.world import World
from tests.zoo import ZOO


def prove(world: World, name: str, plan: str) -> str:
    """The certificate of one entry under a plan in its short form, as text."""
    return verify(ZOO[name](), from_text(plan), world=world).to_json()


def prove_plan(world: World, name: str, plan: str, known: str | None = None) -> str:
    """The same for a whole plan document; `known`: the job's profile, where there is one."""
    profile = Profile.from_json(known) if known else None
    return verify(ZOO[name](), Plan.from_json(plan), world=world, profile=profile).to_json()


def completed(name: str, text: str) -> str:
    """The plan document of a short form, with its placements and stages for a zoo model."""
    return complete(from_text(text), ZOO[name]()).to_json()


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank says of a plan."""

    certificate: str
    sent: int  #: bytes that it handed to collectives and sends in a step
    held: float  #: share of the parameters' bytes that it keeps


def prove_and_count(world: World, name: str, plan: str, known: str | None = None) -> Told:
    """The proof, and one step in which messages are counted."""
    certificate = prove_plan(world, name, plan, known)
    run = Run(ZOO[name](), Plan.from_json(plan), world)
    try:
        batch = next(iter(run.batches(1)))
        with Traffic() as traffic:
            run.step(batch)
        whole = sum(_product(shape) for shape in run.full_shapes.values())
        held = sum(to_local(each).numel() for each in run.model.parameters() if not each.is_meta)
        return Told(certificate, traffic.bytes, held / whole)
    finally:
        run.close()


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


class Traffic(TorchDispatchMode):
    """Counts what goes to other ranks: of a collective the larger of what goes in and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not func.__name__.startswith(("recv", "wait")):
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.bytes += max((leaf.numel() * leaf.element_size() for leaf in given), default=0)
        return func(*args, **(kwargs or {}))
