"""Where this rank's part of a tensor lies in the full tensor: one answer for checkpoints, weight files and proofs.

    full tensor  ──tp──>  plain tensor, this rank's rows or columns (`TPShard`)  ──ZeRO──>  DTensor of that

The shard of a fused projection (q, k and v in one weight) consists of several regions of the full tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public name for this arithmetic

from echelon.plan.placement import compute_shard_sizes


@dataclass(frozen=True, slots=True)
class TPShard:
    """The part of a tensor that a tensor-parallel rank keeps."""

    full_shape: torch.Size
    dim: int
    fused_sizes: tuple[int, ...]  #: sizes along `dim` that are sharded separately; (): all of it as one
    rank: int
    tp_size: int
    unit: int = 1  #: rows that are not separated

    @property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's shard."""
        local_length = sum(length for _, _, length in self.spans())
        return torch.Size([*self.full_shape[: self.dim], local_length, *self.full_shape[self.dim + 1 :]])

    @property
    def is_even(self) -> bool:
        """Whether the shards of all ranks have one shape."""
        return len({replace(self, rank=rank).local_shape for rank in range(self.tp_size)}) == 1

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(start in the shard, start in the full tensor, length) along `dim`."""
        local_start = full_start = 0
        for size in self.fused_sizes or (self.full_shape[self.dim],):
            rank_lengths = compute_shard_sizes(size, self.tp_size, self.unit)
            length = rank_lengths[self.rank]
            if length:
                yield local_start, full_start + sum(rank_lengths[: self.rank]), length
            local_start, full_start = local_start + length, full_start + size

    def extract(self, full_tensor: Tensor) -> Tensor:
        """A copy of this rank's part of `full_tensor`."""
        slices = [full_tensor.narrow(self.dim, full_start, length) for _, full_start, length in self.spans()]
        return torch.cat(slices or [full_tensor.narrow(self.dim, 0, 0)], self.dim)


@dataclass(frozen=True, slots=True)
class ShardRegion:
    """A block of values that this rank holds, and where it begins in the full tensor."""

    offsets: tuple[int, ...]
    values: Tensor  #: shares memory with the local tensor

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indices into the full tensor."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.values.shape, strict=True))


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor_shape(tensor: Tensor, tp_shard: TPShard | None) -> torch.Size:
    """The shape of the full tensor."""
    return tensor.shape if tp_shard is None else tp_shard.full_shape


def local_regions(tensor: Tensor, tp_shard: TPShard | None) -> list[ShardRegion]:
    """The regions of `tensor` that this rank holds; none where it holds no element."""
    local_values = to_local(tensor).detach()
    offsets: Sequence[int] = (0,) * local_values.dim()
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if local_values.dim() and not local_values.numel():
        return []
    if tp_shard is None:
        return [ShardRegion(tuple(offsets), local_values)]
    regions, dim = [], tp_shard.dim
    first_row, end_row = offsets[dim], offsets[dim] + local_values.shape[dim]  # in the shard
    for local_start, full_start, length in tp_shard.spans():
        begin, end = max(local_start, first_row), min(local_start + length, end_row)
        if begin < end:
            region_offsets = (*offsets[:dim], full_start + begin - local_start, *offsets[dim + 1 :])
            regions.append(ShardRegion(region_offsets, local_values.narrow(dim, begin - first_row, end - begin)))
    return regions
