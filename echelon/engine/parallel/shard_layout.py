"""Where this rank's part of a tensor lies in the whole: one answer for checkpoints, weights files and proofs.

A parameter that the tensor axis cuts is a plain tensor, this rank's rows or columns (a `Piece` of the whole); one that ZeRO shards is
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

from echelon.plan.placement import shares


@dataclass(frozen=True, slots=True)
class Piece:
    """Which part of a parameter a rank of the tensor axis keeps."""

    whole: torch.Size  #: shape of the parameter
    dim: int
    parts: tuple[int, ...]  #: sizes along `dim` that are dealt out one by one; empty: all of it at once
    rank: int
    ways: int
    unit: int = 1  #: rows that stay together

    @property
    def shape(self) -> torch.Size:
        """Of what this rank keeps."""
        mine = sum(length for _, _, length in self.stretches())
        return torch.Size([*self.whole[: self.dim], mine, *self.whole[self.dim + 1 :]])

    @property
    def even(self) -> bool:
        """Whether all ranks keep equally large parts."""
        return len({replace(self, rank=rank).shape for rank in range(self.ways)}) == 1

    def stretches(self) -> Iterator[tuple[int, int, int]]:
        """(start in the piece, start in the whole, length) along `dim`."""
        here = there = 0
        for size in self.parts or (self.whole[self.dim],):
            dealt = shares(size, self.ways, self.unit)
            length = dealt[self.rank]
            if length:
                yield here, there + sum(dealt[: self.rank]), length
            here, there = here + length, there + size

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of `full`, a copy."""
        found = [full.narrow(self.dim, there, length) for _, there, length in self.stretches()]
        return torch.cat(found or [full.narrow(self.dim, 0, 0)], self.dim)


@dataclass(frozen=True, slots=True)
class Region:
    """Some of a rank's numbers and where they begin in the whole."""

    start: tuple[int, ...]
    values: Tensor  #: shares memory with what the rank holds

    @property
    def place(self) -> tuple[slice, ...]:
        """The same as indices into the whole."""
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.values.shape, strict=True))


def local(value: Tensor) -> Tensor:
    """What this rank holds of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole_shape(value: Tensor, piece: Piece | None) -> torch.Size:
    """The shape of the whole."""
    return value.shape if piece is None else piece.whole


def regions(value: Tensor, piece: Piece | None) -> list[Region]:
    """What this rank holds of `value`, stretch by stretch; nothing where it holds none."""
    here = local(value).detach()
    start: Sequence[int] = (0,) * here.dim()
    if isinstance(value, DTensor):
        _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if here.dim() and not here.numel():
        return []
    if piece is None:
        return [Region(tuple(start), here)]
    found, dim = [], piece.dim
    first, last = start[dim], start[dim] + here.shape[dim]  # in the piece
    for at, there, length in piece.stretches():
        begin, end = max(at, first), min(at + length, last)
        if begin < end:
            where = (*start[:dim], there + begin - at, *start[dim + 1 :])
            found.append(Region(where, here.narrow(dim, begin - first, end - begin)))
    return found


class Spread(Tensor):
    """A tensor as torch's distributed checkpoint takes it: by the regions that this rank holds, under the whole's coordinates.

    torch asks any tensor that has these methods (DTensor has); their names are its own. It has no numbers of its own to compute with.
    """

    _regions: list[Region]

    @staticmethod
    def __new__(cls, value: Tensor, piece: Piece | None) -> Spread:
        here = local(value)
        made: Spread = Tensor._make_wrapper_subclass(
            cls, whole_shape(value, piece), dtype=here.dtype, device=here.device
        )
        made._regions = regions(value, piece)
        return made

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
        return [ChunkStorageMetadata(torch.Size(each.start), each.values.shape) for each in self._regions]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(each.values for each in self._regions if torch.Size(each.start) == index.offset)
