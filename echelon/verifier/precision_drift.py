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

from echelon.verifier.compare import wide
from echelon.verifier.reference import Record

#: Half of a format's digits: the drift beyond which a reader should look twice.
ALLOWED = {"fp32": 2.0**-11.5, "tf32": 2.0**-5, "bf16": 2.0**-3.5, "fp16": 2.0**-5}
#: How far from one a common factor has to be: more than four times the widest of those.
GROSS = 0.4
#: Gradients below this part of the largest are rounding for the most part in half precision.
_SMALL = 1e-3
#: How near a tensor has to be to that multiple, the share of tensors that must be, and the fewest numbers that mean anything.
_NEAR, _MOST, _FEWEST = 0.25, 0.9, 8


def factor(mine: Record, true: Record) -> float | None:
    """The number that the gradients of a step are multiplied by; None where there is no such number, or where it is near one."""
    pairs = [
        (_flat(plan), _flat(expected))
        for name, expected in true.gradients.items()
        if expected is not None and (plan := mine.gradients.get(name)) is not None and plan.shape == expected.shape
    ]
    largest = max((float(b.norm()) for _, b in pairs), default=0.0)
    pairs = [(a, b) for a, b in pairs if float(b.norm()) > _SMALL * largest]
    if sum(b.numel() for _, b in pairs) < _FEWEST:
        return None
    found = median(float(a @ b) / float(b @ b) for a, b in pairs)
    if not math.isfinite(found) or abs(found - 1) <= GROSS:
        return None
    near = [float((a - found * b).norm()) <= _NEAR * abs(found) * float(b.norm()) for a, b in pairs]
    return found if sum(near) >= _MOST * len(near) else None


def _flat(tensor: Tensor) -> Tensor:
    value = wide(tensor)
    return (torch.view_as_real(value) if value.is_complex() else value).flatten()
