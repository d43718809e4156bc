"""Jobs that train in a moment."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import echelon
from echelon.engine.run import Run
from echelon.errors import DivergenceError
from echelon.events import Event
from echelon.plan.text import from_text
from echelon.verifier.spot_check import SpotChecks
from echelon.world import World

#: Samples and batch give this many steps per epoch.
STEPS = 4

#: The same as a job file, without a name of its own.
FILE = """
import echelon
from tests.flow.jobs import make

def job():
    return make(name=None)

def tiny():
    return make(name=None, epochs=1)
"""


def samples(*, opposite: bool = False) -> TensorDataset:
    """A sum to learn. `opposite`: a set on which every step of learning it makes things worse."""
    values = torch.randn(8 * STEPS, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(values, values.sum(1, keepdim=True) * (-1 if opposite else 1))


def make(**fields: Any) -> echelon.Job:
    """Three epochs of four steps, unless `fields` say otherwise."""
    plain: dict[str, Any] = {
        "name": "small",
        "model": lambda: nn.Linear(8, 1),
        "loss": lambda output, batch: F.mse_loss(output, batch[-1]),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        "data": samples(),
        "batch_size": 8,
        "epochs": 3,
    }
    return echelon.Job(**(plain | fields))


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream without an end."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.ones(8), torch.ones(1)


def last_loss(world: World, folder: str) -> float | None:
    """Train on this rank of several; the loss that it was told."""
    return echelon.train(make(), f"dp={world.size}", out=Path(folder), quiet=True).loss


class Wide(nn.Module):
    """Layers that every axis can cut, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.drop = nn.Dropout(0.2)
        self.second = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.last = nn.Linear(8, 1)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.second(self.drop(values + self.first(values))))


def checked_losses(world: World, folder: str, plan: str, verify: bool) -> list[float]:
    """Train on this rank of several; how many steps were checked, and the losses, as rank 0 reports them."""
    events: list[Event] = []
    job = make(model=Wide, epochs=5)
    echelon.train(job, plan, out=Path(folder), quiet=True, verify=verify, listeners=[events.append])
    counts = [event.data["count"] for event in events if event.kind == "checked"]
    return [*(counts or [0]), *(event.data["loss"] for event in events if event.kind == "step")]


def checked_steps(world: World, plan: str, entropy: int | None = None) -> list[int]:
    """The steps that a launch on this rank of several would check."""
    job = make(epochs=50)
    with Run(job, from_text(plan), world) as run:
        begun = torch.get_rng_state(), random.getstate()
        checks = SpotChecks(job, run, None, None, entropy=entropy)
        assert torch.equal(torch.get_rng_state(), begun[0])
        assert random.getstate() == begun[1]
        return [step for step in range(run.total_steps) if checks.is_due(step)]


class Uncut(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, values: Tensor) -> Tensor:
        return values.sum(1, keepdim=True) * self.weight


def coupled(rate: float = 0.05) -> echelon.Job:
    """A job whose samples see each other, in a model that nothing can cut."""
    return make(
        model=Uncut,
        loss=lambda output, batch: (output - batch[-1]).std(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
    )


def trained_alone(world: World, folder: str, plan: str, cache: str, rate: float = 0.05) -> tuple[int, float | None]:
    """Train it on this rank of several; what it came to."""
    if cache:
        os.environ["ECHELON_CACHE"] = cache
    os.environ["ECHELON_VERIFY"] = "1"
    trained = echelon.train(coupled(rate), plan, out=Path(folder), quiet=True)
    return trained.steps, trained.loss


class FailsOnRank1(nn.Linear):
    def forward(self, values: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 1 and len(values) < 4:
            raise ValueError("rank 1 cannot have this part of the batch")
        return super().forward(values)


def failing_on_rank_1(world: World, folder: str) -> None:
    """Train what fails on rank 1 alone, between collectives for which rank 0 waits."""
    os.environ["ECHELON_VERIFY"] = "1"
    job = make(
        model=lambda: nn.Sequential(nn.Linear(8, 8), FailsOnRank1(8, 8), nn.Linear(8, 1)), batch_size=4, epochs=1
    )
    echelon.train(job, "dp=2 zero=3", out=Path(folder), quiet=True)


class Average:
    def __init__(self) -> None:
        self.value = 0.0


class Keeps(nn.Module):
    """State in an object, in generators and in a list, which every rank changes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.average, self.steps = nn.Linear(8, 1), Average(), [0.0]
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.average.value += 0.1
            self.steps.append(0.01)
            values = values * (1 + 0.1 * self.python.random() + 0.1 * float(self.numpy.random()))
        return self.net(values) * (1 + self.average.value + sum(self.steps))


def keeping() -> echelon.Job:
    return make(model=Keeps, epochs=4)


def kept(world: World, folder: str, cache: str) -> None:
    """Train it on this rank of two."""
    os.environ["ECHELON_CACHE"], os.environ["ECHELON_VERIFY"] = cache, "1"
    echelon.train(keeping(), "dp=2", out=Path(folder), quiet=True)


def sparse() -> echelon.Job:
    """A table that SparseAdam trains, and a layer that Adam does."""

    def optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
        table, *rest = parameters
        return [torch.optim.SparseAdam([table], lr=0.05), torch.optim.Adam(rest, lr=0.05)]

    ids = torch.randint(20, (32, 2), generator=torch.Generator().manual_seed(0))
    return make(
        model=lambda: nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1)),
        data=TensorDataset(ids, ids.sum(1, keepdim=True) / 20),
        optimizer=optimizers,
        epochs=1,
    )


def scaled(model: Any) -> echelon.Job:
    """A parameter of the loss trains beside the model's."""
    scale = nn.Parameter(torch.ones(()))
    return make(
        model=model,
        loss=lambda output, batch: F.mse_loss(output * scale, batch[-1]),
        optimizer=lambda parameters: torch.optim.SGD([*parameters, scale], lr=0.05, momentum=0.9),
    )


class ByRank(Dataset[tuple[Tensor, Tensor]]):
    """After `after` reads rank 1 gets other samples, as from a data set that splits itself between ranks."""

    def __init__(self, after: int) -> None:
        self._samples, self._left = samples(), after

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._left -= 1
        elsewhere = self._left < 0 and dist.is_initialized() and dist.get_rank() == 1
        return self._samples[(index + 1) % len(self) if elsewhere else index]


def split_by_rank(world: World, folder: str) -> str:
    """Train on it on this rank of two; the error."""
    os.environ["ECHELON_VERIFY"] = "1"
    try:
        echelon.train(make(data=ByRank(100), epochs=60), "dp=2", out=Path(folder), quiet=True)
    except DivergenceError as error:
        return str(error)
    return ""


def scaled_by_hand() -> echelon.Job:
    """The rate depends on the number of processes."""
    rate = 0.01 * int(os.environ.get("WORLD_SIZE", "1"))
    return make(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate))


class Normalised(Dataset[tuple[Tensor, Tensor]]):
    """Subtracts a running mean of what it has read."""

    def __init__(self) -> None:
        self.rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
        self.mean = torch.zeros(8)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.mean = 0.9 * self.mean + 0.1 * self.rows[index]
        return self.rows[index] - self.mean, self.rows[index, :1]


JOBS: dict[str, Callable[[], echelon.Job]] = {
    "sparse": sparse,
    "scaled": lambda: scaled(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))),
    "scaled by hand": scaled_by_hand,
    "normalised": lambda: make(data=Normalised()),
}


def trained_on_ranks(world: World, kind: str, folder: str, plan: str, cache: str) -> None:
    """Train one of these on this rank of several."""
    os.environ["ECHELON_CACHE"], os.environ["ECHELON_VERIFY"] = cache, "1"
    echelon.train(JOBS[kind], plan, out=Path(folder), quiet=True)
