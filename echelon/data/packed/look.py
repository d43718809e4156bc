"""What a packed data set holds, for people; and whether every byte of it is as it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed import blocks
from echelon.data.packed import manifest as documents
from echelon.data.packed.rows import File, damage, wrong


def damages(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Iterator[str]:
    """Each damaged part of a packed data set, in words. Reads every byte. `progress(bytes done, bytes in all)`."""
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
            if blocks.frame(content, manifest.columns, shard) != shard.frame:
                yield f"{file.path}: Arrow's own part of it is damaged (its samples are not): other programs may fail to read it"
        done += shard.bytes
        progress(done, manifest.bytes)


def summary(folder: Path, samples: int) -> dict[str, Any]:
    """Columns, counts, sizes, balance over the files, where it came from, and the first `samples` samples in words."""
    from echelon.data.packed.reader import Packed

    manifest = documents.load(folder)
    counts = [shard.samples for shard in manifest.shards]
    sizes = [shard.bytes for shard in manifest.shards]
    shown = Packed(folder, check=True)
    return {
        "folder": str(folder),
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
            "lanes": shown.lanes,
        },
        "block": manifest.block,
        "provenance": dict(manifest.provenance),
        "first": [short(shown[number]) for number in range(min(samples, manifest.samples))],
    }


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
