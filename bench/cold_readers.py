"""Readers in processes of their own, all treated alike: from pages that the kernel has forgotten, from pages that are in memory but new to
the process, or after an epoch; one or several ranks at once. `bench.data` starts it.

    python -m bench.cold_readers READER DATA FOLDER RANK RANKS STATE PASSES SECONDS

It says "ready", waits for a line, reads PASSES epochs (each for SECONDS of CPU time at most) and prints for each the samples, the CPU
seconds (all threads and children) and the share of its pages that were in memory when it began.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from bench.loaders import MAKERS, READERS, SAMPLES, Reader

#: cold: pages are dropped before each pass, and there is memory for new ones. bare: the same where a virtual machine must first get that
#: memory back from its host. fresh: they are in memory, and the process has read none before its first pass. warm: it has
#: read an epoch before.
State = Literal["cold", "bare", "fresh", "warm"]

#: CPU seconds after which the epoch before a warm pass is left: it concerns those that need more than 0.1 ms for a sample.
WARMING = 15.0
_DONTNEED = 4  # Linux: of madvise


def together(
    reader: type[Reader], data: str, folder: Path, *, ranks: int, state: State, passes: int, seconds: float
) -> list[list[dict[str, float]]]:
    """What each of `ranks` processes measured, pass by pass, started at the same moment."""
    for rank in range(ranks):  # what they read is written before
        reader(MAKERS[data](folder, SAMPLES[data]), folder, rank=rank, ranks=ranks).close()
    words = [sys.executable, "-W", "ignore", "-m", "bench.cold_readers", reader.__name__, data, str(folder)]
    each = [
        subprocess.Popen(
            [*words, str(rank), str(ranks), state, str(passes), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in each:
        assert process.stdout is not None
        process.stdout.readline()
    found = []
    for process in each:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in each:
        said, wrong = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{reader.name} on {data}: {wrong[-2000:]}")
        found.append(json.loads(said.splitlines()[-1]))
    return found


def main(arguments: Sequence[str]) -> int:
    """One process of `together`."""
    name, data, folder = arguments[0], arguments[1], Path(arguments[2])
    rank, ranks, state = int(arguments[3]), int(arguments[4]), arguments[5]
    passes, seconds = int(arguments[6]), float(arguments[7])
    kind = next(reader for reader in READERS if reader.__name__ == name)
    reader = kind(MAKERS[data](folder, SAMPLES[data]), folder, rank=rank, ranks=ranks)
    steps = reader.material.samples // reader.batch
    if state == "fresh":
        for path in _files(folder):
            path.read_bytes()
    if state == "warm":
        warm(reader, steps)
    gc.collect()
    gc.freeze()  # a search of all that was imported takes longer than a pass, and comes in whichever pass it comes
    print("ready", flush=True)
    sys.stdin.readline()
    found = []
    for _ in range(passes):
        if state in ("cold", "bare"):
            forget(folder)
        if state == "cold":
            _settle(sum(path.stat().st_size for path in _files(folder)))
        held = in_memory(folder) if state in ("cold", "bare") else 1.0
        done, spent = _advanced(reader, steps, seconds)
        found.append({"samples": done * reader.batch, "seconds": spent, "resident": held})
    gc.unfreeze()
    print(json.dumps(found))
    return 0


def warm(reader: Reader, steps: int) -> None:
    """The epoch that every reader has before it is measured warm: pages, page tables, checksums and caches of its own are then there."""
    _advanced(reader, steps, WARMING)


def _advanced(reader: Reader, steps: int, seconds: float) -> tuple[int, float]:
    """Read `steps` batches, or for so many CPU seconds; returns how many it were and what they took."""
    begin, done = _processor(), 0
    while done < steps and _processor() - begin < seconds:
        some = min(8, steps - done)
        reader.advance(some)
        done += some
    return done, _processor() - begin


def _processor() -> float:
    """CPU seconds of this process, all its threads, and the children that have ended."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def forget(folder: Path) -> None:
    """Have the kernel drop the pages of all files in a folder: first from this process's maps, then from memory."""
    library = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith(f"{folder}/"):
            start, stop = (int(part, 16) for part in words[0].split("-"))
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED)
    for path in _files(folder):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _settle(size: int) -> None:
    """Touch as much memory as the pages to come will take, at most 1 GB. A virtual machine gives free memory back to its host, and who
    uses it next pays for getting it again, as time of his own: so nobody does within what is measured."""
    np.ones(min(size, 2**30), np.uint8)


def in_memory(folder: Path) -> float:
    """The share of the pages of all files in a folder that the kernel holds."""
    library = ctypes.CDLL(None, use_errno=True)
    held = pages = 0
    for path in _files(folder):
        size = path.stat().st_size
        if size:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as mapped,
            ):
                content = np.frombuffer(mapped, np.uint8)
                found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
                library.mincore(
                    ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)
                )
                del content
            held, pages = held + int((found & 1).sum()), pages + len(found)
    return held / max(pages, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
