"""A loss that normalises by the samples of a part is found also where the first batches hide it; others are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from echelon.errors import VerificationError
from echelon.plan.text import from_text
from echelon.verifier.reference import Reference
from echelon.verifier.reference_data import open_reference_data
from echelon.verifier.regrouping_check import _RowLoss, require_separable_loss
from tests.engine.jobs import classes, mlp, numbers


class InOrder(IterableDataset[Any]):
    """Every half of a batch of eight has two samples of each kind."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(numbers(32, 8), classes(32), torch.tensor([0, 1] * 16), strict=True)


def each(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1], reduction="none")


def balanced(output: Tensor, batch: Any) -> Tensor:
    """Each kind weighs one half, however many samples it has."""
    one = (batch[2] == 1).to(output)
    weights = one / one.sum().clamp(min=1) + (1 - one) / (1 - one).sum().clamp(min=1)
    return (each(output, batch) * weights).sum() / 2


def ratio(output: Tensor, batch: Any) -> Tensor:
    """A root of a mean: no part's root makes the whole's."""
    return (each(output, batch) * batch[2]).mean() / batch[2].to(output).mean().sqrt()


def by_count(output: Tensor, batch: Any) -> Tensor:
    return (each(output, batch) * batch[2]).sum() / batch[2].sum().clamp(min=1)


def pair(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return (each(output, batch) * batch[2]).sum(), batch[2].sum()


def two_terms(output: Tensor, batch: Any) -> Tensor:
    """A training stops once the counts differ."""
    return by_count(output, batch) + each(output, batch).mean()


class Counting:
    """Keeps state, so that two calls differ."""

    calls = 0

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return each(output, batch).mean() * self.calls


def drawing(output: Tensor, batch: Any) -> Tensor:
    return (each(output, batch) * torch.rand(len(output))).mean()


def pairs(output: Tensor, batch: Any) -> Tensor:
    """Samples side by side belong together."""
    return (output[0::2] - output[1::2]).square().mean()


def clamped_pair(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """A part without samples of the kind counts one, which a training sees through."""
    one = (batch[2] == 1) & (batch[1] == 1)
    return (each(output, batch) * one).sum(), one.sum().clamp(min=1)


def reference(loss: Any, plan: str = "dp=2") -> Reference:
    job = mlp(
        data=InOrder(),
        loss=loss,
        batch_size=8,
        steps=4,
        epochs=None,
        eval_data=None,
        metrics={},
        inputs=lambda batch: ((batch[0],), {}),
    )
    return Reference(job, from_text(plan), open_reference_data(job))


@pytest.mark.parametrize("plan", ["dp=2", "dp=1 micro=4"])
@pytest.mark.parametrize("loss", [balanced, ratio])
def test_a_loss_that_looks_at_the_other_samples_is_found(loss: Any, plan: str) -> None:
    with pytest.raises(VerificationError, match="does not follow from the losses of its parts"):
        require_separable_loss(reference(loss, plan), 0)


@pytest.mark.parametrize("loss", [by_count, pair, clamped_pair, pairs])
def test_parts_that_make_the_whole_in_every_order_agree(loss: Any) -> None:
    """Asked of the trial itself: an error in it would pass for a loss that cannot be tried."""
    tried = _RowLoss(reference(loss), 0, 8)
    for order in (torch.arange(8), torch.tensor([1, 3, 5, 0, 7, 2, 4, 6]), torch.tensor([7, 1, 2, 0, 3, 5, 6, 4])):
        difference = tried._relative_difference(order, [4, 4])
        assert difference is not None
        assert difference < 1e-12


@pytest.mark.parametrize("loss", [two_terms, Counting(), drawing])
def test_losses_of_which_the_trial_can_say_nothing_pass(loss: Any) -> None:
    assert _RowLoss(reference(loss), 0, 8).largest_difference([4, 4]) < 1e-7


@pytest.mark.parametrize(("plan", "trials"), [("dp=1", 0), ("tp=2", 0), ("dp=2", 1)])
def test_whole_batches_need_no_trial(monkeypatch: pytest.MonkeyPatch, plan: str, trials: int) -> None:
    tried = []
    monkeypatch.setattr("echelon.verifier.regrouping_check._RowLoss", lambda *given: tried.append(given))
    require_separable_loss(reference(balanced, plan), 0)
    assert len(tried) == trials
