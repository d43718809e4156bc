"""Shows what a packed data set holds, and verifies every byte of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from echelon.data.packed.manifest import Manifest, load_manifest
from echelon.data.packed.packing_source import ProgressCallback
from echelon.data.packed.remote_cache import FileCache
from echelon.data.packed.remote_files import open_remote_rows
from echelon.data.packed.remote_store import RemoteStore, is_url
from echelon.data.packed.shard_file import list_shard_files
from echelon.errors import DataError

#: Seconds without a byte from a store before a read fails.
_TIMEOUT_SECONDS = 60.0


def read_manifest(folder: str) -> Manifest:
    if is_url(folder):
        return RemoteStore(folder, _TIMEOUT_SECONDS).read_manifest()
    return load_manifest(Path(folder))


def find_damage(folder: str, progress: ProgressCallback = lambda done, total: None) -> Iterator[str]:
    """Describe each damaged part of a packed data set. Reads every byte. `progress(bytes done, bytes in all)`."""
    manifest = read_manifest(folder)
    done_bytes = 0
    for shard, problems in zip(manifest.shards, _find_problems(folder, manifest), strict=True):
        yield from problems
        done_bytes += shard.bytes
        progress(done_bytes, manifest.bytes)


def _find_problems(folder: str, manifest: Manifest) -> Iterator[Iterable[str]]:
    """The problems of each file; of one on a store, which is copied, the first."""
    if not is_url(folder):
        yield from (file.verify() for file in list_shard_files([Path(folder)], [manifest]))
        return
    with tempfile.TemporaryDirectory() as cache_folder:
        cache = FileCache(Path(cache_folder), 2 * max(shard.bytes for shard in manifest.shards))
        rows = open_remote_rows([RemoteStore(folder, _TIMEOUT_SECONDS)], [manifest], cache, _TIMEOUT_SECONDS)
        yield from ([damage[-1]] if damage else [] for damage in rows.find_damage())


def summarize(folder: str, samples: int) -> dict[str, Any]:
    """Summarize columns, counts, sizes, balance over the files and provenance from the manifest, and the first `samples` samples.

    `problem`: why those cannot be read, if they cannot."""
    manifest = read_manifest(folder)
    counts = [shard.samples for shard in manifest.shards]
    sizes = [shard.bytes for shard in manifest.shards]
    shards = {"count": len(counts), "fewest": min(counts), "most": max(counts), "smallest": min(sizes)}
    first, problem = _describe_first_samples(folder, min(samples, manifest.samples))
    return {
        "folder": folder, "samples": manifest.samples, "bytes": manifest.bytes,
        "columns": {column.name: str(column) for column in manifest.columns}, "sample": manifest.sample,
        "shards": {**shards, "largest": max(sizes), "lanes": len(counts)}, "block": manifest.block,
        "provenance": dict(manifest.provenance), "first": first, "problem": problem,
    }  # fmt: skip


def _describe_first_samples(folder: str, samples: int) -> tuple[list[str], str | None]:
    from echelon.data.packed.reader import Packed

    descriptions: list[str] = []
    try:
        dataset: Any = Packed(folder) if samples > 0 else []
        while len(descriptions) < samples:
            descriptions.append(format_sample(dataset[len(descriptions)]))
    except DataError as error:
        return descriptions, str(error)
    return descriptions, None


def format_sample(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_sample(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(format_sample, value)) + ")"
    if isinstance(value, str | bytes):
        return repr(value if len(value) <= 40 else value[:37]) + ("" if len(value) <= 40 else "...")
    flat = value.reshape(-1)
    preview = ", ".join(f"{part:.4g}" if isinstance(part, float) else str(part) for part in flat[:6].tolist())
    if not value.ndim:
        return preview
    more = ", ..." if flat.numel() > 6 else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} [{preview}{more}]"
