"""The tensor axis: weights cut over a group of ranks; everything computes on plain local tensors.

    column   y = x W        each rank has some of the outputs; backward adds up the gradients of x
    row      z = y V + b    each rank has some of the inputs; forward adds up z
    gather   column, and the outputs are put together again: right wherever a column stands alone

Parameters are plain tensors, this rank's pieces: optimizers run at full speed on them and fully_shard takes them as any others. Between
the cut modules the model's own code runs as it is. Where a piece lies in the whole is layout.py's to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.engine.layout import Piece, shares
from echelon.engine.ranks import Group
from echelon.plan.placement import Placement


class Axis:
    """The tensor group as this rank sees it."""

    def __init__(self, ranks: Group) -> None:
        self.group = ranks.group
        self.rank, self.size = ranks.rank, ranks.size
        self._copied: tuple[Any, Tensor] | None = None

    def copied(self, x: Tensor) -> Tensor:
        """`x` into the cut region. Modules that read the same `x` share one sum in backward."""
        if self._copied is not None and self._copied[0]() is x:
            return self._copied[1]
        copy: Tensor = _Copy.apply(x, self.group)
        self._copied = ref(x), copy
        return copy

    def forget(self) -> None:
        """Let go of the last input."""
        self._copied = None


class _Copy(torch.autograd.Function):
    """Into the region: the same `x` on every rank; each rank's gradient is a share of the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Out of the region: the ranks' shares add up; the gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.contiguous()
        if total is x:
            ctx.mark_dirty(x)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """Out of the region: the ranks' parts along `dim`, side by side; each rank keeps its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> Tensor:
        ctx.dim, ctx.start, ctx.length = dim, sum(sizes[: axis.rank]), sizes[axis.rank]
        first = x.movedim(dim, 0)
        step = max(sizes)
        if first.shape[0] < step:
            first = torch.cat([first, first.new_zeros(step - first.shape[0], *first.shape[1:])])
        first = first.contiguous()
        whole = first.new_empty(step * axis.size, *first.shape[1:])
        dist.all_gather_into_tensor(whole, first, group=axis.group)
        # Not a view: models change what a layer gave them in place.
        return torch.cat(
            [part[:size].movedim(0, dim) for part, size in zip(whole.split(step), sizes, strict=True)], dim
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].narrow(ctx.dim, ctx.start, ctx.length).contiguous(), None, None, None


def pieces(model: nn.Module, placements: Iterable[Placement], axis: Axis) -> dict[str, Piece]:
    """Parameter, by each of its names -> the part of it that this rank keeps."""
    found: dict[int, Piece] = {}
    for placement in placements:
        module = model.get_submodule(placement.path)
        for name, dim, parts in _cuts(module, placement):
            value = getattr(module, name, None)
            if value is not None:
                found[id(value)] = Piece(value.shape, dim, tuple(parts), axis.rank, axis.size)
    named = model.named_parameters(remove_duplicate=False)
    return {name: found[id(value)] for name, value in named if id(value) in found}


@torch.no_grad()
def cut(model: nn.Module, found: Mapping[str, Piece]) -> None:
    """Keep only this rank's parts of the parameters; those that are shared stay shared."""
    parts = {id(value): found[name] for name, value in model.named_parameters() if name in found}
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and id(value) in parts:
                if id(value) not in done:
                    done[id(value)] = nn.Parameter(parts[id(value)].take(value), value.requires_grad)
                module._parameters[name] = done[id(value)]


def _cuts(module: nn.Module, placement: Placement) -> Iterable[tuple[str, int, Sequence[int]]]:
    """(parameter, dim, parts) that are cut in a module."""
    flipped = type(module).__name__ == "Conv1D"  # transformers' linear layer, whose weight lies transposed
    if placement.cut == "row":
        yield "weight", 0 if flipped else 1, ()
    elif placement.cut == "vocabulary":
        yield "weight", 0, ()
    else:
        yield "weight", 1 if flipped else 0, placement.parts
        yield "bias", 0, placement.parts


def install(model: nn.Module, placements: Iterable[Placement], axis: Axis) -> None:
    """Make the modules compute with their parts. Their parameters are cut already, or will be before the first call."""
    for placement in placements:
        module = model.get_submodule(placement.path)
        for name in placement.divide:
            path, _, attribute = name.rpartition(".")
            holder = model.get_submodule(path)
            setattr(holder, attribute, getattr(holder, attribute) // axis.size)
        if placement.cut in _FORWARDS:
            module.forward = _FORWARDS[placement.cut](module, axis)


def _product(module: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
    """How a module multiplies: (x, bias) -> output, with the local weight."""
    if isinstance(module, nn.Linear):
        return lambda x, bias: F.linear(x, module.weight, bias)
    if type(module).__name__ == "Conv1D":
        return lambda x, bias: _plus(x @ module.weight, bias)
    return lambda x, bias: module._conv_forward(x, module.weight, bias)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _column(module: Any, axis: Axis) -> Callable[..., Tensor]:
    product = _product(module)
    return lambda x: product(axis.copied(x), module.bias)


def _row(module: Any, axis: Axis) -> Callable[..., Tensor]:
    product = _product(module)
    return lambda x: _plus(_Sum.apply(product(x, None), axis.group), module.bias)


def _gather(module: Any, axis: Axis) -> Callable[..., Tensor]:
    product = _product(module)
    wide = isinstance(module, nn.modules.conv._ConvNd)
    size = module.out_channels if wide else module.weight.shape[1 if type(module).__name__ == "Conv1D" else 0]
    sizes = shares(size, axis.size)

    def forward(x: Tensor) -> Tensor:
        out = product(axis.copied(x), module.bias)
        dim = out.dim() - 1 - (len(module.kernel_size) if wide else 0)
        return _Gather.apply(out, dim, sizes, axis)

    return forward


def _vocabulary(module: Any, axis: Axis) -> Callable[..., Tensor]:
    sizes = shares(module.num_embeddings, axis.size)
    start, length = sum(sizes[: axis.rank]), sizes[axis.rank]

    def forward(ids: Tensor) -> Tensor:
        mine = ids - start
        outside = (mine < 0) | (mine >= length)
        rows = F.embedding(mine.masked_fill(outside, 0), module.weight)
        return _Sum.apply(rows.masked_fill(outside.unsqueeze(-1), 0.0), axis.group)

    return forward


_FORWARDS: dict[str, Callable[[Any, Axis], Callable[..., Tensor]]] = {
    "column": _column,
    "row": _row,
    "gather": _gather,
    "vocabulary": _vocabulary,
}
