"""Differentiable collectives of the tensor-parallel group.

    method              forward               backward
    copy_to_region      identity              all-reduce
    reduce_from_region  all-reduce            identity
    slice_to_region     keep the local shard  all-gather
    gather_from_region  all-gather            keep the local shard
    all_gather          all-gather            reduce-scatter
    reduce_scatter      reduce-scatter        all-gather

Inside the region ranks compute different parts of the same activations; outside it they hold equal ones. The first four cross its border, the
last two stay inside. Every backward is itself one of these operations, so second derivatives (forces from an energy) are correct too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.engine.parallel.tp_rng import RNGTracker
from echelon.engine.process_groups import Communicator

#: Renamed between torch versions.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TPCommunicator:
    """The tensor-parallel group, as seen from this rank."""

    def __init__(self, ranks: Communicator | TPCommunicator) -> None:
        self.process_group: dist.ProcessGroup | None = ranks.process_group
        self.rank: int = ranks.rank
        self.size: int = ranks.size
        self.rng: RNGTracker = ranks.rng if isinstance(ranks, TPCommunicator) else RNGTracker(ranks.rank)
        self._last_copy: tuple[Any, tuple[int, bool], Tensor] | None = None

    def copy_to_region(self, x: Tensor) -> Tensor:
        """Enter the region with a replicated `x`. Modules that read the same `x` share one all-reduce in backward."""
        cache_key = x._version, torch.is_grad_enabled()
        if self._last_copy is None or self._last_copy[0]() is not x or self._last_copy[1] != cache_key:
            self._last_copy = ref(x), cache_key, self._copy_to_region(x)
        return self._last_copy[2]

    def _copy_to_region(self, x: Tensor) -> Tensor:
        return _Collective.apply(x, "copy", self)

    def local_span(self, shard_sizes: Sequence[int]) -> tuple[int, int]:
        """Start and length of this rank's shard."""
        return sum(shard_sizes[: self.rank]), shard_sizes[self.rank]

    def reduce_from_region(self, x: Tensor) -> Tensor:
        """Sum partial values over the ranks. May overwrite `x`: pass a tensor that nothing else reads."""
        return _Collective.apply(x, "reduce", self)

    def reduce_row_output(self, x: Tensor, dim: int | None = None) -> Tensor:
        """Sum a row-parallel module's partial outputs; with sequence parallelism, keep this rank's part along `dim`."""
        return self.reduce_from_region(x)

    def gather_from_region(self, x: Tensor, dim: int, shard_sizes: Sequence[int]) -> Tensor:
        """Concatenate the ranks' shards, of `shard_sizes`, for use outside the region."""
        return _Collective.apply(x, "gather", self, dim, shard_sizes)

    def slice_to_region(self, x: Tensor, dim: int, shard_sizes: Sequence[int]) -> Tensor:
        """This rank's shard of a replicated `x`."""
        return _Collective.apply(x, "slice", self, dim, shard_sizes)

    def all_gather(self, x: Tensor, dim: int, shard_sizes: Sequence[int], gathered: Tensor | None = None) -> Tensor:
        """Concatenate the ranks' shards for use inside the region. Pass `gathered` where they were concatenated before."""
        return _Collective.apply(x, "all_gather", self, dim, shard_sizes, gathered)

    def reduce_scatter(self, x: Tensor, dim: int, shard_sizes: Sequence[int]) -> Tensor:
        """Sum partial values over the ranks and keep this rank's shard."""
        return _Collective.apply(x, "reduce_scatter", self, dim, shard_sizes)


class _Collective(torch.autograd.Function):
    """Runs one of `_OPERATIONS`. torch.func requires `setup_context` to be separate from `forward`."""

    @staticmethod
    def forward(x: Tensor, name: str, tp: TPCommunicator, *arguments: Any) -> Tensor:
        return _OPERATIONS[name][0](x, tp, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, ctx.arguments, ctx.input_count = inputs[1], inputs[2:5], len(inputs)  # without `gathered`
        if output is inputs[0]:
            ctx.mark_dirty(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = _Collective.apply(grads[0], _OPERATIONS[ctx.name][1], *ctx.arguments)
        return grad, *(None,) * (ctx.input_count - 1)


def _copy(x: Tensor, tp: TPCommunicator) -> Tensor:
    return x.view_as(x)


def _reduce(x: Tensor, tp: TPCommunicator) -> Tensor:
    total = x.clone() if torch._C._are_functorch_transforms_active() else x.contiguous()
    dist.all_reduce(total, group=tp.process_group)
    return total


def _reduce_gradient(x: Tensor, tp: TPCommunicator) -> Tensor:
    tp._last_copy = None  # or the forward's last activation stays in memory until the next step
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tp.process_group)
    return total


def _slice(x: Tensor, tp: TPCommunicator, dim: int, shard_sizes: Sequence[int]) -> Tensor:
    return x.narrow(dim, *tp.local_span(shard_sizes)).clone(memory_format=torch.contiguous_format)


def _all_gather(x: Tensor, tp: TPCommunicator, dim: int, sizes: Sequence[int], known: Tensor | None = None) -> Tensor:
    if known is not None:
        return known.detach()
    padded_shard = _pad_to_length(x.movedim(dim, 0), max(sizes)).contiguous()
    buffer = padded_shard.new_empty(max(sizes) * tp.size, *padded_shard.shape[1:])
    _all_gather_single(buffer, padded_shard, group=tp.process_group)
    shards = zip(buffer.split(max(sizes)), sizes, strict=True)
    return torch.cat([shard[:size].movedim(0, dim) for shard, size in shards], dim)  # no view: models write to outputs


def _reduce_scatter(x: Tensor, tp: TPCommunicator, dim: int, sizes: Sequence[int]) -> Tensor:
    padded_shards = [_pad_to_length(shard, max(sizes)) for shard in x.movedim(dim, 0).split(list(sizes))]
    local_shard = torch.empty_like(padded_shards[0], memory_format=torch.contiguous_format)
    _reduce_scatter_single(local_shard, torch.cat(padded_shards), group=tp.process_group)
    return local_shard[: sizes[tp.rank]].movedim(0, dim).contiguous()


def _pad_to_length(x: Tensor, length: int) -> Tensor:
    """`x` padded along its first dim: collectives need shards of one size."""
    return x if x.shape[0] == length else torch.cat([x, x.new_zeros(length - x.shape[0], *x.shape[1:])])


#: Name -> what forward computes, and the operation that is its backward.
_OPERATIONS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "copy": (_copy, "reduce_gradient"),
    "reduce_gradient": (_reduce_gradient, "copy"),
    "reduce": (_reduce, "copy"),
    "slice": (_slice, "gather"),
    "gather": (_all_gather, "slice"),
    "all_gather": (_all_gather, "reduce_scatter"),
    "reduce_scatter": (_reduce_scatter, "all_gather"),
}
