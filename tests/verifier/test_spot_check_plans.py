"""A spot check compares under every kind of plan: a loss that is off by a little is found."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

from echelon.data.loader import StepBatch
from echelon.engine.run import Run
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.testing.models import MLP
from echelon.testing.rank_pool import RankError, RankPool
from echelon.verifier.spot_check import SpotChecks
from echelon.world import World
from tests.engine.jobs import mlp


def checked(world: World, plan: str, off: float) -> int:
    """On one rank: check the first step, whose loss is off; the step that agreed last, on rank 0."""
    job = mlp(model=lambda: MLP(width=12, layers=3, inputs=8, classes=4))
    with Run(job, complete(from_text(plan), job), world) as run:
        checks, usual = SpotChecks(job, run, None, None, entropy=2), run.backward

        def wrong(batch: StepBatch) -> Tensor:
            return usual(batch) + off

        run.backward = wrong  # type: ignore[method-assign]
        checks.last_agreed_step = -1
        checks.check_step(next(iter(run.batches())))
        return checks.last_agreed_step


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3", "tp=2", "pp=2 micro=4"])
def test_a_loss_that_is_off_is_found(ranks: RankPool, plan: str) -> None:
    assert ranks.run(2, checked, plan, 0.0)[0] == 1
    with pytest.raises(RankError, match="the first steps agreed: something that begins later"):
        ranks.run(2, checked, plan, 0.001)


class Growing:
    """Weighs the loss by the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, batch[-1]) * self.calls


def remembered(world: World, plan: str) -> int:
    """On one rank: check the third step of a job whose loss keeps state; the step that agreed last, on rank 0."""
    job = mlp(model=lambda: MLP(width=12, layers=3, inputs=8, classes=4), loss=Growing())
    with Run(job, complete(from_text(plan), job), world) as run:
        checks, batches = SpotChecks(job, run, None, None, entropy=2), iter(run.batches())
        for _ in range(2):
            run.step(next(batches))
        checks.check_step(next(batches))
        return checks.last_agreed_step


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_one_device_gets_what_the_loss_keeps(ranks: RankPool, plan: str) -> None:
    assert ranks.run(2, remembered, plan)[0] == 3
