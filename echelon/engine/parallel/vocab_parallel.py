"""Logits that stay cut over the vocabulary until something reads them that needs them whole.

Most models only give them to a cross entropy, often after a cast, a shift and a reshape. Those work on a rank's own part, and the
loss needs of the other ranks a maximum and two sums per row in place of all their logits. Anything else gets the gathered tensor,
once and for all, as if nothing had been cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from echelon.engine.parallel.index_check import require_inside
from echelon.engine.parallel.tp_collectives import Axis


class Logits(Tensor):
    """Looks like the whole; holds this rank's part along `dim`."""

    _local: Tensor
    _dim: int
    _sizes: Sequence[int]
    _axis: Axis
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> Self:
        shape = [*local.shape[:dim], sum(sizes), *local.shape[dim + 1 :]]
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        self._local, self._dim, self._sizes, self._axis, self._whole = local, dim, sizes, axis, None
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Logits) and first._whole is None:
            if func in _PLAIN or getattr(func, "__self__", None) in _PLAIN_PROPERTIES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is Tensor.register_hook:
                return first._local.register_hook(*args[1:], **kwargs)
            found = _RULES[func](first, *args[1:], **kwargs) if func in _RULES else None
            if found is not None:
                return found
        return func(*_gathered(args), **_gathered(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_gathered(args), **_gathered(kwargs or {}))

    def gathered(self) -> Tensor:
        """The whole, on every rank."""
        if self._whole is None:
            self._whole = self._axis.gathered(self._local, self._dim, self._sizes)
        return self._whole

    def copied(self) -> Tensor:
        """The same for one who only looks: what comes after works on the parts all the same."""
        return self._axis.gathered(self._local.detach(), self._dim, self._sizes)


def _gathered(tree: Any) -> Any:
    if isinstance(tree, Logits):
        return tree.gathered()
    if isinstance(tree, dict):
        return {key: _gathered(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_gathered, tree))
    return tree


#: What asks for no numbers.
_PLAIN = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
}
_PLAIN_PROPERTIES = {
    Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda, Tensor.layout, Tensor.is_meta,
}  # fmt: skip


def _same(func: Callable[..., Tensor]) -> Callable[..., Logits | None]:
    """An operator that treats each number by itself."""

    def rule(x: Logits, *args: Any, **kwargs: Any) -> Logits | None:
        return Logits(func(x._local, *args, **kwargs), x._dim, x._sizes, x._axis)

    return rule


def _reshaped(x: Logits, *shape: Any, **kwargs: Any) -> Logits | None:
    """Where the last dimension is the vocabulary before and after."""
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else list(shape)
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    if x._dim != x.dim() - 1 or sizes[-1] != x.shape[-1]:
        return None
    local = x._local.reshape(*sizes[:-1], x._local.shape[-1])
    return Logits(local, local.dim() - 1, x._sizes, x._axis)


def _flattened(x: Logits, start_dim: int = 0, end_dim: int = -1) -> Logits | None:
    start, end = start_dim % x.dim(), end_dim % x.dim()
    if x._dim != x.dim() - 1 or end >= x._dim:
        return None
    local = x._local.flatten(start, end)
    return Logits(local, local.dim() - 1, x._sizes, x._axis)


def _transposed(x: Logits, dim0: int, dim1: int) -> Logits | None:
    dims = list(range(x.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return Logits(x._local.transpose(dim0, dim1), dims.index(x._dim), x._sizes, x._axis)


def _permuted(x: Logits, *dims: Any) -> Logits | None:
    order = [dim % x.dim() for dim in (dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims)]
    return Logits(x._local.permute(order), order.index(x._dim), x._sizes, x._axis)


def _indexed(x: Logits, index: Any) -> Logits | None:
    """Slices of other dimensions."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts) or parts.count(Ellipsis) > 1:
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (x.dim() - len(parts) + 1)
    if len(parts) > x._dim and parts[x._dim] != slice(None):
        return None
    return Logits(x._local[tuple(parts)], x._dim, x._sizes, x._axis)


def _cross_entropy(
    x: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """-log softmax(x)[target], from a maximum and sums over the ranks."""
    classes = 0 if x.dim() == 1 else 1
    if weight is not None or size_average is not None or reduce is not None or target.is_floating_point():
        return None
    if isinstance(target, Logits) or x._dim != classes:
        return None
    axis, local = x._axis, x._local.movedim(x._dim, -1)
    if local.dtype.itemsize < 4:
        local = local.float()  # as torch adds up inside
    top = local.detach().amax(-1) if local.shape[-1] else local.new_full(local.shape[:-1], float("-inf"))
    dist.all_reduce(top, dist.ReduceOp.MAX, group=axis.group)
    total = top + axis.summed((local - top.unsqueeze(-1)).exp().sum(-1)).log()
    mine = target - sum(x._sizes[: axis.rank])
    counted = target != ignore_index
    require_inside(target.where(counted, 0), sum(x._sizes), "target of a cross entropy")
    inside = counted & (mine >= 0) & (mine < local.shape[-1])
    picked = local.gather(-1, mine.where(inside, 0).unsqueeze(-1)).squeeze(-1)
    loss = total - axis.summed(picked.where(inside, 0.0))
    if label_smoothing:
        even = total - axis.summed(local.sum(-1)) / sum(x._sizes)
        loss = (1 - label_smoothing) * loss + label_smoothing * even
    loss = loss.where(counted, 0.0)
    if reduction != "none":
        loss = loss.sum() if reduction == "sum" else loss.sum() / counted.sum()
    return loss if torch.is_autocast_enabled(x.device.type) else loss.to(x.dtype)


_RULES: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    Tensor.transpose: _transposed,
    torch.transpose: _transposed,
    Tensor.permute: _permuted,
    torch.permute: _permuted,
    Tensor.__getitem__: _indexed,
    **{func: _same(func) for func in (Tensor.float, Tensor.double, Tensor.contiguous, Tensor.to)},
}
