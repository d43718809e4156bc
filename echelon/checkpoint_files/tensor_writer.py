"""Write tensors for torch's distributed checkpoint (format: tensor_format.py)."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from concurrent.futures import Future as PendingFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from echelon.checkpoint_files.tensor_format import INDEX_FILE, FileLocation, PlainStorage, dtype_to_name, tensor_bytes
from echelon.errors import CheckpointError
from echelon.files import atomic_write

#: Tensors in flight to disk and hash.
_MAX_PENDING_WRITES = 3


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
        with _create_file(self._folder / name) as file:
            with _HashedFile(file) as stream:
                results = [self._write_item(stream, name, item, planner) for item in plan.items]
            os.fsync(file.fileno())
        if plan.items:
            self.files[name] = {"bytes": stream.byte_count, "sha256": stream.digest.hexdigest()}
        else:
            (self._folder / name).unlink()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_item(self, stream: _HashedFile, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{item.index.fqn}: not a tensor")
        offset = stream.byte_count
        stream.write(tensor)
        return WriteResult(
            index=item.index,
            size_in_bytes=stream.byte_count - offset,
            storage_data=FileLocation(file=name, offset=offset),
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' parts."""
        locations = {result.index: result.storage_data for rank_results in results for result in rank_results}
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{name}: not a tensor")
            parts: list[dict[str, Any]] = []
            for chunk in entry.chunks:
                if math.prod(chunk.sizes):
                    location: FileLocation = locations[MetadataIndex(name, chunk.offsets)]
                    region = {"start": list(chunk.offsets), "shape": list(chunk.sizes)}
                    parts.append({**region, "file": location.file, "offset": location.offset})
            dtype = dtype_to_name(entry.properties.dtype)
            tensors[name] = {"dtype": dtype, "shape": list(entry.size), "parts": parts}
        data = json.dumps(tensors, separators=(",", ":")).encode()
        atomic_write(self._folder / INDEX_FILE, data)
        self.files[INDEX_FILE] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _create_file(path: Path) -> BinaryIO:
    return open(path, "xb")


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
        write, update = (
            self._write_executor.submit(self._file.write, data),
            self._hash_executor.submit(self.digest.update, data),
        )
        self._pending.append((write, update))
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
