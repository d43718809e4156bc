"""The loss that a step returns: a tensor that the host reads without waiting for later work."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from echelon.engine.run import Run
from echelon.engine.step_result import AsyncScalars, StepResult
from echelon.plan.plan import Plan
from echelon.world import World
from tests.flow.jobs import make


@pytest.fixture(scope="module")
def losses() -> list[StepResult]:
    with Run(make(epochs=1), Plan(), World()) as run:
        return [run.step(batch) for batch in run.batches()]


def test_a_loss_is_a_number_and_a_tensor(losses: list[StepResult]) -> None:
    loss = losses[0]
    value = loss.item()
    assert (float(loss), f"{loss:.3f}", str(loss)) == (value, f"{value:.3f}", str(value))
    assert loss == losses[0]
    assert (losses[1] > loss) == (float(losses[1]) > value)
    assert loss < value + 1
    assert not math.isnan(loss)
    assert (loss + 1).item() == pytest.approx(value + 1)
    assert (2 * loss).item() == pytest.approx(2 * value)
    assert sum(losses).item() == pytest.approx(sum(map(float, losses)))
    assert torch.stack(losses).mean().item() == pytest.approx(np.mean([float(each) for each in losses]))
    assert type(loss * 1) is type(loss.loss) is torch.Tensor
    assert not loss.requires_grad


def test_a_loss_keeps_the_figures_of_its_step(losses: list[StepResult]) -> None:
    assert (losses[0].sample_count, losses[0].skipped, losses[0].learning_rates) == (8, False, (0.05,))
    assert repr(losses[0]).startswith(f"StepResult(loss={losses[0]:.6g}")


def test_copies_are_plain_tensors(losses: list[StepResult]) -> None:
    for plain in (copy.deepcopy(losses[0]), pickle.loads(pickle.dumps(losses[0]))):
        assert type(plain) is torch.Tensor
        assert plain == losses[0]


def test_nothing_is_read_before_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: AsyncScalars) -> list[float]:
        raise AssertionError("the host was made to wait")

    with Run(make(epochs=1), Plan(), World()) as run:
        monkeypatch.setattr(AsyncScalars, "read", refuse)
        batches = iter(run.batches())
        total = run.step(next(batches)) + run.step(next(batches))
        monkeypatch.undo()
    assert math.isfinite(total)
