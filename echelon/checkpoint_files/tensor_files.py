"""How tensors lie on disk, written and read for torch's distributed checkpoint; any plan reads what any plan wrote.

    rank-00000.bin ...   the bytes of tensor parts, one after another
    tensors.json         {name: {"dtype", "shape", "parts": [{"start", "shape", "file", "offset"}]}}

The index is validated before a byte is read: parts tile their tensor, lie within their file, and files are those of the manifest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as PendingFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from echelon.errors import CheckpointError, DocumentError
from echelon.files import atomic_write
from echelon.plan.sealed_json import open_regular, parse_object, read_regular

INDEX_FILE = "tensors.json"
_MAX_PENDING_WRITES = 3
_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
_NAMED_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
_DTYPES_BY_NAME = {name: dtype for name, dtype in _NAMED_DTYPES.items() if not name.startswith(("q", "bits"))}


@dataclass(frozen=True, slots=True)
class FileLocation:
    """Where the bytes of a part begin."""

    file: str
    offset: int


class PlainStorage:
    """What torch's storage readers and writers must define, where there is nothing to do."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Called before each save and load."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _completed(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order, without a copy where it is contiguous on the CPU."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"a {tensor.layout} tensor of {tensor.dtype}: only dense tensors can be stored")
    host_tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return host_tensor.view(torch.uint8).numpy().data if host_tensor.numel() else memoryview(b"")


def dtype_to_name(dtype: torch.dtype) -> str:
    """`float32`; raises CheckpointError for a dtype that cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES_BY_NAME:
        raise CheckpointError(f"tensors of {dtype} cannot be stored")
    return name


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype called `name`; raises ValueError if there is none."""
    if name not in _DTYPES_BY_NAME:
        raise ValueError(f"no dtype {name!r}")
    return _DTYPES_BY_NAME[name]


def damaged(path: Path, reason: object) -> CheckpointError:
    """The error for a file that is not as it was written. `reason`: a text, or the error from reading it."""
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
    problem = reason if isinstance(reason, DocumentError) else f"{path}: {text}"  # a DocumentError names the file
    return CheckpointError(f"{problem}; use an older checkpoint")


class TensorWriter(PlainStorage, StorageWriter):
    """Writes and hashes this rank's parts in one file; rank 0 writes the index too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: The manifest's entries for the files that this rank wrote.
        self.files: dict[str, dict[str, Any]] = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder exists."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name each rank's file."""
        return [replace(plan, storage_data=f"rank-{rank:05d}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the parts of `plan`."""
        name: str = plan.storage_data
        with (self._folder / name).open("xb") as file:
            with _HashedFile(file) as stream:
                results = [self._write_item(stream, name, item, planner) for item in plan.items]
            os.fsync(file.fileno())
        if plan.items:
            self.files[name] = {"bytes": stream.byte_count, "sha256": stream.digest.hexdigest()}
        else:
            (self._folder / name).unlink()
        return _completed(results)

    def _write_item(self, stream: _HashedFile, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{item.index.fqn}: not a tensor")
        offset = stream.byte_count
        stream.write(tensor)
        return WriteResult(item.index, stream.byte_count - offset, FileLocation(file=name, offset=offset))

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' parts."""
        locations = {result.index: result.storage_data for rank_results in results for result in rank_results}
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, dcp.TensorStorageMetadata):
                raise CheckpointError(f"{name}: not a tensor")
            parts = []
            for chunk in filter(lambda chunk: math.prod(chunk.sizes), entry.chunks):
                region = {"start": list(chunk.offsets), "shape": list(chunk.sizes)}
                parts.append(region | asdict(locations[dcp.MetadataIndex(name, chunk.offsets)]))
            dtype = dtype_to_name(entry.properties.dtype)
            tensors[name] = {"dtype": dtype, "shape": list(entry.size), "parts": parts}
        data = json.dumps(tensors, separators=(",", ":")).encode()
        atomic_write(self._folder / INDEX_FILE, data)
        self.files[INDEX_FILE] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


class _HashedFile:
    """Overlaps device copies, disk writes and hashing: a save takes as long as the slowest of them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._write_executor, self._hash_executor = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._pending: deque[tuple[PendingFuture[Any], PendingFuture[Any]]] = deque()
        self.digest, self.byte_count = hashlib.sha256(), 0

    def write(self, tensor: Tensor) -> None:
        data = tensor_bytes(tensor)
        self.byte_count += len(data)
        write = self._write_executor.submit(self._file.write, data)
        self._pending.append((write, self._hash_executor.submit(self.digest.update, data)))
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


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[tuple[dcp.ChunkStorageMetadata, FileLocation], ...]


def read_index(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> dict[str, TensorEntry]:
    """The stored tensors by name. `files`: the manifest's, whose sizes and hashes have been checked."""
    path = folder / INDEX_FILE
    try:
        index = parse_object(read_regular(path), str(path))
        return {name: _parse_entry(name, encoded, files) for name, encoded in index.items()}
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
        chunks.append((dcp.ChunkStorageMetadata(start, sizes), FileLocation(file=file, offset=offset)))
    regions = [chunk for chunk, _ in chunks]
    if sum(math.prod(chunk.sizes) for chunk in regions) != math.prod(shape) or _any_overlap(regions):
        raise ValueError(f"{name}: its parts do not cover it exactly once")
    return TensorEntry(dtype=dtype, shape=shape, chunks=tuple(chunks))


def _parse_sizes(encoded: Any) -> torch.Size:
    if not isinstance(encoded, list) or not all(type(size) is int and 0 <= size < 2**62 for size in encoded):
        raise ValueError(f"{encoded!r} is not a list of sizes")
    return torch.Size(encoded)


def _any_overlap(chunks: Sequence[dcp.ChunkStorageMetadata]) -> bool:
    """Whether two chunks share an element: they do if their ranges meet in every dim."""
    starts = np.array([tuple(chunk.offsets) for chunk in chunks], dtype=np.int64)
    stops = starts + np.array([tuple(chunk.sizes) for chunk in chunks], dtype=np.int64)
    return any(((starts[i] < stops[:i]) & (starts[:i] < stops[i])).all(axis=1).any() for i in range(1, len(chunks)))


class TensorReader(PlainStorage, StorageReader):
    """Reads the regions that the planner requests."""

    def __init__(self, folder: Path, entries: Mapping[str, TensorEntry]) -> None:
        self._folder, self.entries = folder, entries
        self._chunk_locations = {}
        for name, entry in entries.items():
            for chunk, location in entry.chunks:
                self._chunk_locations[dcp.MetadataIndex(name, chunk.offsets)] = (entry.dtype, chunk.sizes, location)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """The index as torch's metadata."""
        tensors: dict[str, Any] = {}
        for name, entry in self.entries.items():
            chunks = [chunk for chunk, _ in entry.chunks]
            tensors[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(entry.dtype), entry.shape, chunks)
        return dcp.Metadata(tensors)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The index has been read."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, file by file, in the order of their bytes."""

        def location(item: ReadItem) -> FileLocation:
            return self._chunk_locations[item.storage_index][2]

        ordered = sorted(plan.items, key=lambda item: (location(item).file, location(item).offset))
        for name, items in itertools.groupby(ordered, key=lambda item: location(item).file):
            with open_regular(self._folder / name) as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read_region(file, item))
                    planner.commit_tensor(item, target)
        return _completed(None)

    def _read_region(self, file: BinaryIO, item: ReadItem) -> Tensor:
        """The requested region of a part. Only its rows (of the first dim) are read."""
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
