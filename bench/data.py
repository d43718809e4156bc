"""Reading packed data against a bare NumPy gather and against what people use: samples per CPU second, shuffled, one process.

    python -m bench.data [--only images,tokens] [--what speed,first,cold,ranks] [--seconds 60] [--json data.json] [--folder F]
    python -m bench.data --what memory [--gigabytes 10]

speed: once pages are in memory, contenders take turns in one process. first: the first pass, in which checksums are compared. cold:
three passes, before each of which the kernel is made to forget all pages. ranks: two processes at once. memory: of a reader of a large
set. CPU seconds are those of all threads and children. Packages that are not installed are named and left out (`pip install
'echelon[peers]'`). `--folder` keeps the data between runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from bench.apart import forget, together
from bench.common import Row, among, machine, median, publish, take_turns, tell
from bench.loaders import MAKERS, READERS, SAMPLES, Bare, Echelon, EchelonShards, Material, Reader

#: Of a NumPy memory map's speed, the least that a packed data set must have; and more than any other.
LEAST = 0.7
#: Anonymous memory that a reader of a large set may take above the interpreter with torch.
MOST_MEMORY = 300e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Samples per CPU second.")
    parser.add_argument("--only", type=among(*MAKERS), default=list(MAKERS))
    parser.add_argument(
        "--what", type=among("speed", "first", "cold", "ranks", "memory"), default=["speed", "first", "cold", "ranks"]
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    missing = [reader.name for reader in READERS if reader.missing()]
    with tempfile.TemporaryDirectory() as place:
        folder = given.folder or Path(place)
        for name in given.only:
            material = MAKERS[name](folder / name, SAMPLES[name])
            if "speed" in given.what:
                rows += map(tell, speed(material, folder / name, given.seconds, given.rounds))
            if "first" in given.what:
                rows += map(tell, first(material, folder / name))
            if "cold" in given.what:
                rows += map(tell, apart(material, name, folder / name, ranks=1, cold=True))
            if "ranks" in given.what:
                rows += map(tell, apart(material, name, folder / name, ranks=2, cold=False))
        if "memory" in given.what:
            rows += map(tell, memory(folder, given.gigabytes))
    notes = [f"not installed: {', '.join(missing) or 'none missing'}", f"machine: {machine()}"]
    return publish("reading, shuffled", rows, json_path=given.json, notes=notes)


def speed(material: Material, folder: Path, seconds: float, rounds: int) -> list[Row]:
    """Samples per CPU second once the pages are in memory and their checksums known; ours against each."""
    fast = _turns([Bare, Echelon, EchelonShards], material, folder, 400, seconds / 2, rounds)
    slow = _turns([Echelon, *_others()], material, folder, 40, seconds / 2, rounds)
    rows = []
    for reader, costs in {**slow, **fast}.items():
        rate = material.batch / float(np.median(costs))
        of = fast[Bare] if reader in fast else slow[Echelon]
        share = median([other / one for one, other in zip(costs, of, strict=True)])
        ours = reader in (Echelon, EchelonShards)
        text = f"{rate:,.0f} samples/s of CPU"
        text += (
            f", {share.median:.2f} [{share.low:.2f}, {share.high:.2f}] of {'NumPy' if reader in fast else 'echelon'}"
        )
        # A row's value may not exceed its limit: for ours NumPy's time over ours turned round, for a peer its share of our speed.
        value, limit = (1 / share.low, 1 / LEAST) if ours else (share.high, 1.0 if reader.rival else None)
        what = {"data": f"{material.name}, batch {material.batch}", "reader": reader.name, "resumes": reader.resumes}
        rows.append(Row(what=what, value=value, text=text, limit=limit, detail={"rate": rate}))
    return rows


def _turns(
    readers: Sequence[type[Reader]], material: Material, folder: Path, block: int, seconds: float, rounds: int
) -> dict[type[Reader], tuple[float, ...]]:
    """CPU seconds per batch, round by round."""
    open_readers = [reader(material, folder) for reader in readers]
    for reader in open_readers:
        if isinstance(reader, Echelon):
            reader.advance(
                material.samples // material.batch + 1
            )  # every block's checksum is compared in the first epoch
    timings = take_turns(open_readers, block=block, rounds=rounds, seconds=seconds)
    # Python's own tracker of shared memory does nothing; a process that reads would show.
    spent = [sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True)]
    if sum(spent) > 0.01 * sum(sum(timing.cpu) * 2 * block for timing in timings):
        raise RuntimeError(f"processes that readers started took {sum(spent):.1f} s, which were not counted")
    for reader in open_readers:
        reader.close()
    return {reader: timing.cpu for reader, timing in zip(readers, timings, strict=True)}


def first(material: Material, folder: Path) -> list[Row]:
    """The first epoch, in which every block's checksum is compared, against the second."""
    costs = []
    for _ in range(5):
        reader = Echelon(material, folder)
        steps = material.samples // material.batch
        spent = []
        for _ in range(2):
            begin = time.process_time()
            reader.advance(steps)
            spent.append((time.process_time() - begin) / steps)
        costs.append(spent)
    rates = [material.batch / float(np.median([each[epoch] for each in costs])) for epoch in range(2)]
    text = f"{rates[0]:,.0f} samples/s of CPU, then {rates[1]:,.0f}"
    what = {"data": f"{material.name}, batch {material.batch}", "reader": "echelon, first epoch", "resumes": ""}
    return [Row(what=what, value=rates[1] / rates[0], text=text, detail={"first": rates[0], "second": rates[1]})]


def apart(material: Material, data: str, folder: Path, *, ranks: int, cold: bool) -> list[Row]:
    """Each reader in processes of its own, NumPy and ours in turns and again; ours against both NumPy and each other."""
    rates: dict[type[Reader], list[float]] = {}
    others = _others()
    for reader in [Bare, Echelon, EchelonShards, EchelonShards, Echelon, Bare, *others, Bare, Echelon, EchelonShards]:
        limit = 2.0 if reader in others else 1e9  # CPU seconds: those that are far slower need not come to the end
        forget(folder)  # what this process has mapped would stay
        found = together(reader, data, folder, ranks=ranks, epochs=3 if cold else 8, seconds=limit, cold=cold)
        rates.setdefault(reader, []).append(sum(f["samples"] for f in found) / sum(f["seconds"] for f in found))
        remembered = max([0.0, *(share for f in found for share in f["resident"])])
        if remembered > 0.02:
            raise RuntimeError(f"the kernel still held {remembered:.0%} of the pages of {folder}")
    how = "pages dropped before each of 3 passes" if cold else f"{ranks} ranks"
    bare, ours = (float(np.median(rates[reader])) for reader in (Bare, Echelon))
    rows = []
    for reader, each in rates.items():
        rate = float(np.median(each))
        numpy = reader in (Bare, Echelon, EchelonShards)
        text = (
            f"{rate:,.0f} samples/s of CPU, {rate / (bare if numpy else ours):.2f} of {'NumPy' if numpy else 'echelon'}"
        )
        value, most = (
            (bare / rate, None if reader is Bare else 1 / LEAST)
            if numpy
            else (rate / ours, 1.0 if reader.rival else None)
        )
        what = {
            "data": f"{material.name}, batch {material.batch}",
            "reader": f"{reader.name}, {how}",
            "resumes": reader.resumes,
        }
        rows.append(Row(what=what, value=value, text=text, limit=most, detail={"rates": each}))
    return rows


def _others() -> list[type[Reader]]:
    return [reader for reader in READERS if reader not in (Bare, Echelon, EchelonShards) and not reader.missing()]


_MEMORY = """
import sys
import torch
from echelon.data import Loader, open_source
def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
before = anonymous()
source = open_source(sys.argv[1])
order = source.order(batch=64, seed=0)
most, seen = 0, 0
for step in Loader(source, order, rank=0, ranks=1, micro=None).steps(0, int(sys.argv[2])):
    seen += step.samples
    if step.step % 500 == 0:
        most = max(most, anonymous())
print(before, max(most, anonymous()), seen)
"""


def memory(folder: Path, gigabytes: float) -> list[Row]:
    """Anonymous memory of a reader of a large packed set, above that of Python with torch."""
    from echelon.data.packed.from_arrays import Arrays
    from echelon.data.packed.pack import pack

    samples = int(gigabytes * 1e9 / 3080)
    pattern = np.random.default_rng(0).integers(0, 256, (8192, 3, 32, 32), np.uint8)
    repeated = np.lib.stride_tricks.as_strided(pattern, (samples, 3, 32, 32), (0, *pattern.strides[1:]))
    pack(
        Arrays({"image": repeated, "label": np.arange(samples)}, {"tuple": ["image", "label"]}, {"source": "large"}),
        folder / "large",
    )
    steps = min(20_000, samples // 64)
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(folder / "large"), str(steps)], capture_output=True, text=True, check=True
    )
    before, after, seen = map(int, done.stdout.split())
    text = f"{(after - before) / 1e6:.0f} MB more than torch alone ({before / 1e6:.0f} MB), after {seen:,} of {samples:,} samples"
    what = {"data": f"{gigabytes:g} GB of images, batch 64", "reader": "echelon, RssAnon", "resumes": ""}
    return [Row(what=what, value=after - before, text=text, limit=MOST_MEMORY)]


if __name__ == "__main__":
    raise SystemExit(main())
