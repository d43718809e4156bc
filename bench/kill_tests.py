"""Packings, and readers that fill a cache, killed (kill -9, every process of them) at random moments, and what they leave behind."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.sample_dataset import Plain, plain
from echelon.data.packed.manifest import FILE_NAME
from echelon.data.packed.reader import Packed
from echelon.errors import DataError

_PACK = """
import sys
from pathlib import Path
import numpy as np
from echelon.data.packed.from_arrays import ArrayPackingSource
from echelon.data.packed.pack import pack

class Slow(ArrayPackingSource):
    def read(self, start, stop):
        import time
        time.sleep(0.002)
        return super().read(start, stop)

rows = np.random.default_rng(0).integers(0, 256, (20000, 300), dtype=np.uint8)
print("begin", flush=True)
pack(Slow({"x": rows, "y": np.arange(20000)}, {"tuple": ["x", "y"]}, {}), Path(sys.argv[1]), shards=8, processes=2)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How often a packing was killed, and everything that was wrong afterwards."""

    kills: int
    wrong: list[str]


def unbroken(folder: Path) -> tuple[dict[str, bytes], float]:
    """The files of a packing that was left alone, and the seconds it took once it had begun."""
    process = _start(folder)
    began = time.monotonic()
    if process.wait():
        raise RuntimeError("a packing that was left alone failed")
    return _files(folder), time.monotonic() - began


def kill_packing(folder: Path, right: dict[str, bytes], after: float, draw: random.Random) -> Outcome:
    """Kill a packing `after` seconds, again and again, until one comes through; then compare its files."""
    wrong: list[str] = []
    kills = 0
    while True:
        process = _start(folder)
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            wrong += _looked_whole(folder, right)
            after = after * (1 + draw.random()) + 0.02  # each attempt lives longer: one comes through
            continue
        if process.returncode:
            wrong.append(f"packing again failed with exit code {process.returncode}")
        break
    if _files(folder) != right:
        wrong.append("the files differ from those of an unbroken packing")
    return Outcome(kills=kills, wrong=wrong)


def _looked_whole(folder: Path, right: dict[str, bytes]) -> list[str]:
    """A half packed folder must not be taken for a data set, and no file under its final name may be wrong."""
    found = []
    if folder.is_dir():
        for path in folder.glob("shard-*.arrow"):
            if path.read_bytes() != right[path.name]:
                found.append(f"{path.name} had its name before it was whole")
        try:
            if len(Packed(folder)) != 20000 or _files(folder)[FILE_NAME] != right[FILE_NAME]:
                found.append("a half packed folder was read")
        except DataError:
            pass
    return found


def _start(folder: Path) -> subprocess.Popen[bytes]:
    """A packing in a group of processes of its own, once it has begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PACK, str(folder)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout as said:
        said.readline()
    return process


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


#: The store gives little at a time, and slowly: most kills fall between two pieces of a copy.
_READ = """
import pickle, sys, time
import numpy as np
from bench.sample_dataset import plain
from echelon.data import Packed
from echelon.data.packed import remote_store

def slowly(self, *what, quickly=remote_store.RemoteStore._read_chunks):
    for piece in quickly(self, *what):
        time.sleep(0.001)
        yield piece

remote_store._CHUNK_BYTES, remote_store.RemoteStore._read_chunks = 2**14, slowly
right = pickle.load(open(sys.argv[5], "rb"))
data = Packed(sys.argv[1], cache=sys.argv[2], cache_bytes=int(sys.argv[3]), timeout=30)
draw = np.random.default_rng(int(sys.argv[4]))
print("open", flush=True)
while True:
    number = int(draw.integers(0, len(data)))
    if plain(data[number]) != right[number]:
        sys.exit(f"sample {number} is wrong")
"""


def kill_readers(store: str, right: list[Plain], cache: Path, kills: int, draw: random.Random) -> list[str]:
    """Readers in pairs, on a cache that holds half of the data, killed at random; then all of it is read. Returns what was wrong."""
    known = cache.with_name("right")
    known.write_bytes(pickle.dumps(right))
    shards = Packed(store, cache=cache).manifests[0].shards
    limit = sum(shard.bytes for shard in shards) // 2
    wrong: list[str] = []
    for turn in range(0, kills, 2):
        words = [sys.executable, "-c", _READ, store, str(cache), str(limit)]
        pair = [
            subprocess.Popen(
                [*words, str(turn + number), str(known)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for number in range(2)
        ]
        for reader in pair:
            assert reader.stdout is not None
            reader.stdout.readline()
        time.sleep(draw.random() * 0.1)
        for reader in pair:
            ended = reader.poll()
            reader.kill()
            _, said = reader.communicate()
            if ended is not None:
                wrong.append(said.strip()[-300:])
    data = Packed(store, cache=cache, cache_bytes=limit)
    wrong += [f"sample {number} is wrong" for number in range(len(right)) if plain(data[number]) != right[number]]
    held = sum(path.stat().st_size for path in cache.iterdir())
    if held > limit:
        wrong.append(f"the cache holds {held:,} bytes of {limit:,}")
    return wrong
