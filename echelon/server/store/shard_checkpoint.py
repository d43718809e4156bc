"""Checkpoints of servers: one safetensors file per shard, each as it was at one log number, and a manifest that makes them a whole.

    FOLDER/manifest.json          format, shards, specs, settings, per shard: file, sha256, bytes, lsn; last its own sha256
    FOLDER/shard-00042-LIFE-LSN.safetensors

Written to FOLDER.partial while workers go on; the manifest comes last and the folder gets its name then. Windows, clocks and optimizer
state are inside, so that a worker that goes on after a restore has nothing applied twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import CheckpointError, DocumentError
from echelon.plan.sealed_json import open_regular, read_regular, read_unsealed_format, seal, unseal
from echelon.server import atomic_file
from echelon.server.protocol.event_loop import EventLoop
from echelon.server.replica.shard_state import SnapshotPart

CHECKPOINT_FORMAT = 2
MANIFEST_NAME = "manifest.json"
#: Part of the names of files that this process writes.
_PROCESS_TOKEN = secrets.token_hex(4)


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is until it is whole."""
    return folder.with_name(folder.name + ".partial")


def _previous_folder(folder: Path) -> Path:
    """Where the checkpoint before it is until it has its name."""
    return folder.with_name(f".{folder.name}.old")


def _finish_rename(folder: Path) -> None:
    """Give a whole checkpoint its name, where it has none yet: also after a crash in the middle of `complete_checkpoint`."""
    if not folder.exists() and (partial_folder(folder) / MANIFEST_NAME).is_file():
        with contextlib.suppress(FileNotFoundError):  # whoever reads it does so, too
            os.rename(partial_folder(folder), folder)
        atomic_file.fsync_folder(folder.parent)


def check_target_folder(folder: Path) -> None:
    """A checkpoint takes the place of another one, and of nothing else."""
    if not folder.is_absolute():
        raise CheckpointError(f"{folder}: servers have folders of their own to start from; give an absolute path")
    _finish_rename(folder)
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / MANIFEST_NAME).is_file():
            raise CheckpointError(
                f"{folder}: holds other things than a checkpoint of servers, which would be deleted; give a new folder"
            )
    elif folder.exists() or folder.is_symlink():
        raise CheckpointError(f"{folder}: is no folder; give a new one")
    for partial_or_previous in (partial_folder(folder), _previous_folder(folder)):
        if partial_or_previous.is_dir() and any(
            not path.name.startswith(("shard-", MANIFEST_NAME)) for path in partial_or_previous.iterdir()
        ):
            raise CheckpointError(
                f"{partial_or_previous}: holds other things than a checkpoint that was begun; give a new folder"
            )


def write_shard(folder: Path, shard: int, parts: Sequence[SnapshotPart]) -> dict[str, Any]:
    """Write one shard; what the manifest says of it."""
    arrays = {
        f"{part_number:06d}.{array_number:03d}": np.ascontiguousarray(array)
        for part_number, (_, part) in enumerate(parts)
        for array_number, array in enumerate(part)
    }
    metas = json.dumps([[meta, len(part)] for meta, part in parts])
    folder.mkdir(parents=True, exist_ok=True)
    # Two heads may write the same shard after a failover: each its own file, the manifest names the one that counts.
    name = f"shard-{shard:05d}-{_PROCESS_TOKEN}-{int(parts[0][0]['lsn'])}.safetensors"
    temporary_path = folder / f"{name}.new"
    digest = hashlib.sha256()
    with open(temporary_path, "wb") as file:
        # Piece by piece: safetensors' own `write_shard` has a large shard in memory twice, its `save_file` leaves files that others cannot read.
        header = _encode_header(arrays, {"parts": metas, "shard": str(shard)})
        chunks: list[bytes | memoryview] = [header, *(array.data for array in arrays.values())]
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        byte_count = file.tell()
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary_path, folder / name)
    return {
        "shard": shard,
        "file": name,
        "sha256": digest.hexdigest(),
        "bytes": byte_count,
        "lsn": int(parts[0][0]["lsn"]),
    }


def _encode_header(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with: kinds, shapes and places of the arrays that follow."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, array in arrays.items():
        if array.dtype.kind not in "fiu":
            raise CheckpointError(f"{name}: numbers of {array.dtype} are not in the format")
        header[name] = {
            "dtype": f"{array.dtype.kind.upper()}{8 * array.itemsize}",
            "shape": array.shape,
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    header_json = json.dumps(header).encode()
    header_json += b" " * (-len(header_json) % 8)
    return len(header_json).to_bytes(8, "little") + header_json


def complete_checkpoint(folder: Path, manifest: Mapping[str, Any]) -> None:
    """All shards are there: the manifest, and the folder's name."""
    check_target_folder(folder)
    partial_path = partial_folder(folder)
    listed_files = {entry["file"] for entry in manifest["files"].values()}
    present_files = {path.name: path for path in partial_path.iterdir()}
    if missing_files := sorted(listed_files - present_files.keys()):
        raise CheckpointError(
            f"{folder}: {len(missing_files)} of {len(listed_files)} shards were not written there ({missing_files[0]}); write it again"
        )
    for stray in present_files.keys() - listed_files:
        present_files[stray].unlink()
    previous_folder, replaces = _previous_folder(folder), folder.exists()
    shutil.rmtree(previous_folder, ignore_errors=True)
    # From here on whoever looks for it may give it its name (`_finish_rename`), so that what is there need not be the one before.
    atomic_file.write_bytes(partial_path / MANIFEST_NAME, seal({"format": CHECKPOINT_FORMAT, **manifest}))
    if replaces:
        os.rename(folder, previous_folder)
    _finish_rename(folder)
    shutil.rmtree(previous_folder, ignore_errors=True)


#: What a manifest has beside its format.
_MANIFEST_FIELDS = {"shards": int, "specs": list, "settings": dict, "count": int, "files": dict}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a whole checkpoint."""
    path = folder / MANIFEST_NAME
    try:
        _finish_rename(folder)
        data = read_regular(path)
        if read_unsealed_format(data) == 1:
            raise CheckpointError(
                f"{path}: format 1, whose manifest has no hash; export its tables with the echelon that wrote it (`echelon server export`)"
            )
        manifest = unseal(data, str(path))
    except OSError as error:
        raise CheckpointError(
            f"{folder}: no checkpoint of servers ({MANIFEST_NAME}: {error.strerror}); give the folder of a whole one"
        ) from None
    except DocumentError as error:
        raise CheckpointError(f"{error}; take an older checkpoint") from None
    if manifest.get("format") != CHECKPOINT_FORMAT:
        raise CheckpointError(
            f"{path}: not of format {CHECKPOINT_FORMAT}; it was written by another version of echelon"
        )
    wrong_fields = [name for name, kind in _MANIFEST_FIELDS.items() if not isinstance(manifest.get(name), kind)]
    if wrong_fields:
        raise CheckpointError(
            f"{path}: {', '.join(wrong_fields)} missing or no such thing; it is damaged, take an older checkpoint"
        )
    return manifest


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint all of whose files are there and as they were written."""
    from concurrent.futures import ThreadPoolExecutor

    manifest = read_manifest(folder)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as executor:
        for _ in executor.map(
            lambda shard: len(_read_verified(folder, manifest, shard)[1]), range(int(manifest["shards"]))
        ):
            pass
    return manifest


def shard_file(folder: Path, manifest: Mapping[str, Any], shard: int) -> Path:
    """The file that a shard is in."""
    entry = manifest["files"].get(str(shard))
    if not isinstance(entry, dict) or not {"file", "sha256"} <= set(entry):
        raise CheckpointError(f"{folder}: shard {shard} is missing; take an older checkpoint")
    path = folder / str(entry["file"])
    if path.name != entry["file"]:
        raise CheckpointError(
            f"{folder / MANIFEST_NAME}: shard {shard} in {entry['file']!r}, which is not in this folder"
        )
    return path


def _read_verified(folder: Path, manifest: Mapping[str, Any], shard: int) -> tuple[Path, bytes]:
    """The file of a shard, which is what the manifest says."""
    path, expected_sha256 = shard_file(folder, manifest, shard), manifest["files"][str(shard)]["sha256"]
    try:
        with open_regular(path) as file:
            data = bytes(file.read())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; take an older checkpoint") from None
    except DocumentError as error:
        raise CheckpointError(f"{error}; take an older checkpoint") from None
    if hashlib.sha256(data).hexdigest() != expected_sha256:
        raise CheckpointError(
            f"{path}: its SHA-256 is not {str(expected_sha256)[:12]}..., it is damaged; take an older checkpoint"
        )
    return path, data


def load_shard(folder: Path, shard: int) -> list[SnapshotPart]:
    """One shard of a checkpoint, checked."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as decode

    path, data = _read_verified(folder, read_manifest(folder), shard)
    try:
        arrays = decode(data)
        header_length = int.from_bytes(data[:8], "little")
        metas = json.loads(json.loads(data[8 : 8 + header_length])["__metadata__"]["parts"])
        return [
            (meta, [arrays[f"{part_number:06d}.{array_number:03d}"] for array_number in range(count)])
            for part_number, (meta, count) in enumerate(metas)
        ]
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}; it was written by another version of echelon") from None


class CheckpointWriter:
    """Writes shards in a thread while the loop goes on: one snapshot is copied at a time, between other work."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[int, Path, int, Sequence[SnapshotPart]]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._queue: list[tuple[int, Path, int]] = []
        self._snapshot_shard: Callable[[int], Sequence[SnapshotPart] | None] = lambda shard: None
        self._report_result: Callable[[dict[str, Any]], None] = lambda details: None
        self._current: tuple[int, Path, int] | None = None
        read_fd, self._wakeup_fd = os.pipe()
        loop.watch(read_fd, lambda: self._on_results(read_fd))
        threading.Thread(target=self._write_jobs, name="echelon-checkpoint", daemon=True).start()

    def write(
        self,
        checkpoint_id: int,
        folder: Path,
        shards: Sequence[int],
        snapshot_shard: Callable[[int], Sequence[SnapshotPart] | None],
        report_result: Callable[[dict[str, Any]], None],
    ) -> None:
        """Write these shards; `snapshot_shard` copies one, `report_result` hears of each that is on the disk."""
        target_folder = partial_folder(folder)  # by this, too: a controller that was started again counts from 1
        queued_shards = {
            shard
            for other_id, other_folder, shard in self._queue
            if (other_id, other_folder) == (checkpoint_id, target_folder)
        }
        if self._current is not None and self._current[:2] == (checkpoint_id, target_folder):
            queued_shards.add(self._current[2])
        self._queue = [job for job in self._queue if job[:2] == (checkpoint_id, target_folder)]
        self._queue += [(checkpoint_id, target_folder, shard) for shard in shards if shard not in queued_shards]
        self._snapshot_shard, self._report_result = snapshot_shard, report_result
        self._start_next()

    def _start_next(self) -> None:
        while self._queue and self._current is None:
            checkpoint_id, folder, shard = self._queue.pop(0)
            parts = self._snapshot_shard(shard)
            if parts is not None:
                self._current = (checkpoint_id, folder, shard)
                self._jobs.put((checkpoint_id, folder, shard, parts))

    def _write_jobs(self) -> None:
        while True:
            checkpoint_id, folder, shard, parts = self._jobs.get()
            try:
                result = write_shard(folder, shard, parts)
            except Exception as error:  # of any kind: whoever waits must hear, and the next shard be written
                result = {"error": f"{folder}: shard {shard} cannot be written ({type(error).__name__}: {error})"}
            del parts
            self._results.put({"id": checkpoint_id, **result})
            os.write(self._wakeup_fd, b"!")

    def _on_results(self, fd: int) -> None:
        os.read(fd, 4096)
        while not self._results.empty():
            self._current = None
            self._report_result(self._results.get())
        self._start_next()
