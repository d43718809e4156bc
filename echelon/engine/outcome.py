"""What a step came to, and how the host hears of it without holding an accelerator up."""

from __future__ import annotations

import torch
from torch import Tensor


class Step:
    """What one optimizer step came to, the same on every rank."""

    __slots__ = ("_numbers", "loss", "norm", "rates", "samples", "skipped")

    def __init__(
        self, loss: Tensor, norm: Tensor | None, asked: Tensor, samples: int, skipped: bool, rates: tuple[float, ...]
    ) -> None:
        self.loss = loss  #: of the whole global batch
        self.norm = norm  #: gradient norm before clipping, where it was needed
        self.samples = samples
        self.rates = rates  #: learning rates that it used, group by group
        self.skipped = skipped  #: fp16 overflow: no update was made
        self._numbers = Later([loss, asked] if norm is None else [loss, asked, norm])

    def read(self) -> tuple[float, bool, float | None]:
        """The loss, whether any rank was asked to stop, and the norm, as plain numbers."""
        loss, asked, *norm = self._numbers.read()
        return loss, asked > 0, norm[0] if norm else None


class Later:
    """Numbers of a device, for the host. An accelerator copies them when it gets there; `read` waits for that and no longer:
    `.item()` would wait for everything that was launched since."""

    __slots__ = ("_done", "_host")

    def __init__(self, values: list[Tensor]) -> None:
        numbers = torch.stack([value.detach().double() for value in values])
        self._done: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> list[float]:
        if self._done is not None:
            self._done.synchronize()
        return self._host.tolist()
