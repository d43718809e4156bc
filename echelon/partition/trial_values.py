"""Parameter values at which a cut is tried: what holds for the initial ones alone may be an accident.

A gate that starts at zero, a branch whose last layer does, a clamp that is not reached yet: at initial values such code computes nothing
that a cut could change. So a cut is tried at values that differ in every number, at larger and smaller ones, and after training steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from echelon.tree import tensors

#: Noise, relative to a parameter's own size, and its size where the parameter is zero.
_NOISE, _LEAST = 0.5, 0.1
_FACTORS = {"shaken": 1.0, "larger": 8.0, "smaller": 1 / 32}
#: Training steps, and how far each moves a parameter relative to its size.
_STEPS, _MOVE = 2, 0.2

#: In the order in which they are tried.
VALUES = (*_FACTORS, "trained", "initial")


@contextmanager
def parameters_at(model: nn.Module, name: str, step: Callable[[], Any]) -> Iterator[None]:
    """Inside, the model's parameters have the values of this name (one of VALUES); `step()` gives the loss."""
    held = [value for value in model.parameters() if value.is_floating_point() or value.is_complex()]
    if name == "initial":
        yield
        return
    kept = [value.detach().clone() for value in held]
    try:
        if name == "trained":
            _train(held, step)
        else:
            _shake(held, _FACTORS[name])
        yield
    finally:
        with torch.no_grad():
            for value, before in zip(held, kept, strict=True):
                value.copy_(before)


@torch.no_grad()
def _shake(held: Sequence[Tensor], factor: float) -> None:
    numbers = torch.Generator().manual_seed(1)
    for value in held:
        if not value.numel():
            continue
        noise = torch.randn(value.shape, generator=numbers, dtype=value.dtype)
        value.add_(noise.to(value.device), alpha=_NOISE * _size(value)).mul_(factor)


def _train(held: Sequence[Tensor], step: Callable[[], Any]) -> None:
    """Steps of gradient descent that are large for every parameter, however small its gradient is."""
    trained = [value for value in held if value.requires_grad and value.numel()]
    for _ in range(_STEPS):
        with torch.enable_grad():
            total = tensors(step())[0].sum()
            slopes = torch.autograd.grad(total, trained, allow_unused=True)
        with torch.no_grad():
            for value, slope in zip(trained, slopes, strict=True):
                if slope is not None and slope.any():
                    value.sub_(slope, alpha=_MOVE * _size(value) / _size(slope, least=0.0))


def _size(value: Tensor, least: float = _LEAST) -> float:
    """The root mean square of a tensor; `least` where all of it is zero."""
    return float(value.abs().double().square().mean().sqrt()) or least


def at_each(model: nn.Module, step: Callable[[], Any], names: Sequence[str] = VALUES) -> Iterator[str]:
    """The names in turn, with the model at those values. Where the model cannot be set to them they are left out."""
    for name in names:
        with suppress(_RefusedError), parameters_at(model, name, _refusing(step)):
            yield name


class _RefusedError(Exception):
    """The model does not run at the values that a training step needs."""


def _refusing(step: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        try:
            return step()
        except Exception as error:
            raise _RefusedError from error

    return run
