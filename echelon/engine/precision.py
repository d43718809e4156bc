"""Precision of the computation: autocast for half precision, the loss scale of fp16, torch's switches for fp32.

Parameters, gradients and optimizer state stay fp32.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Overflows in a row at the least scale after which an fp16 run counts as diverged: from there no scale can help.
_MAX_OVERFLOWS = 5


def set_fp32_precision(precision: str) -> Callable[[], None]:
    """Set torch's process-wide switches for fp32 products and convolutions; returns what restores them. Half precision leaves them alone."""
    if precision not in ("fp32", "tf32"):
        return lambda: None
    matmul_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    cudnn_tf32 = _swap_cudnn_tf32(precision == "tf32")

    def restore() -> None:
        torch.set_float32_matmul_precision(matmul_precision)
        if cudnn_tf32 is not None:
            _swap_cudnn_tf32(cudnn_tf32)

    return restore


def _swap_cudnn_tf32(allow: bool) -> bool | None:
    """Set whether cuDNN may use tf32, by the older switch; returns the previous value. None: the user chose by operator with the newer
    switches, and torch refuses to read the older one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older switch warns about the newer ones
        try:
            before = torch.backends.cudnn.allow_tf32
        except RuntimeError:
            return None
        torch.backends.cudnn.allow_tf32 = allow
    return before


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context in which forward and loss run."""
    if precision not in _AUTOCAST_DTYPES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_AUTOCAST_DTYPES[precision])


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scale for fp16. Not torch.amp.GradScaler, whose overflow check looks at this rank's shard alone."""

    scale: float = 2.0**16
    good_steps: int = 0
    growth_interval: int = 2000
    overflow_streak: int = 0  #: consecutive overflows at the least scale

    @property
    def has_diverged(self) -> bool:
        """Whether gradients overflow step after step although they are not scaled."""
        return self.overflow_streak >= _MAX_OVERFLOWS

    def update(self, *, overflowed: bool) -> None:
        """After each step."""
        self.overflow_streak = self.overflow_streak + 1 if overflowed and self.scale == 1.0 else 0
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = min(self.scale * 2, 2.0**24), 0
