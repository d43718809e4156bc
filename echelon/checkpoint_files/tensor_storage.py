"""Storage for torch's distributed checkpoint: raw tensor bytes in one file per rank, located by a JSON index. No pickle.

    rank-00000.bin ...   the bytes of tensor parts, one after another
    tensors.json         {name: {"dtype", "shape", "parts": [{"start", "shape", "file", "offset"}]}}

torch's planners decide which rank writes or reads which part, so that any plan reads what any plan wrote. The index is validated before a
byte is read: parts tile their tensor, lie within their file, and files are those of the manifest.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future as Pending
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from echelon.errors import CheckpointError, DocumentError
from echelon.plan.sealed_json import open_regular, parse_object, read_regular

INDEX_FILE = "tensors.json"
#: Tensors on their way to the disk and the hash at a time.
_MAX_PENDING_WRITES = 3
_DTYPES_BY_NAME: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}


@dataclass(frozen=True, slots=True)
class _FileLocation:
    """Where a part's bytes are."""

    file: str
    offset: int


# Writing


class TensorWriter(StorageWriter):
    """Writes this rank's parts to one file, hashing on the way; rank 0 writes the index. `files`: what the manifest lists of this rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: dict[str, dict[str, Any]] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Called before each save."""
        self.files = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder exists already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Each rank's file name."""
        return [replace(plan, storage_data=f"rank-{rank:05d}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the parts of `plan`."""
        name: str = plan.storage_data
        future: Future[list[WriteResult]] = Future()
        with _create_file(self._folder / name) as file:
            with _HashedFile(file) as stream:
                results = [self._write_item(stream, name, item, planner) for item in plan.items]
            os.fsync(file.fileno())
        if plan.items:
            self.files[name] = {"bytes": stream.byte_count, "sha256": stream.digest.hexdigest()}
        else:
            (self._folder / name).unlink()
        future.set_result(results)
        return future

    def _write_item(self, stream: _HashedFile, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{item.index.fqn}: not a tensor; only tensors are stored there")
        offset = stream.byte_count
        stream.write(tensor)
        return WriteResult(
            index=item.index,
            size_in_bytes=stream.byte_count - offset,
            storage_data=_FileLocation(file=name, offset=offset),
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' parts."""
        locations: dict[MetadataIndex, _FileLocation] = {
            result.index: result.storage_data for rank_results in results for result in rank_results
        }
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{name}: not a tensor; only tensors are stored there")
            encoded_parts = [
                {
                    "start": list(chunk.offsets),
                    "shape": list(chunk.sizes),
                    "file": location.file,
                    "offset": location.offset,
                }
                for chunk in entry.chunks
                if math.prod(chunk.sizes)
                for location in [locations[MetadataIndex(name, chunk.offsets)]]
            ]
            tensors[name] = {
                "dtype": dtype_to_name(entry.properties.dtype),
                "shape": list(entry.size),
                "parts": encoded_parts,
            }
        data = json.dumps(tensors, separators=(",", ":")).encode()
        with _create_file(self._folder / INDEX_FILE) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.files[INDEX_FILE] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path."""
        return True


def _create_file(path: Path) -> BinaryIO:
    return open(path, "xb")


class _HashedFile:
    """Copies off the device, the disk and the hash work at the same time: a save takes as long as the slowest of them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._write_executor, self._hash_executor = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._pending: deque[tuple[Pending[Any], Pending[Any]]] = deque()
        self.digest, self.byte_count = hashlib.sha256(), 0

    def write(self, tensor: Tensor) -> None:
        data = tensor_bytes(tensor)
        self.byte_count += len(data)
        self._pending.append(
            (self._write_executor.submit(self._file.write, data), self._hash_executor.submit(self.digest.update, data))
        )
        if len(self._pending) > _MAX_PENDING_WRITES:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for future in self._pending.popleft():
            future.result()

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            while self._pending and kind is None:
                self._wait_for_oldest()
        finally:
            self._write_executor.shutdown()
            self._hash_executor.shutdown()
        self._file.flush()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in row-major order, shared with it where it is contiguous on the CPU."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"a {tensor.layout} tensor of {tensor.dtype}: only dense tensors are stored")
    host_tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return host_tensor.view(torch.uint8).numpy().data if host_tensor.numel() else memoryview(b"")


def dtype_to_name(dtype: torch.dtype) -> str:
    """`float32`; only of dtypes that are stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES_BY_NAME:
        raise CheckpointError(f"tensors of {dtype} are not stored")
    return name


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of that name."""
    if name not in _DTYPES_BY_NAME:
        raise ValueError(f"no dtype {name!r}")
    return _DTYPES_BY_NAME[name]


# Reading


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[tuple[ChunkStorageMetadata, _FileLocation], ...]


def read_index(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> dict[str, TensorEntry]:
    """The stored tensors by name. `files`: those of the manifest, whose sizes and hashes were checked."""
    path = folder / INDEX_FILE
    try:
        encoded_entries = parse_object(read_regular(path), str(path))
        return {name: _parse_entry(name, encoded, files) for name, encoded in encoded_entries.items()}
    except (DocumentError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error) if isinstance(error, DocumentError) else f"{path}: {error}"
        raise CheckpointError(f"{reason}; use an older checkpoint") from error


def _parse_entry(name: str, encoded: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> TensorEntry:
    dtype, shape = dtype_from_name(encoded["dtype"]), _parse_sizes(encoded["shape"])
    if math.prod(max(size, 1) for size in shape) >= 2**48:
        raise ValueError(f"{name}: a tensor of {list(shape)}")
    chunks = []
    for part in encoded["parts"]:
        start, sizes, file, offset = (
            _parse_sizes(part["start"]),
            _parse_sizes(part["shape"]),
            part["file"],
            part["offset"],
        )
        if file == INDEX_FILE or file not in files:
            raise ValueError(f"{name}: {file!r} is not a data file of this checkpoint")
        (offset,) = _parse_sizes([offset])
        if offset + math.prod(sizes) * dtype.itemsize > files[file]["bytes"]:
            raise ValueError(f"{name}: bytes from {offset:,} on are beyond the end of {file}")
        if len(start) != len(shape) or len(sizes) != len(shape) or not math.prod(sizes):
            raise ValueError(f"{name}: a part {list(sizes)} at {list(start)} in a tensor {list(shape)}")
        if any(begin + size > full_size for begin, size, full_size in zip(start, sizes, shape, strict=True)):
            raise ValueError(f"{name}: the part {list(sizes)} at {list(start)} leaves the tensor {list(shape)}")
        chunks.append((ChunkStorageMetadata(start, sizes), _FileLocation(file=file, offset=offset)))
    if sum(math.prod(chunk.sizes) for chunk, _ in chunks) != math.prod(shape) or _any_overlap(
        [chunk for chunk, _ in chunks]
    ):
        raise ValueError(f"{name}: its parts do not cover it exactly once")
    return TensorEntry(dtype=dtype, shape=shape, chunks=tuple(chunks))


def _parse_sizes(encoded: Any) -> torch.Size:
    if not isinstance(encoded, list) or not all(type(size) is int and 0 <= size < 2**62 for size in encoded):
        raise ValueError(f"{encoded!r} is not a list of sizes")
    return torch.Size(encoded)


def _any_overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether two of them share an element: a sweep along the dimension that separates most."""
    if len(chunks) < 2:
        return False
    if not chunks[0].offsets:
        return True
    dim = max(range(len(chunks[0].offsets)), key=lambda each: len({chunk.offsets[each] for chunk in chunks}))
    active_chunks: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda each: each.offsets[dim]):
        active_chunks = [each for each in active_chunks if each.offsets[dim] + each.sizes[dim] > chunk.offsets[dim]]
        if any(_is_overlapping(each, chunk) for each in active_chunks):
            return True
        active_chunks.append(chunk)
    return False


def _is_overlapping(chunk: ChunkStorageMetadata, other_chunk: ChunkStorageMetadata) -> bool:
    return all(
        begin < other_begin + other_size and other_begin < begin + size
        for begin, size, other_begin, other_size in zip(
            chunk.offsets, chunk.sizes, other_chunk.offsets, other_chunk.sizes, strict=True
        )
    )


class TensorReader(StorageReader):
    """Reads the rows that the planner asks for."""

    def __init__(self, folder: Path, entries: Mapping[str, TensorEntry]) -> None:
        self._folder, self.entries = folder, entries
        self._chunk_locations = {
            MetadataIndex(name, chunk.offsets): (entry.dtype, chunk.sizes, location)
            for name, entry in entries.items()
            for chunk, location in entry.chunks
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        """Called before each load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in torch's words."""
        return Metadata({
            name: TensorStorageMetadata(TensorProperties(entry.dtype), entry.shape, [chunk for chunk, _ in entry.chunks])
            for name, entry in self.entries.items()
        })  # fmt: skip

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The index was read when this was made."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, file by file in the order of their bytes."""
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
        """The region of a part that `item` names; of its first dimension only the rows in question are read."""
        dtype, sizes, location = self._chunk_locations[item.storage_index]
        first_row, row_count = (item.storage_offsets[0], item.lengths[0]) if sizes else (0, 1)
        row_bytes = math.prod(sizes[1:]) * dtype.itemsize
        data = torch.empty(row_count * row_bytes, dtype=torch.uint8)
        file.seek(location.offset + first_row * row_bytes)
        if file.readinto(data.numpy()) != len(data):  # type: ignore[attr-defined]
            raise CheckpointError(f"{self._folder / location.file}: cut short while it was read")
        tensor = data.view(dtype).reshape(row_count, *sizes[1:]) if sizes else data.view(dtype).reshape(())
        for dim in range(1, len(sizes)):
            tensor = tensor.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path."""
        return True


class TensorLoadPlanner(DefaultLoadPlanner):
    """torch's planner without its unpickler."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: the index lists tensors only."""
        raise CheckpointError(f"{read_item.dest_index.fqn}: not a tensor")
