"""Which optimizers treat each number by itself is found by trying; the tensor axis refuses the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from echelon.errors import PlanError
from echelon.flow.prepare import Subject, prepare
from echelon.job import Job
from echelon.plan.check import check
from echelon.plan.text import from_text
from echelon.profiler import profile
from echelon.profiler.complete import complete
from echelon.profiler.optimizer import rules
from tests.zoo.data import train


class Trust(torch.optim.Optimizer):
    """Steps as long as the parameter is, in the way of LAMB."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                value.sub_(value.grad * group["lr"] * value.norm() / value.grad.norm())


class Factored(torch.optim.Optimizer):
    """Keeps row means for matrices of which no side is shorter than `least`, in the way of Adafactor."""

    def __init__(self, params: Any, lr: float, least: int) -> None:
        super().__init__(params, {"lr": lr, "least": least})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                squares = value.grad.square()
                if value.ndim == 2 and min(value.shape) >= group["least"]:
                    squares = squares.mean(-1, keepdim=True) * squares.mean(-2, keepdim=True) / squares.mean()
                value.sub_(group["lr"] * value.grad / squares.sqrt())


def _factored_in_one_group(named: Any) -> torch.optim.Optimizer:
    """Only of the last layer, which has a shape that others have as well."""
    *rest, last = [value for _, value in named]
    return Factored([{"params": rest, "least": 10**6}, {"params": [last], "least": 128}], lr=1e-3, least=0)


def _muon(named: Any) -> list[torch.optim.Optimizer]:
    params = [value for _, value in named]
    matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]


class Stubborn(torch.optim.SGD):
    """Cannot be tried: it steps only where it knows the parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise KeyError("who is this?")


def _knowing(named: Any) -> torch.optim.Optimizer:
    params = [value for _, value in named]
    if all(max(value.shape) < 8 for value in params):
        raise RuntimeError("these are not the parameters that I know")
    return torch.optim.SGD(params, lr=1e-3)


def _looking(params: Any) -> torch.optim.Optimizer:
    values = list(params)
    return torch.optim.SGD(values, lr=float(values[0].sum()))


def _pieces(optimizer: Callable[[Any], Any]) -> Job:
    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return output.square().mean()

    return train(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
        data=TensorDataset(torch.randn(16, 8)),
        inputs=lambda batch: (batch, {}),
        loss=loss,
        optimizer=optimizer,
    )


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-3), [False]),
        (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1), [False]),
        (lambda p: torch.optim.RMSprop(p, lr=1e-3), [False]),
        (lambda p: torch.optim.Adagrad(p, lr=1e-3), [False]),
        (lambda p: torch.optim.Adafactor(p, lr=1e-3), [True]),
        (lambda p: Trust(p, lr=1e-3), [True]),
        (_muon, [True, False]),
        (lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True), [False]),
    ],
)
def test_an_optimizer_that_needs_whole_parameters_is_refused_under_tp(
    make: Callable[[Any], Any], whole: list[bool]
) -> None:
    job = _pieces(make)
    found = profile(job)
    assert [rule.whole for rule in found.optimizers] == whole
    errors = [str(each) for each in check(from_text("tp=2"), found) if each.severity == "error"]
    assert len(errors) == any(whole)
    assert all("norms or factors of whole parameters" in each and "use dp=2 or pp" in each for each in errors)
    assert not [each for each in check(from_text("dp=2"), found) if each.severity == "error"]


@pytest.mark.parametrize(
    ("make", "shapes", "whole"),
    [
        (lambda p: Factored(p, lr=1e-3, least=128), [(100, 4000), (4000,)], False),
        (lambda p: Factored(p, lr=1e-3, least=128), [(4000,), (130, 200)], True),
        (lambda p: Factored(p, lr=1e-3, least=128), [(30000, 200)], True),
        (_factored_in_one_group, [(130, 200), (130, 200), (130, 200)], True),
        (_factored_in_one_group, [(130, 200), (130, 200), (100, 200)], False),
        (lambda p: torch.optim.AdamW(p, lr=1e-3), [(30000, 200), (3, 2), (1,), ()], False),
    ],
)
def test_an_optimizer_is_tried_on_parameters_as_large_as_the_models(make: Any, shapes: Any, whole: bool) -> None:
    parameters = {str(place): torch.empty(shape, device="meta") for place, shape in enumerate(shapes)}
    ((rule,), _) = rules(_pieces(make), parameters)
    assert (rule.whole, rule.untried) == (whole, "")


@pytest.mark.parametrize("plan", ["tp=2", "dp=2 tp=2 zero=1", "tp=2 pp=2"])
@pytest.mark.parametrize("make", [lambda p: torch.optim.Adafactor(p, lr=1e-3), lambda p: Trust(p, lr=1e-3), _muon])
def test_it_is_refused_on_first_use_too_when_nothing_is_known_of_the_job(make: Callable[[Any], Any], plan: str) -> None:
    job = _pieces(make)
    with pytest.raises(PlanError, match="norms or factors of whole parameters, and tp leaves pieces") as caught:
        complete(from_text(plan), job)
    with pytest.raises(PlanError, match="norms or factors of whole parameters"):
        prepare(Subject(job), plan)
    (told,) = caught.value.problems
    assert str(told) in map(str, check(from_text(plan), profile(job)))
    # A document that says how the model is cut was made for another optimizer.
    cut = complete(from_text("tp=2"), replace(job, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)))
    with pytest.raises(PlanError, match="norms or factors of whole parameters"):
        complete(cut, job)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: Stubborn([v for _, v in p], lr=1e-3), r"Stubborn could not be tried .*KeyError: 'who is this\?'"),
        (_looking, r"the optimizer could not be tried on pieces"),
        (_knowing, r"SGD could not be tried on pieces of parameters \(RuntimeError: these are not"),
    ],
)
def test_one_that_cannot_be_tried_is_taken_for_one_that_needs_whole_parameters(make: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        complete(from_text("tp=2"), _pieces(make))
    assert complete(from_text("dp=2"), _pieces(make))
