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

from echelon.engine.parallel.index_check import require_in_range
from echelon.engine.parallel.tp_collectives import TPCommunicator


class ShardedLogits(Tensor):
    """Looks like the whole; holds this rank's part along `dim`."""

    _local: Tensor
    _dim: int
    _shard_sizes: Sequence[int]
    _tp: TPCommunicator
    _full_tensor: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, dim: int, shard_sizes: Sequence[int], tp: TPCommunicator) -> Self:
        shape = [*local.shape[:dim], sum(shard_sizes), *local.shape[dim + 1 :]]
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        self._local, self._dim, self._shard_sizes, self._tp, self._full_tensor = local, dim, shard_sizes, tp, None
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args else None
        if isinstance(logits, ShardedLogits) and logits._full_tensor is None:
            if func in _METADATA_METHODS or getattr(func, "__self__", None) in _METADATA_PROPERTIES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is Tensor.register_hook:
                return logits._local.register_hook(*args[1:], **kwargs)
            result = _SHARDED_OPS[func](logits, *args[1:], **kwargs) if func in _SHARDED_OPS else None
            if result is not None:
                return result
        return func(*_gather_tree(args), **_gather_tree(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_gather_tree(args), **_gather_tree(kwargs or {}))

    def full_tensor(self) -> Tensor:
        """The whole, on every rank."""
        if self._full_tensor is None:
            self._full_tensor = self._tp.gather_from_region(self._local, self._dim, self._shard_sizes)
        return self._full_tensor

    def gather_detached(self) -> Tensor:
        """The same for one who only looks: what comes after works on the parts all the same."""
        return self._tp.gather_from_region(self._local.detach(), self._dim, self._shard_sizes)


def _gather_tree(tree: Any) -> Any:
    if isinstance(tree, ShardedLogits):
        return tree.full_tensor()
    if isinstance(tree, dict):
        return {key: _gather_tree(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_gather_tree, tree))
    return tree


#: What asks for no numbers.
_METADATA_METHODS = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
}
_METADATA_PROPERTIES = {
    Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda, Tensor.layout, Tensor.is_meta,
}  # fmt: skip


def _elementwise(operator: Callable[..., Tensor]) -> Callable[..., ShardedLogits | None]:
    """An operator that treats each number by itself."""

    def rule(logits: ShardedLogits, *args: Any, **kwargs: Any) -> ShardedLogits | None:
        return ShardedLogits(operator(logits._local, *args, **kwargs), logits._dim, logits._shard_sizes, logits._tp)

    return rule


def _reshape(logits: ShardedLogits, *shape: Any, **kwargs: Any) -> ShardedLogits | None:
    """Where the last dimension is the vocabulary before and after."""
    new_shape = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else list(shape)
    if kwargs or not new_shape or not all(isinstance(size, int) for size in new_shape):
        return None
    if logits._dim != logits.dim() - 1 or new_shape[-1] != logits.shape[-1]:
        return None
    local = logits._local.reshape(*new_shape[:-1], logits._local.shape[-1])
    return ShardedLogits(local, local.dim() - 1, logits._shard_sizes, logits._tp)


def _flatten(logits: ShardedLogits, start_dim: int = 0, end_dim: int = -1) -> ShardedLogits | None:
    start, end = start_dim % logits.dim(), end_dim % logits.dim()
    if logits._dim != logits.dim() - 1 or end >= logits._dim:
        return None
    local = logits._local.flatten(start, end)
    return ShardedLogits(local, local.dim() - 1, logits._shard_sizes, logits._tp)


def _transpose(logits: ShardedLogits, dim0: int, dim1: int) -> ShardedLogits | None:
    dims = list(range(logits.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return ShardedLogits(logits._local.transpose(dim0, dim1), dims.index(logits._dim), logits._shard_sizes, logits._tp)


def _permute(logits: ShardedLogits, *dims: Any) -> ShardedLogits | None:
    dim_order = [
        dim % logits.dim() for dim in (dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims)
    ]
    return ShardedLogits(
        logits._local.permute(dim_order), dim_order.index(logits._dim), logits._shard_sizes, logits._tp
    )


def _index(logits: ShardedLogits, index: Any) -> ShardedLogits | None:
    """Slices of other dimensions."""
    indices = list(index) if isinstance(index, tuple) else [index]
    if not all(item is Ellipsis or isinstance(item, slice) for item in indices) or indices.count(Ellipsis) > 1:
        return None
    if Ellipsis in indices:
        ellipsis_position = indices.index(Ellipsis)
        indices[ellipsis_position : ellipsis_position + 1] = [slice(None)] * (logits.dim() - len(indices) + 1)
    if len(indices) > logits._dim and indices[logits._dim] != slice(None):
        return None
    return ShardedLogits(logits._local[tuple(indices)], logits._dim, logits._shard_sizes, logits._tp)


def _cross_entropy(
    logits: ShardedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """-log softmax(x)[target], from a maximum and sums over the ranks."""
    class_dim = 0 if logits.dim() == 1 else 1
    if weight is not None or size_average is not None or reduce is not None or target.is_floating_point():
        return None
    if isinstance(target, ShardedLogits) or logits._dim != class_dim:
        return None
    tp, local = logits._tp, logits._local.movedim(logits._dim, -1)
    if local.dtype.itemsize < 4:
        local = local.float()  # as torch adds up inside
    max_logit = local.detach().amax(-1) if local.shape[-1] else local.new_full(local.shape[:-1], float("-inf"))
    dist.all_reduce(max_logit, dist.ReduceOp.MAX, group=tp.process_group)
    log_sum_exp = max_logit + tp.reduce_from_region((local - max_logit.unsqueeze(-1)).exp().sum(-1)).log()
    local_target = target - sum(logits._shard_sizes[: tp.rank])
    is_counted = target != ignore_index
    require_in_range(target.where(is_counted, 0), sum(logits._shard_sizes), "target of a cross entropy")
    is_local = is_counted & (local_target >= 0) & (local_target < local.shape[-1])
    target_logit = local.gather(-1, local_target.where(is_local, 0).unsqueeze(-1)).squeeze(-1)
    loss = log_sum_exp - tp.reduce_from_region(target_logit.where(is_local, 0.0))
    if label_smoothing:
        uniform_loss = log_sum_exp - tp.reduce_from_region(local.sum(-1)) / sum(logits._shard_sizes)
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform_loss
    loss = loss.where(is_counted, 0.0)
    if reduction != "none":
        loss = loss.sum() if reduction == "sum" else loss.sum() / is_counted.sum()
    return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)


_SHARDED_OPS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.permute: _permute,
    torch.permute: _permute,
    Tensor.__getitem__: _index,
    **{func: _elementwise(func) for func in (Tensor.float, Tensor.double, Tensor.contiguous, Tensor.to)},
}
