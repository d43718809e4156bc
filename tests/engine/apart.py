"""Jobs whose ranks come apart, each in its own way, and what a run says of it. Runs inside rank processes too."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from echelon.engine.run import Run
from echelon.errors import DivergenceError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.testing.models import MLP
from echelon.world import World


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _job(**changes: Any) -> Job:
    draw = torch.Generator().manual_seed(0)
    job = Job(
        model=lambda: MLP(width=12, layers=3, inputs=8, classes=4),
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=TensorDataset(torch.randn(48, 8, generator=draw), torch.randint(0, 4, (48,), generator=draw)),
        batch_size=16,
        epochs=1,
    )
    return replace(job, **changes)


class Noisy(torch.optim.SGD):
    """Adds noise to what it learns, from whatever `draw` gives."""

    def __init__(self, params: Any, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self._draw = draw

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for value in group["params"]:
                value.add_(self._draw(value), alpha=1e-3)


class ActNorm(nn.Module):
    """Takes its first values from the first batch, by a Python flag."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.out = nn.Parameter(torch.zeros(8)), nn.Linear(8, 4)
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.shift.data.copy_(-x.mean(0))
            self.ready = True
        return self.out(x + self.shift)


class MadeLate(nn.Module):
    """Makes a layer in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(8, 8).to(x)
        return self.out(self.late(x))


class Adapters(nn.Module):
    """Adapters that are called in an order of the rank's own."""

    def __init__(self, order: Callable[[], list[int]]) -> None:
        super().__init__()
        self.order = order
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: dict[int, Tensor] = {}
        for place in self.order():
            found[place] = self.adapters[place](x)
        return self.out(found[0] - 2 * found[1])


class Entropic(Dataset[Any]):
    """Draws noise from the system's entropy."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        noise = numpy.random.default_rng().normal(size=8) if 0 < index < 47 else numpy.zeros(8)
        return torch.as_tensor(noise, dtype=torch.float32), index % 4


#: name -> (job, plan, what the error says; "" where there is none).
CASES: dict[str, tuple[Callable[[], Job], str, str]] = {
    "draws by torch": (lambda: _job(optimizer=lambda params: Noisy(params, torch.randn_like)), "dp=2", ""),
    "draws by numpy": (
        lambda: _job(optimizer=lambda params: Noisy(params, lambda v: v.new_tensor(numpy.random.normal(size=v.shape)))),
        "dp=2",
        "",
    ),
    "draws by python": (
        lambda: _job(optimizer=lambda params: Noisy(params, lambda v: v * random.random())),
        "dp=2",
        "",
    ),
    "draws by entropy": (
        lambda: _job(
            optimizer=lambda params: Noisy(
                params, lambda v: v.new_tensor(numpy.random.default_rng().normal(size=v.shape))
            )
        ),
        "dp=2",
        "after step 1: the optimizer draws random numbers of its own",
    ),
    "rate by rank": (
        lambda: _job(optimizer=lambda params: torch.optim.SGD(params, lr=0.1 + 1e-7 * _rank())),
        "dp=2",
        "after step 1: the optimizer draws random numbers of its own or depends on the rank",
    ),
    "initialization by the first batch": (
        lambda: _job(model=ActNorm),
        "dp=2",
        "parameter shift: forward itself changes it",
    ),
    "layer made in forward": (lambda: _job(model=MadeLate), "dp=2", "parameter late.weight on rank 1"),
    "order of calls": (
        lambda: _job(model=lambda: Adapters(lambda: [0, 1] if _rank() == 0 else [1, 0])),
        "tp=2",
        "is adapters.0.0 on rank 0 and adapters.1.0 on rank 1",
    ),
    "order of gathers": (
        lambda: _job(model=lambda: Adapters(lambda: [0, 1] if _rank() == 0 else [1, 0])),
        "dp=2 zero=3",
        "exchanges values over zero is adapters.0 on rank 0 and adapters.1 on rank 1",
    ),
    "entropy in the data": (lambda: _job(data=Entropic()), "tp=2", "read different samples"),
    "entropy in a pipeline's data": (lambda: _job(data=Entropic()), "pp=2 micro=4", "read different samples"),
    "uneven cut": (lambda: _job(model=lambda: MLP(width=13, layers=3, inputs=8, classes=4)), "tp=2", ""),
    "same order": (lambda: _job(model=lambda: Adapters(lambda: [1, 0])), "tp=2", ""),
    "plain": (_job, "dp=2", ""),
    "plain zero": (_job, "dp=2 zero=3", ""),
    "plain pipeline": (_job, "pp=2 micro=4", ""),
}


def outcome(world: World, name: str, folder: str | None = None) -> tuple[str, int]:
    """What a run's error says ("" where it trained), and the steps that it made."""
    make, plan, _ = CASES[name]
    job = make()
    with Run(job, complete(from_text(plan), job), world) as run:
        try:
            for batch in run.batches():
                run.step(batch)
                if folder is not None:
                    run.save(Path(folder) / f"{run.step_number}")
        except DivergenceError as error:
            return str(error), run.step_number
        return "", run.step_number


def outcomes(world: World, names: list[str]) -> dict[str, tuple[str, int]]:
    return {name: outcome(world, name) for name in names}


class Chancy(nn.Module):
    """Calls its batch norm by chance, so that ranks call it unequally often."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, 4)
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if torch.rand(()) < 0.5:
            self.inputs.append(x.detach().clone())
            x = self.norm(x)
        return self.out(x)


def running(world: World, momentum: float | None, plan: str) -> float:
    """How far the running statistics are from those of one batch norm that is called with all ranks' inputs, rank by rank."""
    job = _job(model=lambda: Chancy(momentum), batch_size=24, epochs=3)
    worst = 0.0
    with Run(job, complete(from_text(plan), job), world, dtype=torch.float64) as run:
        alone = nn.BatchNorm1d(6, momentum=momentum).double()
        counts = set()
        for batch in run.batches():
            run.model.inputs.clear()
            run.step(batch)
            parts = run.ranks.all_gather_object(run.model.inputs)
            counts.add(tuple(map(len, parts)))
            for value in (each for part in parts for each in part):
                alone(value)
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                worst = max(worst, float((getattr(alone, name) - getattr(run.model.norm, name)).abs().max()))
        assert any(len(set(each)) > 1 for each in counts), "the ranks called equally often"
    return worst
