"""Damaged files, killed packings and killed readers of a packed data set: a named error or the right data, never anything else.

    python -m bench.damage [--mutations 10000] [--kills 100] [--seed 0] [--json damage.json]

Mutations: a file of a small data set with columns of every kind is damaged at random (bits, cuts, zeros, noise, pieces moved, files
deleted or exchanged) and the set is read in one of several ways in turn: all samples, batches of a training, lengths, without what is
damaged, `verify`; the same with copies in a cache. Kills: a packing by two processes, and two readers that fill a small cache from a slow
store, are ended with kill -9 at random moments; then the packing goes on, and the cache is read to its last byte.
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

from bench.common import Row, publish, tell
from bench.kill_tests import kill_packing, kill_readers, unbroken
from bench.sample_dataset import WAYS, Plain, everything, make, outcome


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
            right = make(folder / "good")
            rows.append(tell(_mutations(folder / "good", right, given.mutations, draw)))
            store, kept = f"file://{folder / 'good'}", folder / "kept"
            everything(store, right, cache=kept)
            rows.append(tell(_mutations(kept, right, given.mutations // 10, draw, store)))
        if given.kills:
            rows.append(tell(_packings(folder, given.kills, draw)))
            rows.append(tell(_readers(folder, given.kills, draw)))
    return publish("what damage and kills leave behind", rows, json_path=given.json)


def _mutations(good: Path, right: list[Plain], count: int, draw: random.Random, store: str | None = None) -> Row:
    """Damage copies of a folder `count` times; with `store` it is the cache of what is there, which is made anew from it."""
    outcomes: Counter[str] = Counter()
    strange: list[str] = []
    expected = ("right", "named") if store is None else ("right",)
    bad = good.with_name("bad")
    for number in range(count):
        shutil.copytree(good, bad)
        way, how = sorted(WAYS)[number % len(WAYS)], mutated(bad, draw)
        found = outcome(way, bad, right) if store is None else outcome(way, store, right, cache=bad)
        outcomes[found if found in expected else "strange"] += 1
        if found not in expected:
            strange.append(f"{how}, {way}: {found}")
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
    right = make(folder / "far", 400, shards=8)
    wrong = kill_readers(f"file://{folder / 'far'}", right, folder / "cache", count, draw)
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
