"""Optimizers are made over what the user's function expects, and trying them leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from echelon.engine.run import Run
from echelon.job import Job, call_optimizer
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.profiler import profile
from echelon.testing.models import MLP
from echelon.testing.rank_pool import RankError, RankPool
from echelon.world import World
from tests.engine.jobs import mlp

PAIRS = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in (("weight", (3, 2)), ("bias", (3,)))]


def by_identity() -> Job:
    """A module whose last layer trains faster: the function knows its parameters by identity."""
    model = MLP(width=12, layers=3, inputs=8, classes=4)
    last = {id(value) for value in list(model.parameters())[-2:]}

    def optimizer(params: Any) -> Optimizer:
        given = list(params)
        groups = [([p for p in given if id(p) in last], 0.5), ([p for p in given if id(p) not in last], 0.1)]
        return SGD([{"params": values, "lr": rate} for values, rate in groups if values], lr=0.1)

    return mlp(model=model, optimizer=optimizer)


def rates(world: World, plan: str) -> list[float]:
    job = by_identity()
    with Run(job, complete(from_text(plan), job), world) as run:
        return [group["lr"] for group in run.optimizers[0].param_groups]


def test_functions_that_would_take_a_pair_for_a_parameter_get_parameters() -> None:
    marked = PAIRS[0][1]
    seen = call_optimizer(mlp(optimizer=lambda params: [p is marked for p in params]), PAIRS)
    assert seen == [True, False]
    assert rates(World(), "dp=1") == [0.5, 0.1]


def test_functions_that_ask_for_names_get_pairs() -> None:
    def optimizer(named: Any) -> Optimizer:
        return SGD([{"params": [p for name, p in named if name == "bias"]}], lr=0.1)

    assert call_optimizer(mlp(optimizer=optimizer), PAIRS).param_groups[0]["params"][0] is PAIRS[1][1]
    assert list(call_optimizer(mlp(optimizer=dict), PAIRS)) == ["weight", "bias"]


def test_the_functions_own_error_is_raised() -> None:
    def named(pairs: Any) -> Any:
        names = [name for name, _ in pairs]
        raise LookupError(f"no head among {names}")

    def plain(params: Any) -> Any:
        raise LookupError(f"{sum(p.ndim for p in params)} dimensions")

    with pytest.raises(LookupError, match="no head among"):
        call_optimizer(mlp(optimizer=named), PAIRS)
    with pytest.raises(LookupError, match="3 dimensions"):
        call_optimizer(mlp(optimizer=plain), PAIRS)


@pytest.mark.parametrize("plan", ["dp=2 zero=3", "tp=2"])
def test_groups_by_identity_are_refused_where_other_tensors_are_trained(ranks: RankPool, plan: str) -> None:
    with pytest.raises(RankError, match=r"lr=0.1 under this plan, and lr=0.5 on one device.* the identity"):
        ranks.run(2, rates, plan)
    assert ranks.run(2, rates, "dp=2") == [[0.5, 0.1]] * 2


class Levelled(Dataset[Any]):
    """Samples whose size the loss sets."""

    def __init__(self) -> None:
        self.level = 1.0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((8,), self.level * index), index % 4


class Counting(SGD):
    """Counts its steps in its class."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Counting.count += 1
        super().step()


@pytest.mark.slow
def test_trials_leave_no_trace_in_classes_and_data_sets() -> None:
    data = Levelled()

    def loss(output: Tensor, batch: Any) -> Tensor:
        data.level *= 0.9
        return F.cross_entropy(output, batch[-1])

    job = mlp(data=data, loss=loss, optimizer=lambda params: Counting(params, lr=0.1))
    profile(job)
    with Run(job, Plan(), World()) as run:
        assert (Counting.count, data.level) == (0, 1.0)
        for batch in run.batches(1):
            run.step(batch)
    assert (Counting.count, data.level) == (1, 0.9)
