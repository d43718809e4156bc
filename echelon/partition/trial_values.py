"""Parameter values at which a cut is tested: one that works at the initial ones only may work by accident.

A gate that starts at zero, a zero-initialized last layer, a clamp that is not reached yet: at initial values a cut may change nothing there. So cuts
are tested at random values, larger and smaller ones, and after training steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from echelon.tree import tree_tensors
from echelon.trials.trial_run import RunStep

#: Noise, relative to a parameter's RMS, and the RMS assumed for a zero parameter.
_NOISE_SCALE, _ZERO_PARAMETER_SCALE = 0.5, 0.1
_SCALE_FACTORS = {"shaken": 1.0, "larger": 8.0, "smaller": 1 / 32}
#: Training steps, and how far each moves a parameter relative to its RMS.
_TRAINING_STEPS, _STEP_SCALE = 2, 0.2
#: In the order of the tests.
PARAMETER_VALUES = (*_SCALE_FACTORS, "trained", "initial")


@contextmanager
def parameter_values(model: nn.Module, name: str, run_step: RunStep) -> Iterator[None]:
    """Inside, the model's parameters have these values (one of PARAMETER_VALUES); `run_step()` computes the loss."""
    parameters = [value for value in model.parameters() if value.is_floating_point() or value.is_complex()]
    if name == "initial":
        yield
        return
    saved_values = [value.detach().clone() for value in parameters]
    try:
        if name == "trained":
            _train(parameters, run_step)
        else:
            _perturb(parameters, _SCALE_FACTORS[name])
        yield
    finally:
        with torch.no_grad():
            for value, saved_value in zip(parameters, saved_values, strict=True):
                value.copy_(saved_value)


@torch.no_grad()
def _perturb(parameters: Sequence[Tensor], factor: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for value in parameters:
        if not value.numel():
            continue
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        value.add_(noise.to(value.device), alpha=_NOISE_SCALE * _rms(value)).mul_(factor)


def _train(parameters: Sequence[Tensor], run_step: RunStep) -> None:
    """Steps of gradient descent that are large for every parameter, however small its gradient is."""
    trained = [value for value in parameters if value.requires_grad and value.numel()]
    for _ in range(_TRAINING_STEPS):
        with torch.enable_grad():
            total = tree_tensors(run_step())[0].sum()
            gradients = torch.autograd.grad(total, trained, allow_unused=True)
        with torch.no_grad():
            for value, gradient in zip(trained, gradients, strict=True):
                if gradient is not None and gradient.any():
                    value.sub_(gradient, alpha=_STEP_SCALE * _rms(value) / _rms(gradient, default=0.0))


def _rms(value: Tensor, default: float = _ZERO_PARAMETER_SCALE) -> float:
    """The root mean square of a tensor; `default` where all of it is zero."""
    return float(value.abs().double().square().mean().sqrt()) or default


def iterate_parameter_values(
    model: nn.Module, run_step: RunStep, names: Sequence[str] = PARAMETER_VALUES
) -> Iterator[str]:
    """The names in turn, with the model at those values; skips values that the model cannot be trained to."""
    for name in names:
        with suppress(_TrainingStepError), parameter_values(model, name, _wrap_step_errors(run_step)):
            yield name


class _TrainingStepError(Exception):
    """A training step failed."""


def _wrap_step_errors(run_step: RunStep) -> Callable[[], Any]:
    def run() -> Any:
        try:
            return run_step()
        except Exception as error:
            raise _TrainingStepError from error

    return run
