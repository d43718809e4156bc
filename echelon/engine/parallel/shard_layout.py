"""Where this rank's part of a tensor lies in the whole: one answer for checkpoints, weights files and proofs.

A parameter that the tensor axis cuts is a plain tensor, this rank's rows or columns (a `TPShard` of the whole); one that ZeRO shards is
a DTensor, of such a piece where both cut. A piece of a fused projection is several stretches of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public name for this arithmetic

from echelon.plan.placement import compute_shard_sizes


@dataclass(frozen=True, slots=True)
class TPShard:
    """Which part of a parameter a rank of the tensor axis keeps."""

    full_shape: torch.Size  #: shape of the parameter
    dim: int
    fused_sizes: tuple[int, ...]  #: sizes along `dim` that are dealt out one by one; empty: all of it at once
    rank: int
    tp_size: int
    unit: int = 1  #: rows that stay together

    @property
    def local_shape(self) -> torch.Size:
        """Of what this rank keeps."""
        local_length = sum(length for _, _, length in self.spans())
        return torch.Size([*self.full_shape[: self.dim], local_length, *self.full_shape[self.dim + 1 :]])

    @property
    def is_even(self) -> bool:
        """Whether all ranks keep equally large parts."""
        return len({replace(self, rank=rank).local_shape for rank in range(self.tp_size)}) == 1

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(start in the piece, start in the whole, length) along `dim`."""
        local_start = full_start = 0
        for size in self.fused_sizes or (self.full_shape[self.dim],):
            rank_lengths = compute_shard_sizes(size, self.tp_size, self.unit)
            length = rank_lengths[self.rank]
            if length:
                yield local_start, full_start + sum(rank_lengths[: self.rank]), length
            local_start, full_start = local_start + length, full_start + size

    def extract(self, full_tensor: Tensor) -> Tensor:
        """This rank's part of `full_tensor`, a copy."""
        slices = [full_tensor.narrow(self.dim, full_start, length) for _, full_start, length in self.spans()]
        return torch.cat(slices or [full_tensor.narrow(self.dim, 0, 0)], self.dim)


@dataclass(frozen=True, slots=True)
class ShardRegion:
    """Some of a rank's numbers and where they begin in the whole."""

    offsets: tuple[int, ...]
    values: Tensor  #: shares memory with what the rank holds

    @property
    def slices(self) -> tuple[slice, ...]:
        """The same as indices into the whole."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.values.shape, strict=True))


def to_local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor_shape(tensor: Tensor, tp_shard: TPShard | None) -> torch.Size:
    """The shape of the whole."""
    return tensor.shape if tp_shard is None else tp_shard.full_shape


def local_regions(tensor: Tensor, tp_shard: TPShard | None) -> list[ShardRegion]:
    """What this rank holds of `tensor`, stretch by stretch; nothing where it holds none."""
    local_values = to_local(tensor).detach()
    offsets: Sequence[int] = (0,) * local_values.dim()
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if local_values.dim() and not local_values.numel():
        return []
    if tp_shard is None:
        return [ShardRegion(tuple(offsets), local_values)]
    result, dim = [], tp_shard.dim
    first_row, end_row = offsets[dim], offsets[dim] + local_values.shape[dim]  # in the piece
    for local_start, full_start, length in tp_shard.spans():
        begin, end = max(local_start, first_row), min(local_start + length, end_row)
        if begin < end:
            region_offsets = (*offsets[:dim], full_start + begin - local_start, *offsets[dim + 1 :])
            result.append(ShardRegion(region_offsets, local_values.narrow(dim, begin - first_row, end - begin)))
    return result


class CheckpointTensor(Tensor):
    """A tensor as torch's distributed checkpoint takes it: by the regions that this rank holds, under the whole's coordinates.

    torch asks any tensor that has these methods (DTensor has); their names are its own. It has no numbers of its own to compute with.
    """

    _regions: list[ShardRegion]

    @staticmethod
    def __new__(cls, tensor: Tensor, tp_shard: TPShard | None) -> CheckpointTensor:
        local_values = to_local(tensor)
        wrapper: CheckpointTensor = Tensor._make_wrapper_subclass(
            cls, full_tensor_shape(tensor, tp_shard), dtype=local_values.dtype, device=local_values.device
        )
        wrapper._regions = local_regions(tensor, tp_shard)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: what is spread over ranks is stored and loaded, not computed with")

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(region.values), size=self.size()
                ),
            )
            for chunk, region in zip(self.__create_chunk_list__(), self._regions, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(region.offsets), region.values.shape) for region in self._regions]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(region.values for region in self._regions if torch.Size(region.offsets) == index.offset)
