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

from echelon.engine.parallel.tp_rng import RNGTracker
from echelon.engine.process_groups import Communicator

#: torch renames them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TPCommunicator:
    """The tensor group as this rank sees it."""

    def __init__(self, communicator: Communicator | TPCommunicator) -> None:
        self.process_group: dist.ProcessGroup | None = communicator.process_group
        self.rank: int = communicator.rank
        self.size: int = communicator.size
        self.rng: RNGTracker = (
            communicator.rng if isinstance(communicator, TPCommunicator) else RNGTracker(communicator.rank)
        )
        self._last_copy: tuple[Any, tuple[int, bool], Tensor] | None = None

    def copy_to_region(self, x: Tensor) -> Tensor:
        """`x` into the region. Modules that read the same `x` share one sum in backward."""
        cache_key = x._version, torch.is_grad_enabled()
        if self._last_copy is not None and self._last_copy[0]() is x and self._last_copy[1] == cache_key:
            return self._last_copy[2]
        copy: Tensor = _CopyToRegion.apply(x, self)
        self._last_copy = ref(x), cache_key, copy
        return copy

    def reduce_from_region(self, x: Tensor) -> Tensor:
        """The ranks' shares of a value added up. `x` may be overwritten: give what nobody else holds."""
        return _ReduceFromRegion.apply(x, self)

    def reduce_row_output(self, x: Tensor, dim: int | None = None) -> Tensor:
        """What a row gives: the ranks' shares added up. Where ranks have parts of a sequence (along `dim`) they take those of it."""
        return self.reduce_from_region(x)

    def gather_from_region(self, x: Tensor, dim: int, shard_sizes: Sequence[int]) -> Tensor:
        """The ranks' parts, `shard_sizes` long, side by side."""
        return _GatherFromRegion.apply(x, dim, shard_sizes, self)

    def slice_to_region(self, x: Tensor, dim: int, shard_sizes: Sequence[int]) -> Tensor:
        """This rank's part of what all ranks have."""
        return _SliceToRegion.apply(x, dim, shard_sizes, self)

    def all_gather(self, x: Tensor, dim: int, shard_sizes: Sequence[int], gathered: Tensor | None = None) -> Tensor:
        """The ranks' parts side by side, for each rank to go its own way with. `gathered`: where they were put together already."""
        return _AllGather.apply(x, dim, shard_sizes, self, gathered)

    def reduce_scatter(self, x: Tensor, dim: int, shard_sizes: Sequence[int]) -> Tensor:
        """This rank's part of the ranks' shares added up."""
        return _ReduceScatter.apply(x, dim, shard_sizes, self)


class _CollectiveFunction(torch.autograd.Function):
    """Keeps what it was given beside `x` for backward. `setup_context` apart from `forward`, as torch.func needs it."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.saved_inputs = inputs[1:]


class _CopyToRegion(_CollectiveFunction):
    @staticmethod
    def forward(x: Tensor, tp: TPCommunicator) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (tp,) = ctx.saved_inputs
        tp._last_copy = None  # the last one of forward would else be kept until the next step
        return _ReduceFromRegion.apply(grads[0].clone(memory_format=torch.contiguous_format), tp), None


class _ReduceFromRegion(_CollectiveFunction):
    @staticmethod
    def forward(x: Tensor, tp: TPCommunicator) -> Tensor:
        total = x.clone() if torch._C._are_functorch_transforms_active() else x.contiguous()
        dist.all_reduce(total, group=tp.process_group)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.saved_inputs = inputs[1:]
        if output is inputs[0]:
            ctx.mark_dirty(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _CopyToRegion.apply(grads[0], *ctx.saved_inputs), None


class _GatherFromRegion(_CollectiveFunction):
    @staticmethod
    def forward(x: Tensor, dim: int, shard_sizes: Sequence[int], tp: TPCommunicator) -> Tensor:
        return _all_gather_uneven(x, dim, shard_sizes, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _SliceToRegion.apply(grads[0], *ctx.saved_inputs), None, None, None


class _SliceToRegion(_CollectiveFunction):
    @staticmethod
    def forward(x: Tensor, dim: int, shard_sizes: Sequence[int], tp: TPCommunicator) -> Tensor:
        return x.narrow(dim, sum(shard_sizes[: tp.rank]), shard_sizes[tp.rank]).clone(
            memory_format=torch.contiguous_format
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _GatherFromRegion.apply(grads[0], *ctx.saved_inputs), None, None, None


class _AllGather(_CollectiveFunction):
    @staticmethod
    def forward(x: Tensor, dim: int, shard_sizes: Sequence[int], tp: TPCommunicator, gathered: Tensor | None) -> Tensor:
        return _all_gather_uneven(x, dim, shard_sizes, tp) if gathered is None else gathered.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.saved_inputs = inputs[1:4]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _ReduceScatter.apply(grads[0], *ctx.saved_inputs), None, None, None, None


class _ReduceScatter(_CollectiveFunction):
    @staticmethod
    def forward(x: Tensor, dim: int, shard_sizes: Sequence[int], tp: TPCommunicator) -> Tensor:
        padded_length = max(shard_sizes)
        padded_shards = [_pad_to_length(shard, padded_length) for shard in x.movedim(dim, 0).split(list(shard_sizes))]
        local_shard = torch.empty_like(padded_shards[0], memory_format=torch.contiguous_format)
        _reduce_scatter(local_shard, torch.cat(padded_shards), group=tp.process_group)
        return local_shard[: shard_sizes[tp.rank]].movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _AllGather.apply(grads[0], *ctx.saved_inputs, None), None, None, None


def _all_gather_uneven(x: Tensor, dim: int, shard_sizes: Sequence[int], tp: TPCommunicator) -> Tensor:
    padded_length = max(shard_sizes)
    padded_shard = _pad_to_length(x.movedim(dim, 0), padded_length).contiguous()
    gathered = padded_shard.new_empty(padded_length * tp.size, *padded_shard.shape[1:])
    _all_gather(gathered, padded_shard, group=tp.process_group)
    # Not a view: models change what a layer gave them in place.
    return torch.cat(
        [shard[:size].movedim(0, dim) for shard, size in zip(gathered.split(padded_length), shard_sizes, strict=True)],
        dim,
    )


def _pad_to_length(x: Tensor, length: int) -> Tensor:
    """Messages are of one length."""
    return x if x.shape[0] == length else torch.cat([x, x.new_zeros(length - x.shape[0], *x.shape[1:])])
