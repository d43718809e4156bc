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
from echelon.plan.sealed_json import format_without_seal, open_regular, read_regular, seal, unseal
from echelon.server import atomic_file
from echelon.server.protocol.event_loop import Loop
from echelon.server.replica.shard_state import Part

FORMAT = 2
MANIFEST = "manifest.json"
#: Part of the names of files that this process writes.
_LIFE = secrets.token_hex(4)


def partial(folder: Path) -> Path:
    """Where a checkpoint is until it is whole."""
    return folder.with_name(folder.name + ".partial")


def _former(folder: Path) -> Path:
    """Where the checkpoint before it is until it has its name."""
    return folder.with_name(f".{folder.name}.old")


def _name(folder: Path) -> None:
    """Give a whole checkpoint its name, where it has none yet: also after a crash in the middle of `complete`."""
    if not folder.exists() and (partial(folder) / MANIFEST).is_file():
        with contextlib.suppress(FileNotFoundError):  # whoever reads it does so, too
            os.rename(partial(folder), folder)
        atomic_file.sync_folder(folder.parent)


def require_room(folder: Path) -> None:
    """A checkpoint takes the place of another one, and of nothing else."""
    if not folder.is_absolute():
        raise CheckpointError(f"{folder}: servers have folders of their own to start from; give an absolute path")
    _name(folder)
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / MANIFEST).is_file():
            raise CheckpointError(
                f"{folder}: holds other things than a checkpoint of servers, which would be deleted; give a new folder"
            )
    elif folder.exists() or folder.is_symlink():
        raise CheckpointError(f"{folder}: is no folder; give a new one")
    for place in (partial(folder), _former(folder)):
        if place.is_dir() and any(not path.name.startswith(("shard-", MANIFEST)) for path in place.iterdir()):
            raise CheckpointError(f"{place}: holds other things than a checkpoint that was begun; give a new folder")


def save(folder: Path, shard: int, parts: Sequence[Part]) -> dict[str, Any]:
    """Write one shard; what the manifest says of it."""
    arrays = {
        f"{place:06d}.{number:03d}": np.ascontiguousarray(array)
        for place, (_, part) in enumerate(parts)
        for number, array in enumerate(part)
    }
    metas = json.dumps([[meta, len(part)] for meta, part in parts])
    folder.mkdir(parents=True, exist_ok=True)
    # Two heads may write the same shard after a failover: each its own file, the manifest names the one that counts.
    name = f"shard-{shard:05d}-{_LIFE}-{int(parts[0][0]['lsn'])}.safetensors"
    temporary = folder / f"{name}.new"
    digest = hashlib.sha256()
    with open(temporary, "wb") as file:
        # Piece by piece: safetensors' own `save` has a large shard in memory twice, its `save_file` leaves files that others cannot read.
        head = _head(arrays, {"parts": metas, "shard": str(shard)})
        pieces: list[bytes | memoryview] = [head, *(array.data for array in arrays.values())]
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / name)
    return {
        "shard": shard,
        "file": name,
        "sha256": digest.hexdigest(),
        "bytes": size,
        "lsn": int(parts[0][0]["lsn"]),
    }


def _head(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with: kinds, shapes and places of the arrays that follow."""
    head: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, array in arrays.items():
        if array.dtype.kind not in "fiu":
            raise CheckpointError(f"{name}: numbers of {array.dtype} are not in the format")
        head[name] = {
            "dtype": f"{array.dtype.kind.upper()}{8 * array.itemsize}",
            "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def complete(folder: Path, manifest: Mapping[str, Any]) -> None:
    """All shards are there: the manifest, and the folder's name."""
    require_room(folder)
    place = partial(folder)
    listed = {entry["file"] for entry in manifest["files"].values()}
    found = {path.name: path for path in place.iterdir()}
    if lacking := sorted(listed - found.keys()):
        raise CheckpointError(
            f"{folder}: {len(lacking)} of {len(listed)} shards were not written there ({lacking[0]}); write it again"
        )
    for stray in found.keys() - listed:
        found[stray].unlink()
    former, replaces = _former(folder), folder.exists()
    shutil.rmtree(former, ignore_errors=True)
    # From here on whoever looks for it may give it its name (`_name`), so that what is there need not be the one before.
    atomic_file.write_bytes(place / MANIFEST, seal({"format": FORMAT, **manifest}))
    if replaces:
        os.rename(folder, former)
    _name(folder)
    shutil.rmtree(former, ignore_errors=True)


#: What a manifest has beside its format.
_FIELDS = {"shards": int, "specs": list, "settings": dict, "count": int, "files": dict}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a whole checkpoint."""
    path = folder / MANIFEST
    try:
        _name(folder)
        data = read_regular(path)
        if format_without_seal(data) == 1:
            raise CheckpointError(
                f"{path}: format 1, whose manifest has no hash; export its tables with the echelon that wrote it (`echelon server export`)"
            )
        manifest = unseal(data, str(path))
    except OSError as error:
        raise CheckpointError(
            f"{folder}: no checkpoint of servers ({MANIFEST}: {error.strerror}); give the folder of a whole one"
        ) from None
    except DocumentError as error:
        raise CheckpointError(f"{error}; take an older checkpoint") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not of format {FORMAT}; it was written by another version of echelon")
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(manifest.get(name), kind)]
    if wrong:
        raise CheckpointError(
            f"{path}: {', '.join(wrong)} missing or no such thing; it is damaged, take an older checkpoint"
        )
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint all of whose files are there and as they were written."""
    from concurrent.futures import ThreadPoolExecutor

    manifest = read_manifest(folder)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for _ in threads.map(lambda shard: len(_bytes(folder, manifest, shard)[1]), range(int(manifest["shards"]))):
            pass
    return manifest


def file_of(folder: Path, manifest: Mapping[str, Any], shard: int) -> Path:
    """The file that a shard is in."""
    entry = manifest["files"].get(str(shard))
    if not isinstance(entry, dict) or not {"file", "sha256"} <= set(entry):
        raise CheckpointError(f"{folder}: shard {shard} is missing; take an older checkpoint")
    path = folder / str(entry["file"])
    if path.name != entry["file"]:
        raise CheckpointError(f"{folder / MANIFEST}: shard {shard} in {entry['file']!r}, which is not in this folder")
    return path


def _bytes(folder: Path, manifest: Mapping[str, Any], shard: int) -> tuple[Path, bytes]:
    """The file of a shard, which is what the manifest says."""
    path, expected = file_of(folder, manifest, shard), manifest["files"][str(shard)]["sha256"]
    try:
        with open_regular(path) as file:
            data = bytes(file.read())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; take an older checkpoint") from None
    except DocumentError as error:
        raise CheckpointError(f"{error}; take an older checkpoint") from None
    if hashlib.sha256(data).hexdigest() != expected:
        raise CheckpointError(
            f"{path}: its SHA-256 is not {str(expected)[:12]}..., it is damaged; take an older checkpoint"
        )
    return path, data


def load(folder: Path, shard: int) -> list[Part]:
    """One shard of a checkpoint, checked."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as decode

    path, data = _bytes(folder, read_manifest(folder), shard)
    try:
        arrays = decode(data)
        length = int.from_bytes(data[:8], "little")
        metas = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["parts"])
        return [
            (meta, [arrays[f"{place:06d}.{number:03d}"] for number in range(count)])
            for place, (meta, count) in enumerate(metas)
        ]
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}; it was written by another version of echelon") from None


class Writer:
    """Writes shards in a thread while the loop goes on: one snapshot is copied at a time, between other work."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[int, Path, int, Sequence[Part]]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._todo: list[tuple[int, Path, int]] = []
        self._take: Callable[[int], Sequence[Part] | None] = lambda shard: None
        self._tell: Callable[[dict[str, Any]], None] = lambda details: None
        self._busy: tuple[int, Path, int] | None = None
        ours, self._bell = os.pipe()
        loop.watch(ours, lambda: self._done(ours))
        threading.Thread(target=self._work, name="echelon-checkpoint", daemon=True).start()

    def write(
        self,
        number: int,
        folder: Path,
        shards: Sequence[int],
        take: Callable[[int], Sequence[Part] | None],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        """Write these shards; `take` copies one, `tell` hears of each that is on the disk."""
        place = partial(folder)  # by this, too: a controller that was started again counts from 1
        known = {shard for other, where, shard in self._todo if (other, where) == (number, place)}
        if self._busy is not None and self._busy[:2] == (number, place):
            known.add(self._busy[2])
        self._todo = [each for each in self._todo if each[:2] == (number, place)]
        self._todo += [(number, place, shard) for shard in shards if shard not in known]
        self._take, self._tell = take, tell
        self._next()

    def _next(self) -> None:
        while self._todo and self._busy is None:
            number, folder, shard = self._todo.pop(0)
            parts = self._take(shard)
            if parts is not None:
                self._busy = (number, folder, shard)
                self._jobs.put((number, folder, shard, parts))

    def _work(self) -> None:
        while True:
            number, folder, shard, parts = self._jobs.get()
            try:
                result = save(folder, shard, parts)
            except Exception as error:  # of any kind: whoever waits must hear, and the next shard be written
                result = {"error": f"{folder}: shard {shard} cannot be written ({type(error).__name__}: {error})"}
            del parts
            self._results.put({"id": number, **result})
            os.write(self._bell, b"!")

    def _done(self, handle: int) -> None:
        os.read(handle, 4096)
        while not self._results.empty():
            self._busy = None
            self._tell(self._results.get())
        self._next()
