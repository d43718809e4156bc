"""State in containers, records and iterators of any class: it comes back after a resume, and calls that are only tried leave it alone."""

from __future__ import annotations

import itertools
import queue
from argparse import Namespace
from array import array
from collections import Counter, UserDict, UserList
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from echelon.engine.run import Run
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.testing.models import MLP
from echelon.testing.rank_pool import RankPool
from echelon.verifier.verify import verify
from echelon.world import World
from tests.engine.jobs import mlp, numbers
from tests.sampling import WHOLE, pairs

STEPS = 2


class OwnList(list[float]):
    """Counts what is added to it."""

    def __init__(self) -> None:
        super().__init__([0.0])
        self.added = 0

    def append(self, value: float) -> None:
        self.added += 1
        super().append(value)


class OwnDict(dict[str, float]):
    """Returns 0 for what it lacks."""

    def __missing__(self, key: str) -> float:
        return 0.0


def numbered() -> Iterator[int]:
    """1, 2, 3, ..."""
    at = 0
    while True:
        at += 1
        yield at


def _count(held: Any) -> float:
    held["n"] += 1
    return float(held["n"])


def _attribute(held: Any) -> float:
    held.n += 1
    return float(held.n)


def _append(held: Any) -> float:
    held.append(len(held) + 1.0)
    return float(held[-1]) + getattr(held, "added", 0)


def _first(held: Any) -> float:
    held[0] += 1
    return float(held[0])


def _queued(held: Any) -> float:
    held.put(held.qsize() + 1)
    return float(held.qsize())


#: What makes a holder, and what counts in it.
HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "Counter": (Counter, _count),
    "SimpleNamespace": (lambda: SimpleNamespace(n=0), _attribute),
    "Namespace": (lambda: Namespace(n=0), _attribute),
    "UserDict": (lambda: UserDict(n=0), _count),
    "UserList": (lambda: UserList([0.0]), _append),
    "a list's subclass": (OwnList, _append),
    "a dict's subclass": (OwnDict, _count),
    "array": (lambda: array("d", [0.0]), _append),
    "bytearray": (lambda: bytearray(1), _first),
    "Queue": (queue.Queue, _queued),
    "itertools.count": (lambda: itertools.count(1), next),
    "itertools.cycle": (lambda: itertools.cycle([1, 4, 2, 7, 3]), next),
    "a list's iterator": (lambda: iter(range(1, 1000)), next),
    "a generator": (numbered, next),
    "iterators in a list": (lambda: [itertools.count(1)], lambda held: float(next(held[0]))),
}


class Layer(nn.Module):
    """Scales by what its holder counts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make, self.advance = HOLDERS[kind]
        self.held = make()

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.advance(self.held))


def in_model(kind: str) -> Job:
    def model() -> nn.Module:
        made = MLP(width=12, layers=3, inputs=8, classes=4)
        made.insert(1, Layer(kind))
        return made

    return mlp(model=model)


def in_loss(kind: str) -> Job:
    make, advance = HOLDERS[kind]
    held = make()
    return mlp(
        loss=lambda output, batch: (
            F.cross_entropy(output, batch[-1]) * (1 + 0.1 * advance(held))
            if torch.is_grad_enabled()
            else F.cross_entropy(output, batch[-1])
        )
    )


class Rated(SGD):
    """A rate by what its holder counts."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, lr=0.1)
        make, self.advance = HOLDERS[kind]
        self.held = make()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.advance(self.held))
        super().step()


def in_optimizer(kind: str) -> Job:
    return mlp(optimizer=lambda params: Rated(params, kind))


def in_hook(kind: str) -> Job:
    make, advance = HOLDERS[kind]

    def optimizer(params: Any) -> Optimizer:
        made, held = SGD(params, lr=0.1), make()

        def rate(live: Optimizer, *_: Any) -> None:
            for group in live.param_groups:
                group["lr"] = 0.1 / (1 + advance(held))

        made.register_step_pre_hook(rate)
        return made

    return mlp(optimizer=optimizer)


PLACES = {"model": in_model, "loss": in_loss, "optimizer": in_optimizer, "hook": in_hook}


def losses(
    world: World, place: str, kind: str, plan: str, *, first: int = 0, folder: str = "", proved: bool = False
) -> list[float]:
    """Those of a run's steps: of the first ones, with a checkpoint after them, or from a checkpoint on, or of all."""
    job = PLACES[place](kind)
    if proved:
        verify(job, from_text(plan))
    with Run(job, complete(from_text(plan), job), world) as run:
        if folder and not first:
            run.load(Path(folder))
        if proved:
            run.evaluate(torch.utils.data.TensorDataset(numbers(16, 8), torch.arange(16) % 4))
        found = [float(run.step(batch).loss) for batch in run.batches(first or None)]
        if first:
            run.save(Path(folder))
    return found


@pytest.mark.parametrize(("kind", "place"), pairs(HOLDERS, PLACES, each=1, table="held types")[:: 1 if WHOLE else 2])
def test_a_resumed_run_goes_on_with_state_of_any_class(tmp_path: Path, place: str, kind: str) -> None:
    unbroken = losses(World(), place, kind, "dp=1")
    begun = losses(World(), place, kind, "dp=1", first=STEPS, folder=str(tmp_path / "here"))
    assert begun + losses(World(), place, kind, "dp=1", folder=str(tmp_path / "here")) == unbroken
    assert len(set(unbroken)) == len(unbroken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "place"),
    pairs(HOLDERS, ["loss", "optimizer", "hook"], each=1, table="held types")[0 if WHOLE else 1 :: 1 if WHOLE else 2],
)
def test_proofs_and_evaluations_leave_state_of_any_class_alone(place: str, kind: str) -> None:
    assert losses(World(), place, kind, "dp=1", proved=True) == losses(World(), place, kind, "dp=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"), pairs(HOLDERS, ["dp=2", "dp=2 zero=3", "pp=2"], each=1, table="held types")[:: 1 if WHOLE else 3]
)
def test_ranks_go_on_with_state_of_any_class(tmp_path: Path, ranks: RankPool, kind: str, plan: str) -> None:
    unbroken = losses(World(), "model", kind, "dp=1")
    name, folder = "tests.engine.test_held_types:begun_and_resumed", str(tmp_path / "here")
    for found in ranks.run(2, name, "model", kind, plan, folder):
        assert found == pytest.approx(unbroken, rel=1e-5)


def begun_and_resumed(world: World, place: str, kind: str, plan: str, folder: str) -> list[float]:
    """On one rank: the losses of all steps, with a resume between them."""
    begun = losses(world, place, kind, plan, first=STEPS, folder=folder)
    return begun + losses(world, place, kind, plan, folder=folder)


class Switching(nn.Module):
    """Holds another value of a class that no checkpoint holds from its second call on."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.held, self._second = first, [second]

    def forward(self, x: Tensor) -> Tensor:
        self.held = self._second[0]
        return x


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (torch.relu, torch.tanh, "held: a builtins.builtin_function_or_method"),
        (Fraction(1, 2), Fraction(1, 3), "held: a fractions.Fraction"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path, first: Any, second: Any, why: str) -> None:
    warnings: list[str] = []

    def model() -> nn.Module:
        made = MLP(width=12, layers=3, inputs=8, classes=4)
        made.insert(1, Switching(first, second))
        return made

    job = mlp(model=model)
    with Run(job, complete(from_text("dp=1"), job), World(), warn=warnings.append) as run:
        for batch in run.batches(1):
            run.step(batch)
        run.save(tmp_path / "here")
    assert any(why in each for each in warnings), warnings
