"""What a step came to, and how the host hears of it without holding an accelerator up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Step:
    """What one optimizer step came to, the same on every rank."""

    __slots__ = ("_news", "_numbers", "_rates", "loss", "norm", "samples", "skipped")

    def __init__(
        self, loss: Tensor, norm: Tensor | None, asked: Tensor, samples: int, skipped: bool,
        rates: Sequence[float | Tensor] = (), news: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.loss = loss  #: of the whole global batch
        self.norm = norm  #: gradient norm before clipping, where it was needed
        self.samples = samples
        self.skipped = skipped  #: fp16 overflow: no update was made
        self._rates, self._news = rates, news is not None
        self._numbers = Later([value for value in (loss, asked, norm, news) if value is not None])

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates that the step used, of each optimizer's each group."""
        return tuple(map(float, self._rates))

    def read(self) -> tuple[float, bool, float | None]:
        """The loss, whether any rank was asked to stop, and the norm, as plain numbers."""
        loss, asked, *norm = self._numbers.read()
        return loss, asked > 0, norm[0] if self.norm is not None else None

    def news(self) -> bool:
        """Whether any rank saw a buffer change that it had not seen change before (of an accelerator only)."""
        return self._news and self._numbers.read()[-1] > 0


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
