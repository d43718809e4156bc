"""Steps of which it does not show what their losses count are compared with one device before the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from echelon.engine.run import Run
from echelon.errors import DivergenceError
from echelon.job import Job
from echelon.plan.text import from_text
from echelon.verifier.spot_check import FIRST_CHECKED_STEP, SpotChecks
from echelon.world import World
from tests.engine.jobs import classes, numbers
from tests.verifier import unusual

STEPS, BATCH = 8, 8
#: A step that no spot check falls on, drawn from `ENTROPY`.
LATE, ENTROPY = 4, 2


class Rows(IterableDataset[Any]):
    """Samples in order, each with a weight: 1, and `late` in one step."""

    def __init__(self, late: list[float], steps: int = STEPS) -> None:
        size = steps * BATCH
        weights = torch.ones(size)
        weights[LATE * BATCH : (LATE + 1) * BATCH] = torch.tensor(late)
        self.columns = numbers(size, 8), weights, classes(size)

    def __iter__(self) -> Any:
        yield from zip(*self.columns, strict=True)


Loss = Callable[[Tensor, Any], Any]


def job(loss: Loss, late: list[float], steps: int = STEPS) -> Job:
    return unusual.job(
        loss=loss, data=Rows(late, steps), inputs=lambda batch: ((batch[0],), {}), epochs=None, steps=steps
    )


def weighted(output: Tensor, batch: Any) -> Tensor:
    return (F.cross_entropy(output, batch[2], reduction="none") * batch[1]).sum()


def focal(output: Tensor, batch: Any) -> Tensor:
    return output.sigmoid().square().sum() / batch[1].sum().clamp(min=1) + F.cross_entropy(output, batch[2])


def of_parts_only(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Cannot be called with more samples than a batch has, so that the count does not show."""
    if len(output) > BATCH:
        raise ValueError("too many samples")
    return weighted(output, batch), batch[1].sum().clamp(min=1)


def of_one_or_all(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    if len(output) not in (1, BATCH):
        raise ValueError("one sample or all")
    return weighted(output, batch), len(output)


def weighted_mean(output: Tensor, batch: Any) -> Tensor:
    return weighted(output, batch) / batch[1].sum()


#: name -> (loss, weights of the late step). Two parts of four samples.
WRONG: dict[str, tuple[Loss, list[float]]] = {
    "a count that does not show": (focal, [0.0] * 8),
    "(sum, 1)": (of_parts_only, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_doubtful_step_is_compared_before_its_update(name: str) -> None:
    wrong = job(*WRONG[name])
    with Run(wrong, from_text("dp=1 micro=4"), World()) as run:
        checks = SpotChecks(wrong, run, None, None, entropy=ENTROPY)
        assert not checks.is_due(LATE)
        batches = run.batches()
        for _ in range(LATE):
            checks.step(next(batches))
        before, compared = [value.detach().clone() for value in run.model.parameters()], checks.count
        with pytest.raises(DivergenceError, match=f"step {LATE + 1}: .* off what one device computes"):
            checks.step(next(batches))
        assert all(map(torch.equal, before, run.model.parameters()))
        assert compared == sum(checks.is_due(step) for step in range(LATE))


def test_the_first_step_that_is_weighed_is_compared() -> None:
    right = job(weighted_mean, [1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    with Run(right, from_text("dp=1 micro=4"), World()) as run:
        checks = SpotChecks(right, run, None, None, entropy=ENTROPY)
        counts = []
        for batch in run.batches():
            checks.step(batch)
            counts.append(checks.count)
        due = [step for step in range(STEPS) if checks.is_due(step)]
        assert LATE not in due
        assert counts == [sum(each <= step for each in [*due, LATE]) for step in range(STEPS)]
        assert checks.last_agreed_step == STEPS


def test_doubtful_steps_are_compared_less_and_less_often() -> None:
    """Every part has one sample and returns (sum, 1), which is right, but does not show."""
    steps, warnings = 24, list[str]()
    right = job(of_one_or_all, [1.0] * 8, steps)
    with Run(right, from_text("dp=1 micro=1"), World(), warn=warnings.append) as run:
        checks = SpotChecks(right, run, None, None, entropy=ENTROPY)
        compared = []
        for batch in run.batches():
            before = checks.count
            checks.step(batch)
            if checks.count > before and not checks.is_due(batch.step):
                compared.append(batch.step)
        doubted = [step for step in range(FIRST_CHECKED_STEP - 1, steps) if not checks.is_due(step)]
        assert compared == [doubted[number - 1] for number in (1, 2, 4, 8, 16)]
        (warning,) = warnings
        assert warning.startswith(
            f"step {doubted[2] + 1}: how many items the loss of a part of the batch counts does not show"
        )
