"""Checkpoints of servers: one safetensors file per shard, each as of one log number, and a manifest that completes them.

    FOLDER/manifest.json          format, shards, specs, settings, per shard: file, sha256, bytes, lsn; last its own sha256
    FOLDER/shard-00042-PROCESS-LSN.safetensors

They are written to FOLDER.partial while workers go on; the manifest comes last, then the folder is renamed. Deduplication, clocks and
optimizer state are included, so that nothing is applied twice to a worker that continues after a restore.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import CheckpointError, DocumentError
from echelon.files import atomic_write, atomic_writer, sync_folder
from echelon.plan.sealed_json import open_regular, read_regular, read_unsealed_format, seal, unseal
from echelon.server.protocol.event_loop import EventLoop
from echelon.server.store import SnapshotPart
from echelon.server.store.safetensors_file import DAMAGE_ERRORS, SafetensorsFile, encode_header

CHECKPOINT_FORMAT = 2
MANIFEST_NAME = "manifest.json"
#: In the names of files that this process writes: after a failover two heads may write the same shard, and the manifest names one.
_PROCESS_TOKEN = secrets.token_hex(4)


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is written."""
    return folder.with_name(folder.name + ".partial")


def _previous_folder(folder: Path) -> Path:
    """Where a checkpoint is moved while another replaces it."""
    return folder.with_name(f".{folder.name}.old")


def _finish_rename(folder: Path) -> None:
    """Rename a complete checkpoint, also after a crash in the middle of `complete_checkpoint`."""
    if not folder.exists() and (partial_folder(folder) / MANIFEST_NAME).is_file():
        with contextlib.suppress(FileNotFoundError):  # a reader may do the same
            os.rename(partial_folder(folder), folder)
        sync_folder(folder.parent)


def check_target_folder(folder: Path) -> None:
    """CheckpointError unless a checkpoint may be written to this folder: it replaces another checkpoint, and nothing else."""
    if not folder.is_absolute():
        raise CheckpointError(f"{folder}: servers have their own working directories; give an absolute path")
    _finish_rename(folder)
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / MANIFEST_NAME).is_file():
            raise CheckpointError(f"{folder}: holds other things than a checkpoint of servers; give a new folder")
    elif folder.exists() or folder.is_symlink():
        raise CheckpointError(f"{folder}: is not a folder; give a new one")
    names = ("shard-", ".shard-", MANIFEST_NAME, f".{MANIFEST_NAME}")
    for other in (partial_folder(folder), _previous_folder(folder)):
        if other.is_dir() and any(not path.name.startswith(names) for path in other.iterdir()):
            raise CheckpointError(f"{other}: holds other things than an unfinished checkpoint; give a new folder")


def write_shard(folder: Path, shard: int, parts: Sequence[SnapshotPart]) -> dict[str, Any]:
    """Write one shard; its entry in the manifest."""
    counts = [(meta, len(part)) for meta, part in parts]
    names = [name for _, names in _name_arrays(counts) for name in names]
    arrays = [np.ascontiguousarray(array) for _, part in parts for array in part]
    tensors = {name: (array.dtype, array.shape) for name, array in zip(names, arrays, strict=True)}
    header, _, byte_count = encode_header(tensors, {"parts": json.dumps(counts), "shard": str(shard)})
    folder.mkdir(parents=True, exist_ok=True)
    lsn, digest = int(parts[0][0]["lsn"]), hashlib.sha256()
    file_name = f"shard-{shard:05d}-{_PROCESS_TOKEN}-{lsn}.safetensors"
    chunks: list[bytes | memoryview] = [header, *(array.data for array in arrays)]
    with atomic_writer(folder / file_name) as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
    return {"shard": shard, "file": file_name, "sha256": digest.hexdigest(), "bytes": byte_count, "lsn": lsn}


def _name_arrays(parts: Iterable[tuple[dict[str, Any], int]]) -> list[tuple[dict[str, Any], list[str]]]:
    """The names of each part's arrays in a file."""
    return [(meta, [f"{part:06d}.{n:03d}" for n in range(count)]) for part, (meta, count) in enumerate(parts)]


def parse_parts(file: SafetensorsFile) -> list[tuple[dict[str, Any], list[str]]]:
    """The parts of a shard's file, and the names of their arrays."""
    return _name_arrays(json.loads(file.metadata["parts"]))


def complete_checkpoint(folder: Path, manifest: Mapping[str, Any]) -> None:
    """All shards are written: write the manifest and rename the folder."""
    check_target_folder(folder)
    partial_path = partial_folder(folder)
    listed = {entry["file"] for entry in manifest["files"].values()}
    present = {path.name for path in partial_path.iterdir()}
    if missing := sorted(listed - present):
        counts = f"{len(missing)} of {len(listed)}"
        raise CheckpointError(f"{folder}: {counts} shards were not written there ({missing[0]}); write it again")
    for stray in present - listed:
        (partial_path / stray).unlink()
    previous_folder, replaces = _previous_folder(folder), folder.exists()
    shutil.rmtree(previous_folder, ignore_errors=True)
    # From here on a reader may rename it (`_finish_rename`), so `folder` need not be the previous one.
    atomic_write(partial_path / MANIFEST_NAME, seal({"format": CHECKPOINT_FORMAT, **manifest}))
    if replaces:
        os.rename(folder, previous_folder)
    _finish_rename(folder)
    shutil.rmtree(previous_folder, ignore_errors=True)


#: The fields of a manifest besides its format.
_MANIFEST_FIELDS = {"shards": int, "specs": list, "settings": dict, "count": int, "files": dict}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint."""
    path = folder / MANIFEST_NAME
    try:
        _finish_rename(folder)
        data = read_regular(path)
        if read_unsealed_format(data) == 1:
            problem = "format 1, whose manifest has no hash"
            raise CheckpointError(f"{path}: {problem}; export its tables with the echelon that wrote it")
        manifest = unseal(data, str(path))
    except OSError as error:
        reason = f"{MANIFEST_NAME}: {error.strerror}"
        raise CheckpointError(f"{folder}: not a checkpoint of servers ({reason}); give a complete one") from None
    except DocumentError as error:
        raise CheckpointError(f"{error}; use an older checkpoint") from None
    if manifest.get("format") != CHECKPOINT_FORMAT:
        raise CheckpointError(f"{path}: not format {CHECKPOINT_FORMAT}; another version of echelon wrote it")
    if wrong := [name for name, kind in _MANIFEST_FIELDS.items() if not isinstance(manifest.get(name), kind)]:
        raise CheckpointError(f"{path}: {', '.join(wrong)} missing or of another type; use an older checkpoint")
    return manifest


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint all of whose files are present and undamaged."""
    from concurrent.futures import ThreadPoolExecutor

    manifest = read_manifest(folder)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as executor:
        list(executor.map(lambda shard: len(_read_verified(folder, manifest, shard)[1]), range(manifest["shards"])))
    return manifest


def shard_file(folder: Path, manifest: Mapping[str, Any], shard: int) -> Path:
    entry = manifest["files"].get(str(shard))
    if not isinstance(entry, dict) or not {"file", "sha256"} <= set(entry):
        raise CheckpointError(f"{folder}: shard {shard} is missing; use an older checkpoint")
    path = folder / str(entry["file"])
    if path.name != entry["file"]:
        raise CheckpointError(f"{folder / MANIFEST_NAME}: shard {shard} is in {path}, outside this folder")
    return path


def _read_verified(folder: Path, manifest: Mapping[str, Any], shard: int) -> tuple[Path, bytes]:
    """The file of a shard, as the manifest describes it."""
    path, expected = shard_file(folder, manifest, shard), manifest["files"][str(shard)]["sha256"]
    try:
        with open_regular(path) as file:
            data = bytes(file.read())
        if hashlib.sha256(data).hexdigest() != expected:
            raise DocumentError(f"{path}: damaged, its SHA-256 is not {str(expected)[:12]}...")
    except (OSError, DocumentError) as error:
        reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else error
        raise CheckpointError(f"{reason}; use an older checkpoint") from None
    return path, data


def load_shard(folder: Path, shard: int) -> list[SnapshotPart]:
    """One shard of a checkpoint, verified."""
    path, data = _read_verified(folder, read_manifest(folder), shard)
    try:
        file = SafetensorsFile(data)
        return [(meta, [file.tensor(name) for name in names]) for meta, names in parse_parts(file)]
    except DAMAGE_ERRORS as error:
        raise CheckpointError(f"{path}: {error}; another version of echelon wrote it") from None


class CheckpointWriter:
    """Writes shards in threads while the loop goes on: one shard is copied and written at a time, between other work.

    `snapshot_shard` copies a shard, if this server still has it; `report_result` is called for each that is on disk, or failed.
    """

    def __init__(
        self,
        loop: EventLoop,
        snapshot_shard: Callable[[int], Sequence[SnapshotPart] | None],
        report_result: Callable[[dict[str, Any]], None],
    ) -> None:
        self._snapshot_shard, self._report_result = snapshot_shard, report_result
        #: Shards to copy, the one that is being written, and what came of it: checkpoint, folder, shard.
        self._queue: list[tuple[int, Path, int]] = []
        self._current: tuple[int, Path, int] | None = None
        self._result: dict[str, Any] = {}
        read_fd, self._wakeup_fd = os.pipe()
        loop.watch(read_fd, lambda: self._on_written(read_fd))

    def write(self, checkpoint_id: int, folder: Path, shards: Sequence[int]) -> None:
        # The id alone is not enough: a restarted controller counts from 1.
        jobs = [(checkpoint_id, partial_folder(folder), shard) for shard in shards]
        known, queued = {*self._queue, self._current}, [job for job in self._queue if job[:2] == jobs[0][:2]]
        self._queue = queued + [job for job in jobs if job not in known]
        self._start_next()

    def _start_next(self) -> None:
        while self._queue and self._current is None:
            job = self._queue.pop(0)
            parts = self._snapshot_shard(job[2])
            if parts is not None:
                self._current = job
                threading.Thread(target=self._write, args=(*job, parts), name="echelon-checkpoint", daemon=True).start()

    def _write(self, checkpoint_id: int, folder: Path, shard: int, parts: Sequence[SnapshotPart]) -> None:
        try:
            self._result = write_shard(folder, shard, parts)
        except Exception as error:  # of any type: the requester must hear, and the next shard be written
            self._result = {"error": f"{folder}: shard {shard} cannot be written ({type(error).__name__}: {error})"}
        self._result["id"] = checkpoint_id
        os.write(self._wakeup_fd, b"!")

    def _on_written(self, fd: int) -> None:
        os.read(fd, 1)
        self._current = None
        self._report_result(self._result)
        self._start_next()
