"""What a step came to, and how the host hears of it without holding an accelerator up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Step:
    """What one optimizer step came to, the same on every rank."""

    __slots__ = ("_has_resync_flag", "_learning_rates", "_scalars", "gradient_norm", "loss", "sample_count", "skipped")

    def __init__(
        self, loss: Tensor, gradient_norm: Tensor | None, stop_flag: Tensor, sample_count: int, skipped: bool,
        learning_rates: Sequence[float | Tensor] = (), resync_flag: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.loss = loss  #: of the whole global batch
        self.gradient_norm = gradient_norm  #: gradient norm before clipping, where it was needed
        self.sample_count = sample_count
        self.skipped = skipped  #: fp16 overflow: no update was made
        self._learning_rates, self._has_resync_flag = learning_rates, resync_flag is not None
        self._scalars = AsyncScalars(
            [value for value in (loss, stop_flag, gradient_norm, resync_flag) if value is not None]
        )

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates that the step used, of each optimizer's each group."""
        return tuple(map(float, self._learning_rates))

    def read(self) -> tuple[float, bool, float | None]:
        """The loss, whether any rank was asked to stop, and the norm, as plain numbers."""
        loss, stop_flag, *gradient_norm = self._scalars.read()
        return loss, stop_flag > 0, gradient_norm[0] if self.gradient_norm is not None else None

    def needs_resync(self) -> bool:
        """Whether any rank saw a buffer change that it had not seen change before (of an accelerator only)."""
        return self._has_resync_flag and self._scalars.read()[-1] > 0


class AsyncScalars:
    """Numbers of a device, for the host. An accelerator copies them when it gets there; `read` waits for that and no longer:
    `.item()` would wait for everything that was launched since."""

    __slots__ = ("_copied", "_host")

    def __init__(self, values: list[Tensor]) -> None:
        numbers = torch.stack([value.detach().double() for value in values])
        self._copied: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
