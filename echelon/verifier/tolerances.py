"""What rounding alone may do, so that only real differences count.

Parameters. Adam divides a gradient by its own size, so where the true gradient is zero (the bias of attention's keys) it turns rounding
noise into steps of full length. Gradients are compared first and decide. A parameter's element is then granted what its gradient's error
explains: with relative error e of the gradient, 4e (at most 2) times the largest move that the reference made of any parameter with the
same settings (learning rate, decay). Where gradients are equal, as in the rows of an embedding that no sample used, nothing is granted.

Rounding that is larger than float64's own: parts of a model that stay in float32, or sums that cancel (batch norm over two samples).
The reference is run again from parameters that are off by one rounding: every rounding after it falls differently, and nothing
else changes. The samples and their order are the same, so that samples which see each other cannot pass for noise. 16 times the
difference between the two is granted to each tensor. For float32 it is no less than 8 of its roundings. It is never more than
1e-4, or than the floor of the comparison where the tensor is that small: a gradient that is zero in truth is all noise. A
difference above 1e-4 is no rounding that grew but a choice that fell the other way (a tie, a number drawn): it grants nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from echelon.verifier.compare import FLOAT64_BOUND, Bounds, Difference, compare_tensors, max_abs, to_float64
from echelon.verifier.compare_outputs import compare_outputs
from echelon.verifier.reference import Reference, StepRecord

#: No bound is wider: semantic mistakes begin at about 1e-3.
MAX_BOUND = 1e-4
#: Least bound where something is computed in float32.
FLOAT32_BOUND = 8 * float(torch.finfo(torch.float32).eps)
#: What a twin's parameters are off by: 16 times the second is what float32 is granted in any case.
FLOAT64_PERTURBATION, FLOAT32_PERTURBATION = float(torch.finfo(torch.float64).eps), FLOAT32_BOUND / 16


class ParameterTolerance:
    """How far each element of the parameters may be off because its gradient is noise."""

    def __init__(self, start_values: Mapping[str, Tensor]) -> None:
        """`start_values`: where the parameters began, `copy_to_float64`."""
        self._start_values = start_values
        self._gradient_errors: dict[str, Tensor] = {}

    def add_gradients(self, actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
        """Take a step's gradients into account."""
        for name, expected_gradient in expected.items():
            actual_gradient = actual.get(name)
            if expected_gradient is None or actual_gradient is None or actual_gradient.shape != expected_gradient.shape:
                continue
            expected_gradient, actual_gradient = (
                to_float64(expected_gradient, expected_gradient.device),
                to_float64(actual_gradient, expected_gradient.device),
            )
            error = (
                ((actual_gradient - expected_gradient).abs() / expected_gradient.abs())
                .nan_to_num(0.0, posinf=2.0)
                .mul_(4.0)
                .clamp_(max=2.0)
            )
            if name in self._gradient_errors:
                error = torch.maximum(error, self._gradient_errors[name])
            if error.any():
                self._gradient_errors[name] = error

    def compute_tolerances(self, parameters: Mapping[str, Tensor], groups: Mapping[str, str]) -> dict[str, Tensor]:
        """The slack of each parameter, given where the reference stands now: by the largest move in its own group."""
        largest_moves: dict[str, float] = {}
        for name, value in parameters.items():
            if name not in self._start_values:  # made in forward
                continue
            start_value = self._start_values[name].to(value.device)
            move = float((to_float64(value, value.device) - start_value).abs().max()) if value.numel() else 0.0
            group = groups.get(name, "")
            largest_moves[group] = max(move, largest_moves.get(group, 0.0))
        return {
            name: error * largest_moves.get(groups.get(name, ""), 0.0) for name, error in self._gradient_errors.items()
        }


def copy_to_float64(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, safe from what becomes of them; in float64 but for whole numbers."""
    is_fractional = {name: value.is_floating_point() or value.is_complex() for name, value in values.items()}
    return {
        name: to_float64(value).clone() if is_fractional[name] else value.detach().to("cpu", copy=True)
        for name, value in values.items()
    }


def zero_gradients(gradients: Mapping[str, Tensor | None]) -> list[str]:
    """The parameters whose gradient is zero in truth: in float64 it is nothing but rounding, yet not exactly zero."""
    sizes = {name: max_abs(value) for name, value in gradients.items() if value is not None}
    largest = max(sizes.values(), default=0.0)
    return [name for name, size in sizes.items() if 0.0 < size <= FLOAT64_BOUND * largest]


def widen_bounds(
    reference: Reference, perturbed: Reference, steps: Iterable[int], *, default: float = FLOAT64_BOUND
) -> Bounds:
    """Bounds from the reference against its twin, none below `default`."""
    bounds_by_tensor: dict[tuple[str, str], float] = {}
    parameter_tolerance = ParameterTolerance(copy_to_float64(dict(reference.model.named_parameters())))
    for step in steps:
        for difference in compare_records(perturbed.step(step), reference.step(step), parameter_tolerance):
            if difference.value > MAX_BOUND and not difference.below_floor:
                continue
            bound = min(16 * difference.value, 1.0 if difference.below_floor else MAX_BOUND)
            if bound > max(default, bounds_by_tensor.get((difference.kind, difference.name), 0.0)):
                bounds_by_tensor[difference.kind, difference.name] = bound
    return Bounds(default=default, by_tensor=bounds_by_tensor)


def compare_records(
    actual: StepRecord, expected: StepRecord, parameter_tolerance: ParameterTolerance
) -> list[Difference]:
    """Every tensor that one step made, in the plan's run against the reference."""
    parameter_tolerance.add_gradients(actual.gradients, expected.gradients)
    step = expected.step
    differences = compare_tensors("gradient", actual.gradients, expected.gradients, step=step)
    differences += compare_tensors("loss", {"loss": actual.loss}, {"loss": expected.loss}, step=step)
    if actual.norm is not None:
        differences += compare_tensors(
            "norm", {"gradient norm": actual.norm}, {"gradient norm": expected.norm}, step=step
        )
    differences += compare_tensors("buffer", actual.buffers, expected.buffers, step=step)
    tolerances = parameter_tolerance.compute_tolerances(expected.parameters, expected.groups)
    differences += compare_tensors(
        "parameter", actual.parameters, expected.parameters, step=step, tolerances=tolerances
    )
    known_optimizer_state = {
        name: value for name, value in expected.optimizer.items() if name.split("/")[1] not in actual.server_trained
    }
    differences += compare_tensors("optimizer", actual.optimizer, known_optimizer_state, step=step)
    return differences + compare_outputs(actual.outputs, expected.outputs, step)
