"""Damaged files, killed packings and killed readers of a packed data set: a named error or the right data, never anything else.

    python -m bench.damage [--mutations 10000] [--kills 100] [--seed 0] [--json damage.json]

Mutations: a file of a small data set with columns of every kind is damaged at random (bits, cuts, zeros, noise, pieces moved, files
deleted or exchanged) and the whole set is read; the same with copies in a cache. Kills: a packing by two processes, and two readers that fill a small cache, are ended
with kill -9 at random moments; then the packing goes on, and the cache is read to its last byte.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Row, publish, tell
from bench.kills import kill_packing, kill_readers, unbroken
from echelon.data.packed.from_samples import Values
from echelon.data.packed.pack import pack
from echelon.data.packed.reader import Packed
from echelon.errors import DataError


def make(folder: Path, samples: int = 96, shards: int = 3) -> None:
    """A small data set with columns of every kind."""
    draw = np.random.default_rng(7)
    rows = [
        {
            "pixels": draw.integers(0, 256, (3, 6, 6), dtype=np.uint8),
            "tokens": draw.integers(0, 1000, number % 17).tolist(),
            "name": f"sample {number}",
            "label": number,
        }
        for number in range(samples)
    ]
    pack(Values(rows, {"source": "made for a test"}), folder, shards=shards)


def intact(folder: str | Path, **how: Any) -> list[Any]:
    """All samples, in a form that can be compared."""
    data = Packed(folder, **how)
    return [
        (sample["pixels"].tolist(), sample["tokens"].tolist(), sample["name"], sample["label"].item())
        for sample in data.__getitems__(range(len(data)))
    ]


def read(folder: str | Path, right: list[Any], **how: Any) -> str:
    """`right`: every sample is as it was; `named`: an error that names a file of the folder; anything else is a fault."""
    try:
        return "right" if intact(folder, **how) == right else "wrong data"
    except DataError as error:
        return "named" if str(folder) in str(error) else f"unnamed: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def mutated(folder: Path, draw: random.Random) -> str:
    """Damage one file of a packed data set, or one copy in a cache, in a random way; returns which and how."""
    path = draw.choice(sorted(path for path in folder.iterdir() if path.suffix in (".arrow", ".json")))
    how = draw.choice(sorted(MUTATIONS))
    MUTATIONS[how](path, draw)
    return f"{path.name}: {how}"


def _flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 8))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def _extend(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 5000)))


def _zero(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content))
    stop = min(len(content), start + draw.choice((1, 64, 4096)))
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)


def _noise(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content))
    stop = min(len(content), start + draw.choice((8, 64, 512)))
    content[start:stop] = draw.randbytes(stop - start)
    path.write_bytes(content)


def _move(path: Path, draw: random.Random) -> None:
    """Two pieces of a file change places."""
    content = bytearray(path.read_bytes())
    size = min(draw.choice((8, 64, 512)), len(content) // 2)
    one, other = sorted(draw.sample(range(len(content) - size + 1), 2))
    if other - one >= size:
        content[one : one + size], content[other : other + size] = (
            content[other : other + size],
            content[one : one + size],
        )
    path.write_bytes(content)


def _delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def _swap(path: Path, draw: random.Random) -> None:
    """Another file's content under this name."""
    other = draw.choice(sorted(path.parent.glob("*.arrow")))
    path.write_bytes(other.read_bytes())


MUTATIONS: dict[str, Callable[[Path, random.Random], None]] = {
    "bits flipped": _flip, "cut off": _truncate, "made longer": _extend, "zeros": _zero, "noise": _noise,
    "pieces moved": _move, "deleted": _delete, "another file": _swap,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Damage and kill, then read.")
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    draw = random.Random(given.seed)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if given.mutations:
            make(folder / "good")
            right = intact(folder / "good")
            rows.append(tell(_mutations(folder / "good", right, given.mutations, draw)))
            store, kept = f"file://{folder / 'good'}", folder / "kept"
            intact(store, cache=kept)
            rows.append(tell(_mutations(kept, right, given.mutations // 10, draw, store)))
        if given.kills:
            rows.append(tell(_packings(folder, given.kills, draw)))
            rows.append(tell(_readers(folder, given.kills, draw)))
    return publish("what damage and kills leave behind", rows, json_path=given.json)


def _mutations(good: Path, right: list[Any], count: int, draw: random.Random, store: str | None = None) -> Row:
    """Damage copies of a folder `count` times; with `store` it is the cache of what is there, which is made anew from it."""
    outcomes: Counter[str] = Counter()
    strange: list[str] = []
    expected = ("right", "named") if store is None else ("right",)
    bad = good.with_name("bad")
    for _ in range(count):
        shutil.copytree(good, bad)
        how = mutated(bad, draw)
        outcome = read(bad, right) if store is None else read(store, right, cache=bad)
        outcomes[outcome if outcome in expected else "strange"] += 1
        if outcome not in expected:
            strange.append(f"{how}: {outcome}")
        shutil.rmtree(bad)
    text = ", ".join(f"{each}: {outcomes[each]:,}" for each in (*expected, "strange"))
    what = {"what": f"{count:,} mutations of {'a packed set' if store is None else 'a cache'}"}
    return Row(what=what, value=len(strange), text=text, limit=0, detail={"strange": strange[:20]})


def _packings(folder: Path, count: int, draw: random.Random) -> Row:
    right, seconds = unbroken(folder / "whole")
    wrong: list[str] = []
    kills = 0
    while kills < count:
        found = kill_packing(folder / "killed", right, draw.random() * seconds, draw)
        kills += found.kills
        wrong += found.wrong
        shutil.rmtree(folder / "killed")
    text = f"{kills} kills, {len(wrong)} wrong"
    return Row(what={"what": "packings killed"}, value=len(wrong), text=text, limit=0, detail={"wrong": wrong[:20]})


def _readers(folder: Path, count: int, draw: random.Random) -> Row:
    make(folder / "far", samples=400, shards=8)
    wrong = kill_readers(f"file://{folder / 'far'}", folder / "cache", count, draw)
    text = f"{count} kills, {len(wrong)} wrong"
    return Row(
        what={"what": "readers killed while they fill a cache"},
        value=len(wrong),
        text=text,
        limit=0,
        detail={"wrong": wrong[:20]},
    )


if __name__ == "__main__":
    raise SystemExit(main())
