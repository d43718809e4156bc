"""The loss of a step, and how the host reads it without stalling an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class StepResult(Tensor):
    """The loss of one optimizer step over the whole global batch, with the step's other figures; equal on every rank.

    A detached scalar tensor whose copy on the host is made asynchronously: `item()`, `float()` and formatting wait for this step alone.
    """

    #: Operations return plain tensors, as those of nn.Parameter do (which uses the same private name).
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    gradient_norm: Tensor | None  #: before clipping; None: it was not needed
    sample_count: int
    skipped: bool  #: fp16 overflow: the parameters were not updated
    _scalars: AsyncScalars
    _learning_rates: Sequence[float | Tensor]
    _has_resync_flag: bool

    @staticmethod
    def __new__(
        cls, loss: Tensor, gradient_norm: Tensor | None, stop_flag: Tensor, sample_count: int, skipped: bool,
        learning_rates: Sequence[float | Tensor] = (), resync_flag: Tensor | None = None,
    ) -> StepResult:  # fmt: skip
        self = loss.detach().as_subclass(cls)
        self.gradient_norm, self.sample_count, self.skipped = gradient_norm, sample_count, skipped
        self._learning_rates, self._has_resync_flag = learning_rates, resync_flag is not None
        self._scalars = AsyncScalars([v for v in (loss, stop_flag, gradient_norm, resync_flag) if v is not None])
        return self

    @property
    def loss(self) -> Tensor:
        """The loss as a plain tensor."""
        return self.as_subclass(Tensor)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates of the step, one per parameter group of each optimizer."""
        return tuple(map(float, self._learning_rates))

    def read(self) -> tuple[float, bool, float | None]:
        """The loss, whether any rank was asked to stop, and the gradient norm, as plain numbers."""
        loss, stop_flag, *gradient_norm = self._scalars.read()
        return loss, stop_flag > 0, gradient_norm[0] if self.gradient_norm is not None else None

    def needs_resync(self) -> bool:
        """Whether a rank saw a buffer change for the first time (on an accelerator only)."""
        return self._has_resync_flag and self._scalars.read()[-1] > 0

    def item(self) -> float:
        """The loss as a number."""
        return self._scalars.read()[0]

    def __float__(self) -> float:
        return self.item()

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec)

    def __str__(self) -> str:
        return str(self.item())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        loss, _, norm = self.read()
        norm_text = "" if norm is None else f", gradient_norm={norm:.6g}"
        return f"StepResult(loss={loss:.6g}{norm_text}, sample_count={self.sample_count}, skipped={self.skipped})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.loss.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.loss.__reduce_ex__(protocol)  # a plain tensor for other processes and files


class AsyncScalars:
    """Scalars of a device, copied to the host asynchronously. `read` waits for that copy alone, not for everything launched since."""

    __slots__ = ("_copied", "_host")

    def __init__(self, values: list[Tensor]) -> None:
        self._host = numbers = torch.stack([value.detach().double() for value in values])
        self._copied: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
