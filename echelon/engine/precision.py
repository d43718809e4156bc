"""How numbers are computed: autocast for half precision, a loss scale that fp16 needs, and torch's own switches for fp32.

Parameters, gradients and optimizer state stay fp32.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Overflows in a row at the least scale after which an fp16 run counts as diverged: from there no scale can help.
_HOPELESS = 5


def switch(precision: str) -> Callable[[], None]:
    """Set torch's switches for fp32 products and convolutions, which are the process's; returns what puts them back.

    By itself torch multiplies matrices in fp32 and convolves in tf32. Half precision leaves the switches as the user has them.
    """
    if precision not in ("fp32", "tf32"):
        return lambda: None
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    convolution = _swap_cudnn_tf32(precision == "tf32")

    def restore() -> None:
        torch.set_float32_matmul_precision(matmul)
        if convolution is not None:
            _swap_cudnn_tf32(convolution)

    return restore


def _swap_cudnn_tf32(allow: bool) -> bool | None:
    """Set whether cuDNN may use tf32; returns how it was, None where it was left alone.

    By the older switch: torch refuses to read it (its own `cudnn.flags` does) once the newer ones say something else. A user
    who set the newer ones has chosen by operator, and keeps that.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older switch announces the newer ones
        try:
            before = torch.backends.cudnn.allow_tf32
        except RuntimeError:
            return None
        torch.backends.cudnn.allow_tf32 = allow
    return before


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
    stuck: int = 0  #: overflows in a row at the least scale

    @property
    def hopeless(self) -> bool:
        """Whether gradients overflow, step after step, at a scale that leaves them as they are."""
        return self.stuck >= _HOPELESS

    def update(self, *, overflow: bool) -> None:
        """After each step."""
        self.stuck = self.stuck + 1 if overflow and self.scale == 1.0 else 0
        if overflow:
            self.scale, self.good = max(self.scale / 2, 1.0), 0
            return
        self.good += 1
        if self.good == self.patience:
            self.scale, self.good = min(self.scale * 2, 2.0**24), 0
