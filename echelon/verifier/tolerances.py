"""Decide what rounding alone may do, so that only real differences count.

Parameters: Adam divides a gradient by its own size, so where the true gradient is zero (the bias of attention's keys) it turns rounding
noise into full steps. Gradients decide first. With relative error e of its gradient, a parameter's element is then granted 4e (at most 2)
times the largest move that the reference made of any parameter with the same settings (learning rate, decay).

Rounding larger than float64's (parts in float32, batch norm over two samples): the reference runs again from parameters that are off by one
rounding; samples keep their order, so that samples which see each other cannot pass for noise. Each tensor is granted 16 times the
difference between the two, for float32 at least 8 of its roundings, and never more than 1e-4, or than the floor of the comparison where the
tensor is that small. A difference above 1e-4 is a choice that fell the other way (a tie, a random number): it grants nothing.

The plan's own precision: losing half of a format's digits is common and decides nothing. One common factor of all gradients is different:
rounding scatters, and such a factor is a loss scale that was not removed, or removed twice. Only the first step counts: there both runs
still have the same parameters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from statistics import median

import torch
from torch import Tensor

from echelon.verifier.compare import (
    FLOAT64_BOUND,
    Bounds,
    Difference,
    compare_tensors,
    has_fractions,
    max_abs,
    to_float64,
)
from echelon.verifier.compare_outputs import compare_outputs
from echelon.verifier.reference import Reference, StepRecord

#: No bound is wider: semantic mistakes begin at about 1e-3.
MAX_BOUND = 1e-4
#: Least bound where something is computed in float32.
FLOAT32_BOUND = 8 * float(torch.finfo(torch.float32).eps)
#: How far a perturbed reference's parameters are off: 16 times the second is what float32 is granted in any case.
FLOAT64_PERTURBATION, FLOAT32_PERTURBATION = float(torch.finfo(torch.float64).eps), FLOAT32_BOUND / 16
#: Half of a format's digits: the drift beyond which a reader should look twice.
DRIFT_BOUNDS = {"fp32": 2.0**-11.5, "tf32": 2.0**-5, "bf16": 2.0**-3.5, "fp16": 2.0**-5}
#: How far from one a common factor has to be: more than four times the widest drift bound.
MIN_FACTOR_DEVIATION = 0.4
#: Gradients below this part of the largest are mostly rounding in half precision.
_SMALL_GRADIENT = 1e-3
#: How near a tensor has to be to that multiple, the share of tensors that must be, and the fewest elements that mean anything.
_FACTOR_TOLERANCE, _MIN_SHARE, _MIN_ELEMENTS = 0.25, 0.9, 8


class ParameterTolerance:
    """How far each element of a parameter may be off because its gradient is noise."""

    def __init__(self, start_values: Mapping[str, Tensor]) -> None:
        """`start_values`: where the parameters began, `copy_to_float64`."""
        self._start_values = start_values
        self._gradient_errors: dict[str, Tensor] = {}

    def add_gradients(self, actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
        for name, reference in expected.items():
            gradient = actual.get(name)
            if reference is None or gradient is None or gradient.shape != reference.shape:
                continue
            b, a = to_float64(reference, reference.device), to_float64(gradient, reference.device)
            error = ((a - b).abs() / b.abs()).nan_to_num(0.0, posinf=2.0).mul_(4.0).clamp_(max=2.0)
            if name in self._gradient_errors:
                error = torch.maximum(error, self._gradient_errors[name])
            if error.any():
                self._gradient_errors[name] = error

    def compute_tolerances(self, parameters: Mapping[str, Tensor], groups: Mapping[str, str]) -> dict[str, Tensor]:
        """The tolerance of each parameter, by the largest move in its group to where the reference stands now."""
        largest_moves: defaultdict[str, float] = defaultdict(float)
        for name, value in parameters.items():
            if name in self._start_values and value.numel():  # else made in forward
                start_value, group = self._start_values[name].to(value.device), groups.get(name, "")
                move = float((to_float64(value, value.device) - start_value).abs().max())
                largest_moves[group] = max(move, largest_moves[group])
        return {name: error * largest_moves[groups.get(name, "")] for name, error in self._gradient_errors.items()}


def copy_to_float64(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, in float64 but for integers."""
    integers = {k: value.detach().to("cpu", copy=True) for k, value in values.items() if not has_fractions(value)}
    return {k: integers[k] if k in integers else to_float64(value).clone() for k, value in values.items()}


def zero_gradients(gradients: Mapping[str, Tensor | None]) -> list[str]:
    """The parameters whose true gradient is zero: in float64 it is nothing but rounding, yet not exactly zero."""
    sizes = {name: max_abs(value) for name, value in gradients.items() if value is not None}
    largest = max(sizes.values(), default=0.0)
    return [name for name, size in sizes.items() if 0.0 < size <= FLOAT64_BOUND * largest]


def widen_bounds(
    reference: Reference, perturbed: Reference, steps: Iterable[int], *, default: float = FLOAT64_BOUND
) -> Bounds:
    """Bounds from the reference against its perturbed copy, none below `default`."""
    bounds: dict[tuple[str, str], float] = {}
    parameter_tolerance = ParameterTolerance(copy_to_float64(dict(reference.model.named_parameters())))
    for step in steps:
        for difference in compare_records(perturbed.step(step), reference.step(step), parameter_tolerance):
            if difference.value > MAX_BOUND and not difference.below_floor:
                continue
            key = difference.kind, difference.name
            bound = min(16 * difference.value, 1.0 if difference.below_floor else MAX_BOUND)
            if bound > max(default, bounds.get(key, 0.0)):
                bounds[key] = bound
    return Bounds(default=default, by_tensor=bounds)


def compare_records(actual: StepRecord, expected: StepRecord, tolerance: ParameterTolerance) -> list[Difference]:
    tolerance.add_gradients(actual.gradients, expected.gradients)
    compare = partial(compare_tensors, step=expected.step)
    differences = compare("gradient", actual.gradients, expected.gradients)
    differences += compare("loss", {"loss": actual.loss}, {"loss": expected.loss})
    if actual.norm is not None:
        differences += compare("norm", {"gradient norm": actual.norm}, {"gradient norm": expected.norm})
    differences += compare("buffer", actual.buffers, expected.buffers)
    granted = tolerance.compute_tolerances(expected.parameters, expected.groups)
    differences += compare("parameter", actual.parameters, expected.parameters, tolerances=granted)
    # A server does not return the optimizer state of the tables that it trains.
    optimizer = {k: value for k, value in expected.optimizer.items() if k.split("/")[1] not in actual.server_trained}
    differences += compare("optimizer", actual.optimizer, optimizer)
    return differences + compare_outputs(actual.outputs, expected.outputs, expected.step)


def common_gradient_factor(actual: StepRecord, expected: StepRecord) -> float | None:
    """The factor that all gradients of a step have in common; None: there is none, or it is near one."""
    gradients = [(actual.gradients.get(name), b) for name, b in expected.gradients.items()]
    present = [(a, b) for a, b in gradients if a is not None and b is not None and a.shape == b.shape]
    pairs = [(_flatten(a), _flatten(b)) for a, b in present]
    largest = max((float(b.norm()) for _, b in pairs), default=0.0)
    pairs = [(a, b) for a, b in pairs if float(b.norm()) > _SMALL_GRADIENT * largest]
    if sum(b.numel() for _, b in pairs) < _MIN_ELEMENTS:
        return None
    factor = median(float(a @ b) / float(b @ b) for a, b in pairs)
    if not math.isfinite(factor) or abs(factor - 1) <= MIN_FACTOR_DEVIATION:
        return None
    tolerance = _FACTOR_TOLERANCE * abs(factor)
    matching = [float((a - factor * b).norm()) <= tolerance * float(b.norm()) for a, b in pairs]
    return factor if sum(matching) >= _MIN_SHARE * len(matching) else None


def _flatten(tensor: Tensor) -> Tensor:
    value = to_float64(tensor)
    return (torch.view_as_real(value) if value.is_complex() else value).flatten()
