"""Proofs of the zoo's jobs, called on every rank of the pool."""

from __future__ import annotations

from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.profiler.complete import complete
from echelon.verifier.verify import verify
from echelon.world import World
from tests.zoo import ZOO


def prove(world: World, name: str, plan: str) -> str:
    """The certificate of one entry under a plan in its short form, as text."""
    return verify(ZOO[name](), from_text(plan), world=world).to_json()


def prove_plan(world: World, name: str, plan: str) -> str:
    """The same for a whole plan document."""
    return verify(ZOO[name](), Plan.from_json(plan), world=world).to_json()


def completed(name: str, text: str) -> str:
    """The plan document of a short form, with its placements and stages for a zoo model."""
    return complete(from_text(text), ZOO[name]()).to_json()
