"""What is held still in both runs, and what the survey sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.trials.determinism import OPTIMIZER_STEP_MODE, DeterministicMode, disable_randomness
from echelon.verifier.nondeterminism_scan import NondeterminismScan

X = torch.ones(3, 4, 4)


def step(model: nn.Module, still: DeterministicMode) -> NondeterminismScan:
    model = model.double().train()
    survey = NondeterminismScan(model)
    with still(), survey:
        model(X.double()).sum().backward()
    return survey


class Call(nn.Module):
    """A model that is one function of its input, behind a weight."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


@pytest.mark.parametrize(
    "function",
    [
        F.dropout, F.dropout1d, partial(F.alpha_dropout, training=True), partial(F.feature_alpha_dropout, training=True), lambda x: torch.dropout(x, 0.5, True),
        lambda x: torch.dropout_(x.clone(), 0.5, True),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5),
        lambda x: x * torch.rand(3, 4, 4), lambda x: x + torch.randn_like(x), lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: x * torch.empty_like(x).bernoulli_(0.9), lambda x: x * torch.rand(3, 4, 4, out=torch.empty(0)),
        lambda x: x * torch.randint(0, 9, (3, 1, 1)), lambda x: x[torch.randperm(3)], lambda x: torch.normal(x, 1.0),
        lambda x: x + torch.empty_like(x).normal_(), lambda x: x * torch.empty_like(x).uniform_(0.5, 1.5),
        lambda x: x * torch.poisson(x.detach().abs()), lambda x: x[:, torch.multinomial(torch.ones(4), 2)], F.gumbel_softmax,
        partial(F.gumbel_softmax, hard=True), lambda x: x + torch.distributions.Normal(x, 1.0).rsample(),
        lambda x: x + torch.empty_like(x).exponential_(),
    ],
)  # fmt: skip
def test_functions_that_draw_are_seen_and_held(function: Any) -> None:
    model = Call(function)
    assert step(model, DeterministicMode()).random_modules
    assert step(model, DeterministicMode(fix_random=True)).random_modules == {}, "the generator is left alone"
    with DeterministicMode(fix_random=True)():
        torch.manual_seed(1)
        one = model(X.double())
        torch.manual_seed(2)
        assert torch.equal(model(X.double()), one)


def test_what_cannot_be_held_is_still_seen() -> None:
    survey = step(Call(lambda x: x * torch.empty_like(x).geometric_(0.5)), DeterministicMode(fix_random=True))
    assert survey.random_modules == {"the model itself": "aten.geometric_.default"}


@pytest.mark.parametrize(
    ("function", "middle"),
    [
        (lambda: torch.randint(9, (2,)), torch.tensor([4, 4])),
        (lambda: torch.randint(2, 9, (2,), dtype=torch.int32), torch.tensor([5, 5], dtype=torch.int32)),
        (lambda: torch.randint(2, high=9, size=(2,)), torch.tensor([5, 5])),
        (lambda: torch.randint(high=1, size=(2,)), torch.tensor([0, 0])),
        (lambda: torch.randint_like(torch.ones(2), 9), torch.tensor([4.0, 4.0])),
        (lambda: torch.randint_like(torch.ones(2), low=2, high=9), torch.tensor([5.0, 5.0])),
        (lambda: torch.randperm(3), torch.tensor([0, 1, 2])),
        (lambda: torch.normal(torch.ones(2), torch.ones(2)), torch.ones(2)),
        (lambda: torch.normal(1.0, torch.ones(2).double()), torch.ones(2).double()),
        (lambda: torch.normal(1.0, 2.0, (2,), generator=torch.Generator()), torch.ones(2)),
        (lambda: torch.empty(2).uniform_(1, to=3), torch.full((2,), 2.0)),
        (lambda: torch.empty(2).exponential_(2.0), torch.full((2,), 0.5).log().neg() / 2),
        (lambda: torch.multinomial(torch.tensor([0.1, 0.7, 0.2]), 2), torch.tensor([1, 2])),
        (lambda: torch.multinomial(torch.tensor([[0.1, 0.7, 0.2]]), 2, replacement=True), torch.tensor([[1, 1]])),
        (lambda: torch.poisson(torch.tensor([1.5])), torch.tensor([1.5])),
        (lambda: torch.rand(2, requires_grad=True).detach(), torch.full((2,), 0.5)),
    ],
)
def test_the_middle_of_each_distribution(function: Any, middle: Tensor) -> None:
    state = torch.get_rng_state()
    with DeterministicMode(fix_random=True)():
        made = function()
    torch.testing.assert_close(made, middle)
    assert torch.equal(torch.get_rng_state(), state)
    drawn = function()
    assert (drawn.shape, drawn.dtype) == (made.shape, made.dtype)


def test_a_model_that_draws_nothing_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True))
    model[1].register_forward_hook(lambda module, args, output: output[0])
    survey = step(model, DeterministicMode())
    assert (survey.random_modules, survey.low_precision_modules) == ({}, {})


def test_silence_reaches_every_module_of_torch_that_drops() -> None:
    model = nn.Sequential(
        nn.Dropout(0.5), nn.Dropout2d(0.1), nn.AlphaDropout(0.1), nn.Dropout(0.0),
        nn.LSTM(4, 4, num_layers=2, dropout=0.5), nn.TransformerEncoderLayer(4, 2, 8),
    )  # fmt: skip
    assert disable_randomness(model) == ["0", "1", "2", "4", "5.self_attn", "5.dropout", "5.dropout1", "5.dropout2"]
    assert disable_randomness(model) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.float().double(), lambda x: x.to(torch.float32).square(), lambda x: x.half().exp(),
        lambda x: x.type(torch.bfloat16), lambda x: F.softmax(x, dim=-1, dtype=torch.float32), lambda x: x * torch.arange(4).float().exp(),
        lambda x: x * torch.linspace(0, 1, 4).sqrt(), lambda x: x.to(dtype=torch.float32),
    ],
)  # fmt: skip
def test_casts_are_seen_and_lifted(function: Any) -> None:
    model = Call(function)
    assert step(model, DeterministicMode()).low_precision_modules
    assert step(model, DeterministicMode(widen_casts=True)).low_precision_modules == {}


def test_an_island_that_no_cast_made_is_seen() -> None:
    table = torch.ones(4, dtype=torch.float32)
    survey = step(Call(lambda x: x.to(table).double()), DeterministicMode(widen_casts=True))
    assert survey.low_precision_modules["the model itself"] == "aten._to_copy.default"


def test_slices_of_a_float32_table_are_no_island() -> None:
    table = torch.from_numpy(np.ones((8, 4), dtype=np.float32))
    assert step(Call(lambda x: x * table[:4]), DeterministicMode()).low_precision_modules == {}


def test_everything_is_put_back() -> None:
    @contextlib.contextmanager
    def unchanged() -> Iterator[None]:
        before = torch.get_default_dtype()
        yield
        assert torch.get_default_dtype() is before
        assert torch.ones(2).float().dtype is torch.float32

    with unchanged(), DeterministicMode(fix_random=True, widen_casts=True)():
        assert torch.zeros(2).float().dtype is torch.float64
    with unchanged(), pytest.raises(ValueError, match="on the way"), DeterministicMode(widen_casts=True)():
        raise ValueError("on the way")
    model = Call(torch.sin)
    step(model, DeterministicMode())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_step_counts_of_fused_optimizers_stay_as_the_kernels_read_them() -> None:
    with OPTIMIZER_STEP_MODE():
        assert torch.zeros((), dtype=torch.float32).dtype == torch.float32
        assert torch.zeros((1,), dtype=torch.float32).dtype == torch.float64
