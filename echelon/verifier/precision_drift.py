"""The plan in its own precision against the truth: how far rounding may take it, and what no rounding does.

Half of a format's digits is a matter of taste, and a model that cancels or cuts off loses more: that is told and decides nothing. All
gradients times one number is another thing: rounding scatters, and a factor that only a training's own precision has is a loss scale that
was not taken out, or was taken out twice. The first step is asked alone: both runs still have the same parameters.
"""

from __future__ import annotations

import math
from statistics import median

import torch
from torch import Tensor

from echelon.verifier.compare import to_float64
from echelon.verifier.reference import StepRecord

#: Half of a format's digits: the drift beyond which a reader should look twice.
DRIFT_BOUNDS = {"fp32": 2.0**-11.5, "tf32": 2.0**-5, "bf16": 2.0**-3.5, "fp16": 2.0**-5}
#: How far from one a common factor has to be: more than four times the widest of those.
MIN_FACTOR_DEVIATION = 0.4
#: Gradients below this part of the largest are rounding for the most part in half precision.
_SMALL_GRADIENT = 1e-3
#: How near a tensor has to be to that multiple, the share of tensors that must be, and the fewest numbers that mean anything.
_FACTOR_TOLERANCE, _MIN_SHARE, _MIN_ELEMENTS = 0.25, 0.9, 8


def common_gradient_factor(actual: StepRecord, expected: StepRecord) -> float | None:
    """The number that the gradients of a step are multiplied by; None where there is no such number, or where it is near one."""
    pairs = [
        (_flatten(actual_gradient), _flatten(expected_gradient))
        for name, expected_gradient in expected.gradients.items()
        if expected_gradient is not None
        and (actual_gradient := actual.gradients.get(name)) is not None
        and actual_gradient.shape == expected_gradient.shape
    ]
    largest = max((float(b.norm()) for _, b in pairs), default=0.0)
    pairs = [(a, b) for a, b in pairs if float(b.norm()) > _SMALL_GRADIENT * largest]
    if sum(b.numel() for _, b in pairs) < _MIN_ELEMENTS:
        return None
    common_factor = median(float(a @ b) / float(b @ b) for a, b in pairs)
    if not math.isfinite(common_factor) or abs(common_factor - 1) <= MIN_FACTOR_DEVIATION:
        return None
    is_near = [
        float((a - common_factor * b).norm()) <= _FACTOR_TOLERANCE * abs(common_factor) * float(b.norm())
        for a, b in pairs
    ]
    return common_factor if sum(is_near) >= _MIN_SHARE * len(is_near) else None


def _flatten(tensor: Tensor) -> Tensor:
    value = to_float64(tensor)
    return (torch.view_as_real(value) if value.is_complex() else value).flatten()
