"""A tensor in two numbers, so that ranks can compare large ones without sending them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.verifier.compare import BROKEN


@dataclass(frozen=True, slots=True)
class Mark:
    """A tensor's shape, its 2-norm, and its product with fixed weights that no tensor is likely to be at right angles with."""

    shape: tuple[int, ...]
    norm: float
    product: float

    def apart(self, reference: Mark) -> float:
        """About |a - b| / |b|: the weights are about one, and signs fall as by chance."""
        if self.shape != reference.shape:
            return BROKEN
        if self == reference:
            return 0.0
        off = max(abs(self.product - reference.product), abs(self.norm - reference.norm))
        value = off / reference.norm if reference.norm else BROKEN
        return value if value < BROKEN else BROKEN  # NaN too


def mark(value: Tensor) -> Mark:
    """The mark of a tensor of floating numbers."""
    flat = value.detach().reshape(-1)
    flat = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double()
    flat = flat.nan_to_num(nan=3.0, posinf=5.0, neginf=-7.0)  # masks hold infinities
    weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64).square_().mul_(0.7).cos_()
    return Mark(tuple(value.shape), float(torch.linalg.vector_norm(flat)), float(flat @ weights))
