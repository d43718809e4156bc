"""What optimizers read is found by trial steps; check, engine and forecast follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from echelon.job import Job
from echelon.plan.check_model import check_optimizers
from echelon.plan.text import from_text
from echelon.profiler import profile
from echelon.profiler.profile_optimizer import profile_optimizers
from tests import optimizers as own
from tests.optimizers import matrices_and_rest
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


class Stubborn(torch.optim.SGD):
    """Cannot be tried: it steps only where it knows the parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise KeyError("who is this?")


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.LayerNorm(6))


def _pieces(optimizer: Callable[[Any], Any]) -> Job:
    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return output.square().mean()

    return train(
        model=_model,
        data=TensorDataset(torch.randn(16, 6)),
        inputs=lambda batch: (batch, {}),
        loss=loss,
        optimizer=optimizer,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-3), ["element"]),
        (lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True), ["element"]),
        (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1), ["element"]),
        (lambda p: torch.optim.RMSprop(p, lr=1e-3), ["element"]),
        (lambda p: torch.optim.Adagrad(p, lr=1e-3), ["element"]),
        (lambda p: torch.optim.Adam(p, lr=0.0, foreach=True), ["element"]),
        (own.Plain, ["element"]),
        (lambda p: torch.optim.Adafactor(p, lr=1e-3), ["tensor"]),
        (matrices_and_rest(lambda values: torch.optim.Muon(values, lr=1e-3)), ["tensor", "element"]),
        (lambda p: Trust(p, lr=1e-3), ["tensor"]),
        (own.Lamb, ["tensor"]),
        (own.Lars, ["tensor"]),
        (own.Shampoo, ["tensor"]),
        (lambda p: own.Lars(p, begin=5), ["tensor"]),
        (lambda p: own.Lars(p, begin=500), ["tensor"]),
        (lambda p: own.Shampoo(p, begin=20_000), ["tensor"]),
        (own.ThroughData, ["tensor"]),
        (own.ClipInside, ["model"]),
        (own.NvLamb, ["model"]),
        (own.DAdapt, ["model"]),
        (own.Prodigy, ["model"]),
        (own.Sgld, ["draws"]),
        (own.NumpyNoise, ["draws"]),
        (own.EntropyNoise, ["draws"]),
        (lambda p: own.Picky(list(p)), ["model"]),
    ],
)
def test_an_optimizer_is_classified_by_what_its_step_reads(make: Callable[[Any], Any], kinds: list[str]) -> None:
    job, parameters = _pieces(make), dict(_model().named_parameters())
    state = torch.get_rng_state()
    found, _ = profile_optimizers(job, parameters)
    assert ["draws" if rule.uses_rng else rule.update_scope for rule in found] == kinds
    assert not any(rule.untested_reason for rule in found)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
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
    ((rule,), _) = profile_optimizers(_pieces(make), parameters)
    assert (rule.update_scope != "element", rule.untested_reason) == (whole, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "plan", "words"),
    [
        (own.Lamb, "dp=2 zero=1", "LAMB reads full parameters (norms, factors), and zero=1 shards them"),
        (own.Lamb, "dp=2 tp=2 zero=3", "zero=3 shards and tp=2 cuts them: every step gathers gradients and values on the ranks that own"),
        (own.Lamb, "dp=2", None),
        (own.Lamb, "pp=2", None),
        (own.DAdapt, "pp=2", "reads across parameters, and pp=2 spreads them: every step gathers gradients and values on one rank"),
        (own.DAdapt, "dp=2", None),
        (own.Sgld, "dp=2 zero=2", "draws random numbers"),
        (own.Sgld, "dp=2", None),
        (own.Plain, "dp=2 tp=2 pp=2 zero=2", None),
        (lambda p: Stubborn([v for _, v in p], lr=1e-3), "tp=2", r"could not be tested on small parameters (KeyError: 'who is this?')"),
        (own.by_value, "tp=2", "could not be tested on small parameters (RuntimeError"),
    ],
)  # fmt: skip
def test_check_names_what_is_gathered_and_refuses_nothing(make: Any, plan: str, words: str | None) -> None:
    found, _ = profile_optimizers(_pieces(make), dict(_model().named_parameters()))
    problems = list(check_optimizers(from_text(plan), found))
    assert all(each.severity == "warning" for each in problems)
    assert len(problems) == (words is not None)
    assert all((words or "").replace("LAMB", "") in str(each) for each in problems)


def test_a_function_that_looks_at_values_is_profiled() -> None:
    found = profile(_pieces(own.by_value))
    ((rule,), notes) = found.optimizers, found.notes
    assert (rule.update_scope, rule.state_bytes) == ("model", 2 * found.gradient_bytes)
    assert any("meta device" in note for note in notes)
