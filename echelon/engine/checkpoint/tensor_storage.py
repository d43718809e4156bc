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

INDEX = "tensors.json"
#: Tensors on their way to the disk and the hash at a time.
_AHEAD = 3
_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a part's bytes are."""

    file: str
    offset: int


# Writing


class Writer(StorageWriter):
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
        done: Future[list[WriteResult]] = Future()
        with _create(self._folder / name) as file:
            with _HashedFile(file) as stream:
                results = [self._write(stream, name, item, planner) for item in plan.items]
            os.fsync(file.fileno())
        if plan.items:
            self.files[name] = {"bytes": stream.bytes, "sha256": stream.digest.hexdigest()}
        else:
            (self._folder / name).unlink()
        done.set_result(results)
        return done

    def _write(self, stream: _HashedFile, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
        value = planner.resolve_data(item)
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{item.index.fqn}: not a tensor; only tensors are stored there")
        offset = stream.bytes
        stream.write(value)
        return WriteResult(
            index=item.index, size_in_bytes=stream.bytes - offset, storage_data=_Place(file=name, offset=offset)
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' parts."""
        places: dict[MetadataIndex, _Place] = {each.index: each.storage_data for part in results for each in part}
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{name}: not a tensor; only tensors are stored there")
            parts = [
                {"start": list(chunk.offsets), "shape": list(chunk.sizes), "file": place.file, "offset": place.offset}
                for chunk in entry.chunks
                if math.prod(chunk.sizes)
                for place in [places[MetadataIndex(name, chunk.offsets)]]
            ]
            tensors[name] = {"dtype": name_of_dtype(entry.properties.dtype), "shape": list(entry.size), "parts": parts}
        data = json.dumps(tensors, separators=(",", ":")).encode()
        with _create(self._folder / INDEX) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.files[INDEX] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path."""
        return True


def _create(path: Path) -> BinaryIO:
    return open(path, "xb")


class _HashedFile:
    """Copies off the device, the disk and the hash work at the same time: a save takes as long as the slowest of them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._disk, self._hash = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._pending: deque[tuple[Pending[Any], Pending[Any]]] = deque()
        self.digest, self.bytes = hashlib.sha256(), 0

    def write(self, value: Tensor) -> None:
        data = raw(value)
        self.bytes += len(data)
        self._pending.append((self._disk.submit(self._file.write, data), self._hash.submit(self.digest.update, data)))
        if len(self._pending) > _AHEAD:
            self._wait()

    def _wait(self) -> None:
        for each in self._pending.popleft():
            each.result()

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            while self._pending and kind is None:
                self._wait()
        finally:
            self._disk.shutdown()
            self._hash.shutdown()
        self._file.flush()


def raw(value: Tensor) -> memoryview:
    """The bytes of a tensor, in row-major order, shared with it where it is contiguous on the CPU."""
    if value.layout != torch.strided or value.is_quantized:
        raise CheckpointError(f"a {value.layout} tensor of {value.dtype}: only dense tensors are stored")
    here = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return here.view(torch.uint8).numpy().data if here.numel() else memoryview(b"")


def name_of_dtype(dtype: torch.dtype) -> str:
    """`float32`; only of dtypes that are stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"tensors of {dtype} are not stored")
    return name


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name."""
    if name not in _DTYPES:
        raise ValueError(f"no dtype {name!r}")
    return _DTYPES[name]


# Reading


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored tensor."""

    dtype: torch.dtype
    shape: torch.Size
    parts: tuple[tuple[ChunkStorageMetadata, _Place], ...]


def read_index(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Entry]:
    """The stored tensors by name. `files`: those of the manifest, whose sizes and hashes were checked."""
    path = folder / INDEX
    try:
        plain = parse_object(read_regular(path), str(path))
        return {name: _entry(name, each, files) for name, each in plain.items()}
    except (DocumentError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error) if isinstance(error, DocumentError) else f"{path}: {error}"
        raise CheckpointError(f"{reason}; use an older checkpoint") from error


def _entry(name: str, plain: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> Entry:
    dtype, shape = dtype_named(plain["dtype"]), _sizes(plain["shape"])
    if math.prod(max(size, 1) for size in shape) >= 2**48:
        raise ValueError(f"{name}: a tensor of {list(shape)}")
    parts = []
    for part in plain["parts"]:
        start, sizes, file, offset = _sizes(part["start"]), _sizes(part["shape"]), part["file"], part["offset"]
        if file == INDEX or file not in files:
            raise ValueError(f"{name}: {file!r} is not a data file of this checkpoint")
        (offset,) = _sizes([offset])
        if offset + math.prod(sizes) * dtype.itemsize > files[file]["bytes"]:
            raise ValueError(f"{name}: bytes from {offset:,} on are beyond the end of {file}")
        if len(start) != len(shape) or len(sizes) != len(shape) or not math.prod(sizes):
            raise ValueError(f"{name}: a part {list(sizes)} at {list(start)} in a tensor {list(shape)}")
        if any(at + size > whole for at, size, whole in zip(start, sizes, shape, strict=True)):
            raise ValueError(f"{name}: the part {list(sizes)} at {list(start)} leaves the tensor {list(shape)}")
        parts.append((ChunkStorageMetadata(start, sizes), _Place(file=file, offset=offset)))
    if sum(math.prod(chunk.sizes) for chunk, _ in parts) != math.prod(shape) or _overlap([chunk for chunk, _ in parts]):
        raise ValueError(f"{name}: its parts do not cover it exactly once")
    return Entry(dtype=dtype, shape=shape, parts=tuple(parts))


def _sizes(plain: Any) -> torch.Size:
    if not isinstance(plain, list) or not all(type(each) is int and 0 <= each < 2**62 for each in plain):
        raise ValueError(f"{plain!r} is not a list of sizes")
    return torch.Size(plain)


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether two of them share an element: a sweep along the dimension that separates most."""
    if len(chunks) < 2:
        return False
    if not chunks[0].offsets:
        return True
    dim = max(range(len(chunks[0].offsets)), key=lambda each: len({chunk.offsets[each] for chunk in chunks}))
    open_ones: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda each: each.offsets[dim]):
        open_ones = [each for each in open_ones if each.offsets[dim] + each.sizes[dim] > chunk.offsets[dim]]
        if any(_share(each, chunk) for each in open_ones):
            return True
        open_ones.append(chunk)
    return False


def _share(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + size and b < a + length
        for a, length, b, size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


class Reader(StorageReader):
    """Reads the rows that the planner asks for."""

    def __init__(self, folder: Path, entries: Mapping[str, Entry]) -> None:
        self._folder, self.entries = folder, entries
        self._parts = {
            MetadataIndex(name, chunk.offsets): (entry.dtype, chunk.sizes, place)
            for name, entry in entries.items()
            for chunk, place in entry.parts
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        """Called before each load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in torch's words."""
        return Metadata({
            name: TensorStorageMetadata(TensorProperties(entry.dtype), entry.shape, [chunk for chunk, _ in entry.parts])
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
        for name, items in self._by_file(plan.items):
            with open_regular(self._folder / name) as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read(file, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _by_file(self, items: Sequence[ReadItem]) -> Iterator[tuple[str, list[ReadItem]]]:
        found: dict[str, list[ReadItem]] = {}
        for item in sorted(items, key=lambda each: self._parts[each.storage_index][2].offset):
            found.setdefault(self._parts[item.storage_index][2].file, []).append(item)
        yield from found.items()

    def _read(self, file: BinaryIO, item: ReadItem) -> Tensor:
        """The region of a part that `item` names; of its first dimension only the rows in question are read."""
        dtype, sizes, place = self._parts[item.storage_index]
        first, count = (item.storage_offsets[0], item.lengths[0]) if sizes else (0, 1)
        row = math.prod(sizes[1:]) * dtype.itemsize
        data = torch.empty(count * row, dtype=torch.uint8)
        file.seek(place.offset + first * row)
        if file.readinto(data.numpy()) != len(data):  # type: ignore[attr-defined]
            raise CheckpointError(f"{self._folder / place.file}: cut short while it was read")
        value = data.view(dtype).reshape(count, *sizes[1:]) if sizes else data.view(dtype).reshape(())
        for dim in range(1, len(sizes)):
            value = value.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        return value

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path."""
        return True


class TensorPlanner(DefaultLoadPlanner):
    """torch's planner without its unpickler."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: the index lists tensors only."""
        raise CheckpointError(f"{read_item.dest_index.fqn}: not a tensor")
