"""Vocabulary parallelism: embedding rows, and logits, that stay sharded over the tensor-parallel group.

    embedding  each rank looks up the ids whose rows it holds; an all-reduce adds the rows of the others
    logits     stay sharded until something needs all of them

Most models pass their logits only to a cross entropy, often after a cast, a shift and a reshape. Those work on a rank's own shard, and the
loss needs a maximum and two sums per row from the other ranks instead of their logits. Any other operator gathers the full tensor, once, and
computes as if nothing were sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.plan.placement import compute_shard_sizes


def make_embedding_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    """The forward of an nn.Embedding or nn.EmbeddingBag of which this rank holds some rows."""
    vocabulary_size = module.num_embeddings
    shard_sizes = compute_shard_sizes(vocabulary_size, tp.size)
    first_row, local_rows = tp.local_span(shard_sizes)
    padding_row = None if module.padding_idx is None else module.padding_idx - first_row
    padding_row = padding_row if padding_row is not None and 0 <= padding_row < local_rows else None

    def to_local_rows(ids: Tensor) -> tuple[Tensor, Tensor]:
        """Row in this rank's shard, and whether it holds the id at all."""
        _require_in_range(ids, vocabulary_size, type(module).__name__)
        local_ids = ids - first_row
        is_local = (local_ids >= 0) & (local_ids < local_rows)
        return local_ids.where(is_local, 0), is_local

    def embed(ids: Tensor) -> Tensor:
        rows, is_local = to_local_rows(ids)
        embedded = F.embedding(rows, module.weight, padding_row)
        return tp.reduce_from_region(embedded.masked_fill(~is_local.unsqueeze(-1), 0.0))

    def embed_bag(ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        rows, is_local = to_local_rows(ids)
        weights = is_local.to(module.weight.dtype)
        if per_sample_weights is not None:
            weights = tp.copy_to_region(per_sample_weights) * weights
        embedded = F.embedding_bag(
            rows, module.weight, offsets, mode="sum", per_sample_weights=weights, include_last_offset=module.include_last_offset
        )  # fmt: skip
        return tp.reduce_from_region(embedded)

    return embed_bag if isinstance(module, nn.EmbeddingBag) else embed


def _require_in_range(ids: Tensor, size: int, description: str) -> None:
    """Reject ids outside of 0 to `size` - 1, which another rank would seem to hold. On a GPU without waiting for it, as torch does."""
    if ids.is_meta:
        return
    in_range = (ids >= 0) & (ids < size)
    if not ids.is_cpu or torch.compiler.is_compiling():
        torch._assert_async(in_range.all(), f"{description}: an index is out of range of 0 to {size - 1}")
    elif not in_range.all():
        bad_id = int(ids[~in_range].flatten()[0])
        raise IndexError(f"{description}: index {bad_id} is out of range of 0 to {size - 1}")


class ShardedLogits(Tensor):
    """Has the shape of the full tensor, and holds this rank's shard along `dim`."""

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

    def with_local(self, local: Tensor, dim: int | None = None) -> ShardedLogits:
        """Logits with this shard, along `dim`, of the same vocabulary."""
        return ShardedLogits(local, self._dim if dim is None else dim, self._shard_sizes, self._tp)

    def full_tensor(self) -> Tensor:
        """The full tensor, on every rank."""
        if self._full_tensor is None:
            self._full_tensor = self._tp.gather_from_region(self._local, self._dim, self._shard_sizes)
        return self._full_tensor

    def gather_detached(self) -> Tensor:
        """The full tensor for inspection: later operators still work on the shards."""
        return self._tp.gather_from_region(self._local.detach(), self._dim, self._shard_sizes)


def _gather_tree(tree: Any) -> Any:
    if isinstance(tree, ShardedLogits):
        return tree.full_tensor()
    if isinstance(tree, dict):
        return {key: _gather_tree(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_gather_tree, tree))
    return tree


#: Reads no values.
_METADATA_METHODS = {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__,
}  # fmt: skip
_METADATA_PROPERTIES = {
    Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda, Tensor.layout, Tensor.is_meta,
}  # fmt: skip


def _elementwise(operator: Callable[..., Tensor]) -> Callable[..., ShardedLogits | None]:
    return lambda logits, *args, **kwargs: logits.with_local(operator(logits._local, *args, **kwargs))


def _reshape(logits: ShardedLogits, *shape: Any, **kwargs: Any) -> ShardedLogits | None:
    """If the vocabulary is the last dim before and after."""
    new_shape = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else list(shape)
    if kwargs or not new_shape or not all(isinstance(size, int) for size in new_shape):
        return None
    if logits._dim != logits.dim() - 1 or new_shape[-1] != logits.shape[-1]:
        return None
    local = logits._local.reshape(*new_shape[:-1], logits._local.shape[-1])
    return logits.with_local(local, local.dim() - 1)


def _flatten(logits: ShardedLogits, start_dim: int = 0, end_dim: int = -1) -> ShardedLogits | None:
    start, end, shape = start_dim % logits.dim(), end_dim % logits.dim(), logits.shape
    return _reshape(logits, *shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :])


def _transpose(logits: ShardedLogits, dim0: int, dim1: int) -> ShardedLogits | None:
    dims = list(range(logits.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(logits, dims)


def _permute(logits: ShardedLogits, *dims: Any) -> ShardedLogits | None:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    order = [dim % logits.dim() for dim in order]
    return logits.with_local(logits._local.permute(order), order.index(logits._dim))


def _index(logits: ShardedLogits, index: Any) -> ShardedLogits | None:
    """Slices of dims other than the vocabulary."""
    indices = list(index) if isinstance(index, tuple) else [index]
    if not all(item is Ellipsis or isinstance(item, slice) for item in indices) or indices.count(Ellipsis) > 1:
        return None
    if Ellipsis in indices:
        ellipsis_position = indices.index(Ellipsis)
        indices[ellipsis_position : ellipsis_position + 1] = [slice(None)] * (logits.dim() - len(indices) + 1)
    if len(indices) > logits._dim and indices[logits._dim] != slice(None):
        return None
    return logits.with_local(logits._local[tuple(indices)])


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
    """-log softmax(logits)[target], from a maximum and two sums over the ranks."""
    class_dim = 0 if logits.dim() == 1 else 1
    if weight is not None or size_average is not None or reduce is not None or target.is_floating_point():
        return None
    if isinstance(target, ShardedLogits) or logits._dim != class_dim:
        return None
    tp, local = logits._tp, logits._local.movedim(logits._dim, -1)
    if local.dtype.itemsize < 4:
        local = local.float()  # as torch accumulates
    max_logit = local.detach().amax(-1) if local.shape[-1] else local.new_full(local.shape[:-1], float("-inf"))
    dist.all_reduce(max_logit, dist.ReduceOp.MAX, group=tp.process_group)
    log_sum_exp = max_logit + tp.reduce_from_region((local - max_logit.unsqueeze(-1)).exp().sum(-1)).log()
    local_target = target - sum(logits._shard_sizes[: tp.rank])
    is_counted = target != ignore_index
    _require_in_range(target.where(is_counted, 0), sum(logits._shard_sizes), "target of a cross entropy")
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


#: Operators that keep logits sharded; None where they cannot with these arguments.
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
