"""Compare the plan in its own precision with the reference: what rounding may do there, and what it does not.

Losing half of a format's digits is common, and a model that cancels or truncates loses more: that is reported and decides nothing. One
common factor of all gradients is different: rounding scatters, and a factor that only the training's own precision has is a loss scale
that was not removed, or removed twice. Only the first step counts: there both runs still have the same parameters.
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
#: How far from one a common factor has to be: more than four times the widest drift bound.
MIN_FACTOR_DEVIATION = 0.4
#: Gradients below this part of the largest are mostly rounding in half precision.
_SMALL_GRADIENT = 1e-3
#: How near a tensor has to be to that multiple, the share of tensors that must be, and the fewest elements that mean anything.
_FACTOR_TOLERANCE, _MIN_SHARE, _MIN_ELEMENTS = 0.25, 0.9, 8


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
