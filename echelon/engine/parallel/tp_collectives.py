"""Into the region where the ranks of the tensor axis compute parts of the same thing, and out of it.

    copied     into it: the same on every rank              backward: the ranks' gradients add up
    sliced     into it: each rank takes its part            backward: the parts side by side
    summed     out of it: the ranks' shares add up          backward: the same on every rank
    gathered   out of it: the ranks' parts side by side     backward: each rank takes its part
    collected  within it: the ranks' parts side by side     backward: the ranks' gradients add up, each takes its part
    scattered  within it: the ranks' shares add up, each takes its part     backward: the parts side by side

Each one's backward is another one, so that what differentiates twice (forces from an energy) is right as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.engine.parallel.tp_rng import Draws
from echelon.engine.process_groups import Group

#: torch renames them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Axis:
    """The tensor group as this rank sees it."""

    def __init__(self, ranks: Group | Axis) -> None:
        self.group: dist.ProcessGroup | None = ranks.group
        self.rank: int = ranks.rank
        self.size: int = ranks.size
        self.draws: Draws = ranks.draws if isinstance(ranks, Axis) else Draws(ranks.rank)
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

    def joined(self, x: Tensor, dim: int | None = None) -> Tensor:
        """What a row gives: the ranks' shares added up. Where ranks have parts of a sequence (along `dim`) they take those of it."""
        return self.summed(x)

    def gathered(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The ranks' parts, `sizes` long, side by side."""
        return _Gather.apply(x, dim, sizes, self)

    def sliced(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This rank's part of what all ranks have."""
        return _Slice.apply(x, dim, sizes, self)

    def collected(self, x: Tensor, dim: int, sizes: Sequence[int], whole: Tensor | None = None) -> Tensor:
        """The ranks' parts side by side, for each rank to go its own way with. `whole`: where they were put together already."""
        return _Collect.apply(x, dim, sizes, self, whole)

    def scattered(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This rank's part of the ranks' shares added up."""
        return _Scatter.apply(x, dim, sizes, self)


class _Carried(torch.autograd.Function):
    """Keeps what it was given beside `x` for backward. `setup_context` apart from `forward`, as torch.func needs it."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.given = inputs[1:]


class _Copy(_Carried):
    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (axis,) = ctx.given
        axis._copied = None  # the last one of forward would else be kept until the next step
        return _Sum.apply(grads[0].clone(memory_format=torch.contiguous_format), axis), None


class _Sum(_Carried):
    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        total = x.clone() if torch._C._are_functorch_transforms_active() else x.contiguous()
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.given = inputs[1:]
        if output is inputs[0]:
            ctx.mark_dirty(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Copy.apply(grads[0], *ctx.given), None


class _Gather(_Carried):
    @staticmethod
    def forward(x: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> Tensor:
        return _side_by_side(x, dim, sizes, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Slice.apply(grads[0], *ctx.given), None, None, None


class _Slice(_Carried):
    @staticmethod
    def forward(x: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> Tensor:
        return x.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Gather.apply(grads[0], *ctx.given), None, None, None


class _Collect(_Carried):
    @staticmethod
    def forward(x: Tensor, dim: int, sizes: Sequence[int], axis: Axis, whole: Tensor | None) -> Tensor:
        return _side_by_side(x, dim, sizes, axis) if whole is None else whole.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.given = inputs[1:4]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Scatter.apply(grads[0], *ctx.given), None, None, None, None


class _Scatter(_Carried):
    @staticmethod
    def forward(x: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> Tensor:
        step = max(sizes)
        parts = [_filled(part, step) for part in x.movedim(dim, 0).split(list(sizes))]
        mine = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        _reduce_scatter(mine, torch.cat(parts), group=axis.group)
        return mine[: sizes[axis.rank]].movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Collect.apply(grads[0], *ctx.given, None), None, None, None


def _side_by_side(x: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> Tensor:
    step = max(sizes)
    first = _filled(x.movedim(dim, 0), step).contiguous()
    whole = first.new_empty(step * axis.size, *first.shape[1:])
    _all_gather(whole, first, group=axis.group)
    # Not a view: models change what a layer gave them in place.
    return torch.cat([part[:size].movedim(0, dim) for part, size in zip(whole.split(step), sizes, strict=True)], dim)


def _filled(x: Tensor, length: int) -> Tensor:
    """Messages are of one length."""
    return x if x.shape[0] == length else torch.cat([x, x.new_zeros(length - x.shape[0], *x.shape[1:])])
