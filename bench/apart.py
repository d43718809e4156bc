"""Readers in processes of their own: from pages that the kernel has forgotten, and two ranks at once. `bench.data` starts it.

    python -m bench.apart READER DATA FOLDER RANK RANKS EPOCHS SECONDS [cold]

It says "ready", waits for a line, reads EPOCHS epochs (or for SECONDS of CPU time) and prints samples, CPU seconds (all threads and
children) and the pages that were in memory, as a share, when each epoch began.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.loaders import MAKERS, READERS, SAMPLES, Echelon, Reader

_DONTNEED = 4  # Linux: of madvise


def together(
    reader: type[Reader], data: str, folder: Path, *, ranks: int, epochs: int, seconds: float, cold: bool
) -> list[dict[str, Any]]:
    """What each of `ranks` processes measured, started at the same moment."""
    for rank in range(ranks):  # what they read is written before
        reader(MAKERS[data](folder, SAMPLES[data]), folder, rank=rank, ranks=ranks).close()
    words = [sys.executable, "-W", "ignore", "-m", "bench.apart", reader.__name__, data, str(folder)]
    each = [
        subprocess.Popen(
            [*words, str(rank), str(ranks), str(epochs), str(seconds), *["cold"] * cold],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
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
    rank, ranks, epochs = map(int, arguments[3:6])
    seconds, cold = float(arguments[6]), arguments[7:] == ["cold"]
    kind = next(reader for reader in READERS if reader.__name__ == name)
    reader = kind(MAKERS[data](folder, SAMPLES[data]), folder, rank=rank, ranks=ranks)
    steps = reader.material.samples // reader.batch
    if not cold:
        # Ours compares all checksums in its first epoch, which `bench.data --what first` shows.
        reader.advance(steps if isinstance(reader, Echelon) else 3)
    print("ready", flush=True)
    sys.stdin.readline()
    read, spent, resident = 0, 0.0, []
    for _ in range(epochs):
        if cold:
            forget(folder)
            resident.append(in_memory(folder))
        begin, stop = _processor(), 0
        while stop < steps and spent + _processor() - begin < seconds:
            some = min(8, steps - stop)
            reader.advance(some)
            stop += some
        spent += _processor() - begin
        read += stop * reader.batch
    print(json.dumps({"samples": read, "seconds": spent, "resident": resident}))
    return 0


def _processor() -> float:
    """CPU seconds of this process, all its threads, and the children that have ended."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def forget(folder: Path) -> None:
    """Have the kernel drop the pages of all files in a folder: first from this process's maps, then from memory."""
    library = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith(f"{folder}/"):
            start, stop = (int(part, 16) for part in words[0].split("-"))
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED)
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def in_memory(folder: Path) -> float:
    """The share of the pages of all files in a folder that the kernel holds."""
    library = ctypes.CDLL(None, use_errno=True)
    held = pages = 0
    for path in folder.rglob("*"):
        size = path.stat().st_size if path.is_file() else 0
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
