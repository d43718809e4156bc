"""Read tensors for torch's distributed checkpoint (format: tensor_format.py).

The index is validated before a byte is read: parts tile their tensor, lie within their file, and files are those of the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from echelon.checkpoint_files.tensor_format import INDEX_FILE, FileLocation, PlainStorage, damaged, dtype_from_name
from echelon.errors import CheckpointError, DocumentError
from echelon.plan.sealed_json import open_regular, parse_object, read_regular


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[tuple[ChunkStorageMetadata, FileLocation], ...]


def read_index(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> dict[str, TensorEntry]:
    """The stored tensors by name. `files`: the manifest's, whose sizes and hashes have been checked."""
    path = folder / INDEX_FILE
    try:
        encoded_entries = parse_object(read_regular(path), str(path))
        return {name: _parse_entry(name, encoded, files) for name, encoded in encoded_entries.items()}
    except (DocumentError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(path, error) from error


def _parse_entry(name: str, encoded: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> TensorEntry:
    dtype, shape = dtype_from_name(encoded["dtype"]), _parse_sizes(encoded["shape"])
    if math.prod(max(size, 1) for size in shape) >= 2**48:
        raise ValueError(f"{name}: a tensor of {list(shape)}")
    chunks = []
    for part in encoded["parts"]:
        start, sizes, file = _parse_sizes(part["start"]), _parse_sizes(part["shape"]), part["file"]
        if file == INDEX_FILE or file not in files:
            raise ValueError(f"{name}: {file!r} is not a data file of this checkpoint")
        (offset,) = _parse_sizes([part["offset"]])
        if offset + math.prod(sizes) * dtype.itemsize > files[file]["bytes"]:
            raise ValueError(f"{name}: bytes from {offset:,} on are beyond the end of {file}")
        if len(start) != len(shape) or len(sizes) != len(shape) or not math.prod(sizes):
            raise ValueError(f"{name}: a part {list(sizes)} at {list(start)} in a tensor {list(shape)}")
        if any(begin + size > full_size for begin, size, full_size in zip(start, sizes, shape, strict=True)):
            raise ValueError(f"{name}: the part {list(sizes)} at {list(start)} leaves the tensor {list(shape)}")
        chunks.append((ChunkStorageMetadata(start, sizes), FileLocation(file=file, offset=offset)))
    regions = [chunk for chunk, _ in chunks]
    if sum(math.prod(chunk.sizes) for chunk in regions) != math.prod(shape) or _any_overlap(regions):
        raise ValueError(f"{name}: its parts do not cover it exactly once")
    return TensorEntry(dtype=dtype, shape=shape, chunks=tuple(chunks))


def _parse_sizes(encoded: Any) -> torch.Size:
    if not isinstance(encoded, list) or not all(type(size) is int and 0 <= size < 2**62 for size in encoded):
        raise ValueError(f"{encoded!r} is not a list of sizes")
    return torch.Size(encoded)


def _any_overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether two chunks share an element: a sweep along the dim with the most distinct offsets."""
    dims = range(len(chunks[0].offsets) if chunks else 0)
    if not dims:
        return len(chunks) > 1

    def overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata, dims: Sequence[int]) -> bool:
        return all(
            one.offsets[dim] < other.offsets[dim] + other.sizes[dim]
            and other.offsets[dim] < one.offsets[dim] + one.sizes[dim]
            for dim in dims
        )

    sweep_dim = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[sweep_dim]):
        active = [earlier for earlier in active if overlap(earlier, chunk, [sweep_dim])]
        if any(overlap(earlier, chunk, dims) for earlier in active):
            return True
        active.append(chunk)
    return False


class TensorReader(PlainStorage, StorageReader):
    """Reads the regions that the planner requests."""

    def __init__(self, folder: Path, entries: Mapping[str, TensorEntry]) -> None:
        self._folder, self.entries = folder, entries
        self._chunk_locations = {
            MetadataIndex(name, chunk.offsets): (entry.dtype, chunk.sizes, location)
            for name, entry in entries.items()
            for chunk, location in entry.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index as torch's metadata."""
        return Metadata({
            name: TensorStorageMetadata(TensorProperties(entry.dtype), entry.shape, [chunk for chunk, _ in entry.chunks])
            for name, entry in self.entries.items()
        })  # fmt: skip

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The index has been read."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, file by file, in the order of their bytes."""
        for name, items in self._group_by_file(plan.items):
            with open_regular(self._folder / name) as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read_region(file, item))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _group_by_file(self, items: Sequence[ReadItem]) -> Iterator[tuple[str, list[ReadItem]]]:
        items_by_file: dict[str, list[ReadItem]] = {}
        for item in sorted(items, key=lambda read_item: self._chunk_locations[read_item.storage_index][2].offset):
            items_by_file.setdefault(self._chunk_locations[item.storage_index][2].file, []).append(item)
        yield from items_by_file.items()

    def _read_region(self, file: BinaryIO, item: ReadItem) -> Tensor:
        """The requested region of a part; only its rows (of the first dim) are read."""
        dtype, sizes, location = self._chunk_locations[item.storage_index]
        first_row, row_count = (item.storage_offsets[0], item.lengths[0]) if sizes else (0, 1)
        row_bytes = math.prod(sizes[1:]) * dtype.itemsize
        data = torch.empty(row_count * row_bytes, dtype=torch.uint8)
        file.seek(location.offset + first_row * row_bytes)
        if file.readinto(data.numpy()) != len(data):  # type: ignore[attr-defined]
            raise CheckpointError(f"{self._folder / location.file}: became shorter while it was read")
        tensor = data.view(dtype).reshape(row_count, *sizes[1:]) if sizes else data.view(dtype).reshape(())
        for dim in range(1, len(sizes)):
            tensor = tensor.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        return tensor


class TensorLoadPlanner(DefaultLoadPlanner):
    """torch's planner, without unpickling."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: the index lists tensors only."""
        raise CheckpointError(f"{read_item.dest_index.fqn}: not a tensor")
