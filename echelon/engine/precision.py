"""Half precision: autocast, and a loss scale that fp16 needs. Parameters, gradients and optimizer state stay fp32."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context in which forward and loss run."""
    if precision not in _DTYPES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scale for fp16: halved when a gradient overflows on any rank, doubled after `patience` good steps.

    Not torch.amp.GradScaler, whose overflow check looks at this rank's shard alone: ranks would disagree on skipping.
    """

    scale: float = 2.0**16
    good: int = 0
    patience: int = 2000

    def update(self, *, overflow: bool) -> None:
        """After each step."""
        if overflow:
            self.scale, self.good = max(self.scale / 2, 1.0), 0
            return
        self.good += 1
        if self.good == self.patience:
            self.scale, self.good = min(self.scale * 2, 2.0**24), 0
