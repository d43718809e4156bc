"""Reading packed data against a bare NumPy gather and against what people use: samples per CPU second, shuffled.

    python -m bench.data [--only images,tokens] [--what speed,fresh,cold,bare,ranks,memory,parts] [--seconds 60] [--gigabytes 10] [--json data.json]
                         [--folder F]

speed: contenders take turns in one process, each after an epoch of its own. fresh, cold: each in a process of its own, which has read
nothing before; pages are in memory, or the kernel was made to forget them. bare: as cold, but a virtual machine that gave free memory back to its host
pays for getting it again. Of the two passes the first is the one in which ours compares
checksums. ranks: two processes at once, after an epoch. memory: of a reader of a large set. parts: what the order, a checksum and the fixed work of a
step take by themselves. What is done before the clock starts is the same
for all. Ours must have 0.7 of a NumPy memory map that is indexed with sorted numbers, and more than any other; its share of `take` on the
map as a plain array, which is faster, is shown beside it. CPU seconds are those of all threads and
children. A rival that is not installed is a row that is missed (`pip install 'echelon[peers]'`), unless `--without peers`. `--folder` keeps the data between runs.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path

import numpy as np
import psutil
import torch

from bench.cold_readers import State, forget, together, warm
from bench.common import Row, among, machine, median, publish, take_turns, tell
from bench.loaders import BARE, MAKERS, OURS, READERS, SAMPLES, Bare, Echelon, Material, Reader, Taken
from echelon.data import Loader, Order, open_source
from echelon.data.packed.shard_file import fold_crc
from echelon.data.shuffle import FeistelPermutation, random_permutation

#: Of a NumPy memory map's speed, the least that a packed data set must have; and more than any other.
LEAST = 0.7
#: Anonymous memory that a reader of a large set may take above the interpreter with torch.
MOST_MEMORY = 300e6
WHAT = ("speed", "fresh", "cold", "bare", "ranks", "memory", "parts")
#: CPU seconds of a pass of those that are far slower: they need not come to the end.
_ENOUGH = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Samples per CPU second.")
    parser.add_argument("--only", type=among(*MAKERS), default=list(MAKERS))
    parser.add_argument("--what", type=among(*WHAT), default=list(WHAT))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--without", type=among("peers"), default=[])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    missing = [reader.name for reader in READERS if reader.missing()]
    if "peers" not in given.without:
        rows += [
            Row(what={"data": "", "reader": name, "resumes": ""}, value=inf, text="not installed", limit=1.0)
            for name in missing
        ]
    with tempfile.TemporaryDirectory() as place:
        folder = given.folder or Path(place)
        for name in given.only:
            material = MAKERS[name](folder / name, SAMPLES[name])
            if "speed" in given.what:
                rows += map(tell, speed(material, folder / name, given.seconds, given.rounds))
            if "fresh" in given.what:
                rows += map(tell, apart(material, name, folder / name, ranks=1, state="fresh", passes=2))
            if "cold" in given.what:
                rows += map(tell, apart(material, name, folder / name, ranks=1, state="cold", passes=2))
            if "bare" in given.what:
                rows += map(tell, apart(material, name, folder / name, ranks=1, state="bare", passes=2))
            if "ranks" in given.what:
                rows += map(tell, apart(material, name, folder / name, ranks=2, state="warm", passes=8))
        if "memory" in given.what:
            rows += map(tell, memory(folder, given.gigabytes))
        if "parts" in given.what:
            rows += map(tell, parts())
    notes = [f"not installed: {', '.join(missing) or 'none missing'}", f"machine: {machine()}"]
    return publish("reading, shuffled", rows, json_path=given.json, notes=notes)


def speed(material: Material, folder: Path, seconds: float, rounds: int) -> list[Row]:
    """Samples per CPU second after an epoch; ours against each."""
    fast = _turns([*BARE, *OURS], material, folder, 400, seconds / 2, rounds)
    slow = _turns([Echelon, *_others()], material, folder, 40, seconds / 2, rounds)
    bare, taken = fast[Bare], float(np.median(fast[Taken]))
    rows = []
    for reader, costs in {**slow, **fast}.items():
        of = bare if reader in fast else slow[Echelon]
        share = median([other / one for one, other in zip(costs, of, strict=True)])
        rate = material.batch / float(np.median(costs))
        # The end of the interval that is worse for ours.
        counts = share.low if reader in OURS else share.high
        text = f"{share.median:.2f} [{share.low:.2f}, {share.high:.2f}]"
        rows.append(_row(material, reader, "", rate, counts, text, taken / float(np.median(costs))))
    return rows


def _row(
    material: Material, reader: type[Reader], how: str, rate: float, share: float, text: str, of_take: float
) -> Row:
    """A reader's speed: of ours and of NumPy as a share of NumPy's, of others as a share of ours, which must be below 1."""
    numpy = reader in (*BARE, *OURS)
    what = {
        "data": f"{material.name}, batch {material.batch}",
        "reader": reader.name + how,
        "resumes": reader.resumes,
    }
    said = f"{rate:,.0f} samples/s of CPU, {text} of {'NumPy' if numpy else 'echelon'}"
    if reader in OURS:
        said += f", {of_take:.2f} of its take"
    least, limit = LEAST if reader in OURS else None, None if numpy else 1.0
    return Row(what=what, value=share, text=said, limit=limit, least=least, detail={"rate": rate})


def _turns(
    readers: Sequence[type[Reader]], material: Material, folder: Path, block: int, seconds: float, rounds: int
) -> dict[type[Reader], tuple[float, ...]]:
    """CPU seconds per batch, round by round."""
    open_readers = [reader(material, folder) for reader in readers]
    for reader in open_readers:
        warm(reader, material.samples // material.batch)
    gc.collect()
    gc.freeze()  # as bench.cold_readers does: a search of all that peers import takes longer than a turn
    before = _children()
    timings = take_turns(open_readers, block=block, rounds=rounds, seconds=seconds)
    # Python's own tracker of shared memory does nothing; a process that reads would show.
    spent = _children() - before
    if spent > 0.05 + 0.01 * sum(sum(timing.cpu) * 2 * block for timing in timings):
        raise RuntimeError(f"processes that readers started took {spent:.1f} s, which were not counted")
    gc.unfreeze()
    for reader in open_readers:
        reader.close()
    return {reader: timing.cpu for reader, timing in zip(readers, timings, strict=True)}


def _children() -> float:
    """CPU seconds of the processes that this one has started and that are alive."""
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))


def apart(material: Material, data: str, folder: Path, *, ranks: int, state: State, passes: int) -> list[Row]:
    """Each reader in processes of its own, NumPy and ours in turns and again. Passes that differ are told apart."""
    rates: dict[type[Reader], list[list[float]]] = {}
    others, ours = _others(), [*BARE, *OURS]
    for reader in [*ours, *reversed(ours), *others, *ours]:
        if state in ("cold", "bare"):
            forget(folder)  # what this process has mapped would stay
        seconds = _ENOUGH if reader in others else 1e9
        found = together(reader, data, folder, ranks=ranks, state=state, passes=passes, seconds=seconds)
        remembered = max(each["resident"] for process in found for each in process)
        if state in ("cold", "bare") and remembered > 0.02:
            raise RuntimeError(f"the kernel still held {remembered:.0%} of the pages of {folder}")
        rates.setdefault(reader, []).append(
            [
                sum(each["samples"] for each in turn) / sum(each["seconds"] for each in turn)
                for turn in zip(*found, strict=True)
            ]
        )
    if state == "warm":
        return _compared(material, f", {ranks} ranks", {reader: _medians(each) for reader, each in rates.items()})
    begun = {
        "cold": "pages dropped",
        "bare": "pages dropped, memory given back",
        "fresh": "pages new to the process",
    }[state]
    rows = []
    for number, name in enumerate(("first pass", "second pass")):
        passed = {reader: float(np.median([run[number] for run in runs])) for reader, runs in rates.items()}
        rows += _compared(material, f", {begun}, {name}", passed)
    return rows


def _medians(runs: Sequence[Sequence[float]]) -> float:
    return float(np.median([rate for run in runs for rate in run]))


def _compared(material: Material, how: str, rates: Mapping[type[Reader], float]) -> list[Row]:
    """The rows of readers that were measured in the same way."""
    bare, ours = rates[Bare], rates[Echelon]
    rows = []
    for reader, rate in rates.items():
        share = rate / (bare if reader in (*BARE, *OURS) else ours)
        rows.append(_row(material, reader, how, rate, share, f"{share:.2f}", rate / rates[Taken]))
    return rows


def _others() -> list[type[Reader]]:
    return [reader for reader in READERS if reader not in (*BARE, *OURS) and not reader.missing()]


_MEMORY = """
import sys
import torch
from echelon.data import Loader, open_source
def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
before = anonymous()
source = open_source(sys.argv[1])
order = source.make_order(batch=64, seed=0)
most, seen = 0, 0
for step in Loader(source, order, dp_rank=0, dp_size=1, micro_batch_size=None).steps(0, int(sys.argv[2])):
    seen += step.samples
    if step.step % 20 == 0:
        most = max(most, anonymous())
print(before, max(most, anonymous()), seen)
"""


def memory(folder: Path, gigabytes: float) -> list[Row]:
    """Anonymous memory of a reader of a large packed set, above that of Python with torch."""
    from echelon.data.packed.from_arrays import ArrayPackingSource
    from echelon.data.packed.pack import pack

    samples = int(gigabytes * 1e9 / 3080)
    pattern = np.random.default_rng(0).integers(0, 256, (8192, 3, 32, 32), np.uint8)
    repeated = np.lib.stride_tricks.as_strided(pattern, (samples, 3, 32, 32), (0, *pattern.strides[1:]))
    pack(
        ArrayPackingSource(
            {"image": repeated, "label": np.arange(samples)}, {"tuple": ["image", "label"]}, {"source": "large"}
        ),
        folder / "large",
    )
    steps = samples // 64
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(folder / "large"), str(steps)], capture_output=True, text=True, check=True
    )
    before, after, seen = map(int, done.stdout.split())
    text = f"{(after - before) / 1e6:.0f} MB more than torch alone ({before / 1e6:.0f} MB), after {seen:,} of {samples:,} samples"
    what = {"data": f"{gigabytes:g} GB of images, batch 64", "reader": "echelon, RssAnon", "resumes": ""}
    return [Row(what=what, value=after - before, text=text, limit=MOST_MEMORY)]


def parts() -> list[Row]:
    """The least CPU time of some tries, for what docs/data.md says of single parts."""
    content = np.random.default_rng(0).integers(0, 256, 2**24, np.uint8)
    blocks = content.reshape(-1, 2**18)
    places, order = np.arange(2**16), Order(samples=100_000, batch=16)
    source = open_source(torch.zeros(100_000, 1))
    steps = Loader(source, order, dp_rank=0, dp_size=1, micro_batch_size=None)
    each: dict[str, tuple[Callable[[], object], float, str]] = {
        "order as a table": (lambda: random_permutation(10**6, 0), 1e-3, "ms per million samples"),
        "order as a formula": (lambda: FeistelPermutation(10**9, 0).at(places), len(places) * 1e-9, "ns per sample"),
        "checksum": (lambda: [fold_crc(block, 0) for block in blocks], 1e-3, "ms per 16 MB"),
        "CRC-32 of the same bytes": (lambda: [zlib.crc32(block) for block in blocks], 1e-3, "ms per 16 MB"),
        "a step of 16 numbers in memory": (lambda: list(steps.steps(0, 1000)), 1e-3, "µs per step"),
    }
    rows = []
    for name, (work, unit, words) in each.items():
        tries = []
        for _ in range(5):
            begin = time.process_time()
            work()
            tries.append(time.process_time() - begin)
        found = min(tries) / unit
        what = {"data": name, "reader": "", "resumes": ""}
        rows.append(Row(what=what, value=found, text=f"{found:,.1f} {words}"))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
