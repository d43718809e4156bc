"""Into the region where the ranks of the tensor axis compute parts of the same thing, and out of it.

    copied     into it: the same on every rank              backward: the ranks' gradients add up
    sliced     into it: each rank takes its part            backward: the parts side by side
    summed     out of it: the ranks' shares add up          backward: the same on every rank
    gathered   out of it: the ranks' parts side by side     backward: each rank takes its part

Each one's backward is another one, so that what differentiates twice (forces from an energy) is right as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.engine.ranks import Group

#: torch renames it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Axis:
    """The tensor group as this rank sees it."""

    def __init__(self, ranks: Group) -> None:
        self.group = ranks.group
        self.rank, self.size = ranks.rank, ranks.size
        self._copied: tuple[Any, tuple[int, bool], Tensor] | None = None

    def copied(self, x: Tensor) -> Tensor:
        """`x` into the region. Modules that read the same `x` share one sum in backward."""
        state = x._version, torch.is_grad_enabled()
        if self._copied is not None and self._copied[0]() is x and self._copied[1] == state:
            return self._copied[2]
        copy: Tensor = _Copy.apply(x, self)
        self._copied = ref(x), state, copy
        return copy

    def summed(self, x: Tensor) -> Tensor:
        """The ranks' shares of a value added up. `x` may be overwritten: give what nobody else holds."""
        return _Sum.apply(x, self)

    def gathered(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The ranks' parts, `sizes` long, side by side."""
        return _Gather.apply(x, dim, sizes, self)

    def sliced(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This rank's part of what all ranks have."""
        return _Slice.apply(x, dim, sizes, self)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Sum.apply(grads[0].clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        total = x.contiguous()
        if total is x:
            ctx.mark_dirty(x)
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Copy.apply(grads[0], ctx.axis), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> Tensor:
        ctx.given = dim, sizes, axis
        first = x.movedim(dim, 0)
        step = max(sizes)
        if first.shape[0] < step:
            first = torch.cat([first, first.new_zeros(step - first.shape[0], *first.shape[1:])])
        first = first.contiguous()
        whole = first.new_empty(step * axis.size, *first.shape[1:])
        _all_gather(whole, first, group=axis.group)
        # Not a view: models change what a layer gave them in place.
        return torch.cat(
            [part[:size].movedim(0, dim) for part, size in zip(whole.split(step), sizes, strict=True)], dim
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Slice.apply(grads[0], *ctx.given), None, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> Tensor:
        ctx.given = dim, sizes, axis
        return x.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Gather.apply(grads[0], *ctx.given), None, None, None
