"""What a packed data set holds, for people; and whether every byte of it is as it was written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed import block_layout
from echelon.data.packed import manifest as documents
from echelon.data.packed.manifest import Manifest
from echelon.data.packed.packing_source import Progress
from echelon.data.packed.remote_cache import Cache
from echelon.data.packed.remote_files import far_rows
from echelon.data.packed.remote_store import Store, is_url
from echelon.data.packed.row_reader import File, damage, wrong
from echelon.errors import DataError

#: Seconds without a byte from a store.
_TIMEOUT = 60.0


def manifest_of(folder: str) -> Manifest:
    """What a folder, here or on a store, says that it holds."""
    return Store(folder, _TIMEOUT).manifest() if is_url(folder) else documents.load(Path(folder))


def damages(folder: str, progress: Progress = lambda done, total: None) -> Iterator[str]:
    """Each damaged part of a packed data set, in words. Reads every byte. `progress(bytes done, bytes in all)`."""
    return _far(folder, progress) if is_url(folder) else _near(Path(folder), progress)


def _far(url: str, progress: Progress) -> Iterator[str]:
    """Of files on a store: each is fetched anew, and its first damage told."""
    manifest = manifest_of(url)
    with tempfile.TemporaryDirectory() as place:
        kept = Cache(Path(place), 2 * max(shard.bytes for shard in manifest.shards))
        rows = far_rows([Store(url, _TIMEOUT)], [manifest], kept, _TIMEOUT)
        done = 0
        for number, shard in enumerate(manifest.shards):
            problem = rows.problem(number)
            if problem:
                yield problem
            done += shard.bytes
            progress(done, manifest.bytes)


def _near(folder: Path, progress: Progress) -> Iterator[str]:
    manifest = documents.load(folder)
    done, first = 0, 0
    for shard in manifest.shards:
        file = File(path=folder / shard.file, shard=shard, block=manifest.block, first=first)
        first += shard.samples
        problem = wrong(file)
        if problem:
            yield problem
        else:
            content = np.memmap(file.path, np.uint8, "r")
            for block in range(len(shard.checksums)):
                problem = damage(content, manifest.columns, file, block)
                if problem:
                    yield problem
            if block_layout.frame(content, manifest.columns, shard) != shard.frame:
                yield f"{file.path}: Arrow's own part of it is damaged (its samples are not): other programs may fail to read it"
        done += shard.bytes
        progress(done, manifest.bytes)


def summary(folder: str, samples: int) -> dict[str, Any]:
    """Columns, counts, sizes, balance over the files, where it came from, and the first `samples` samples in words. All but the samples
    stand in the manifest; why those cannot be read, if they cannot, is the `problem`."""
    manifest = manifest_of(folder)
    counts = [shard.samples for shard in manifest.shards]
    sizes = [shard.bytes for shard in manifest.shards]
    first, problem = _first(folder, min(samples, manifest.samples))
    return {
        "folder": folder,
        "samples": manifest.samples,
        "bytes": manifest.bytes,
        "columns": {column.name: str(column) for column in manifest.columns},
        "sample": manifest.sample,
        "shards": {
            "count": len(counts),
            "fewest": min(counts),
            "most": max(counts),
            "smallest": min(sizes),
            "largest": max(sizes),
            "lanes": len(counts),
        },
        "block": manifest.block,
        "provenance": dict(manifest.provenance),
        "first": first,
        "problem": problem,
    }


def _first(folder: str, samples: int) -> tuple[list[str], str | None]:
    """The first samples in words, and what kept any more from being read."""
    from echelon.data.packed.reader import Packed

    found: list[str] = []
    try:
        shown: Any = Packed(folder) if samples > 0 else []
        while len(found) < samples:
            found.append(short(shown[len(found)]))
    except DataError as error:
        return found, str(error)
    return found, None


def short(value: Any) -> str:
    """A sample in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {short(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(short, value)) + ")"
    if isinstance(value, str | bytes):
        return repr(value if len(value) <= 40 else value[:37]) + ("" if len(value) <= 40 else "...")
    flat = value.reshape(-1)
    head = ", ".join(f"{part:.4g}" if isinstance(part, float) else str(part) for part in flat[:6].tolist())
    if not value.ndim:
        return head
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} [{head}{', ...' if flat.numel() > 6 else ''}]"
