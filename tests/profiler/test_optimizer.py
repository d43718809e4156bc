"""Which optimizers treat each number by itself is found by trying; the tensor axis refuses the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from echelon.plan.check import check
from echelon.plan.text import from_text
from echelon.profiler import profile
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


def _muon(named: Any) -> list[torch.optim.Optimizer]:
    params = [value for _, value in named]
    matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]


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
    ],
)
def test_an_optimizer_that_needs_whole_parameters_is_refused_under_tp(
    make: Callable[[Any], Any], whole: list[bool]
) -> None:
    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return output.square().mean()

    job = train(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
        data=TensorDataset(torch.randn(16, 8)),
        inputs=lambda batch: (batch, {}),
        loss=loss,
        optimizer=make,
    )
    found = profile(job)
    assert [rule.whole for rule in found.optimizers] == whole
    errors = [str(each) for each in check(from_text("tp=2"), found) if each.severity == "error"]
    assert len(errors) == any(whole)
    assert all("norms or factors of whole parameters" in each and "use dp=2 or pp" in each for each in errors)
    assert not [each for each in check(from_text("dp=2"), found) if each.severity == "error"]
