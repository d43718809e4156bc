"""The measuring harness: contenders take turns A B C / C B A in one run, ratios are formed within a round, the interval counts.

Machines drift: clocks, neighbours, caches. A round in which every contender runs once in each direction cancels a linear
drift, and a ratio inside a round cancels most of the rest.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

#: DESIGN.md: at least 30 quads or the time limit.
ROUNDS = 30


class Contender(Protocol):
    """Something that trains: `advance(n)` makes n steps and returns when they are done."""

    name: str

    def advance(self, steps: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one contender took, round by round, in seconds per step."""

    name: str
    wall: tuple[float, ...]
    cpu: tuple[float, ...]

    @property
    def step(self) -> float:
        """Median wall seconds of a step."""
        return float(np.median(self.wall))


def among(*known: str) -> Callable[[str], list[str]]:
    """For argparse: names separated by commas, each one of `known`."""

    def read(text: str) -> list[str]:
        asked = [each.strip() for each in text.split(",") if each.strip()]
        strange = [each for each in asked if each not in known]
        if strange or not asked:
            raise argparse.ArgumentTypeError(f"{', '.join(strange) or 'nothing'}: choose of {', '.join(known)}")
        return asked

    return read


def median(values: Sequence[float], *, resamples: int = 4000) -> Interval:
    """The median and a percentile bootstrap of it."""
    sample = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(0).choice(sample, (resamples, len(sample)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return Interval(median=float(np.median(sample)), low=float(low), high=float(high))


def ratio(timing: Timing, to: Timing, clock: str = "wall") -> Interval:
    """How many times as long `timing` takes as `to`, round by round. `clock` is "wall" or "cpu"."""
    pairs = zip(getattr(timing, clock), getattr(to, clock), strict=True)
    return median([one / other for one, other in pairs])


def take_turns(
    contenders: Sequence[Contender],
    *,
    block: int,
    rounds: int = ROUNDS,
    seconds: float = 120.0,
    warmup: int = 3,
    barrier: Callable[[], None] = lambda: None,
    agree: Callable[[bool], bool] = lambda more: more,
) -> list[Timing]:
    """Time the contenders in turns of `block` steps until `rounds` are done or `seconds` have passed (three rounds at least).

    `barrier` is called around each block (ranks wait for each other, a GPU for its queue); `agree` makes every rank follow
    rank 0 in whether to go on.
    """
    for contender in contenders:
        contender.advance(warmup)
    wall: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    cpu: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    began, done = time.perf_counter(), 0
    while agree(done < 3 or (done < rounds and time.perf_counter() - began < seconds)):
        spent = {contender.name: np.zeros(2) for contender in contenders}
        # Who goes first changes from round to round, or it would always be the one that meets cold caches.
        order = [*contenders[done % len(contenders) :], *contenders[: done % len(contenders)]]
        for contender in [*order, *reversed(order)]:
            spent[contender.name] += _time(contender, block, barrier)
        for name, (real, processor) in spent.items():
            wall[name].append(real / (2 * block))
            cpu[name].append(processor / (2 * block))
        done += 1
    return [Timing(name=name, wall=tuple(wall[name]), cpu=tuple(cpu[name])) for name in wall]


def _time(contender: Contender, steps: int, barrier: Callable[[], None]) -> tuple[float, float]:
    barrier()
    real, processor = time.perf_counter(), time.process_time()
    contender.advance(steps)
    processor = time.process_time() - processor
    barrier()
    return time.perf_counter() - real, processor


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a result: the figure that counts, and the most or the least that it may be (None: for information)."""

    #: Column heading -> text: what was measured.
    what: Mapping[str, str]
    value: float
    #: The figure as people read it.
    text: str
    limit: float | None = None
    detail: Mapping[str, Any] | None = None
    least: float | None = None

    @property
    def good(self) -> bool:
        """Whether the figure is within its limits."""
        return (self.limit is None or self.value <= self.limit) and (self.least is None or self.value >= self.least)

    @property
    def bounds(self) -> str:
        """Its limits in words; empty: it has none."""
        most = [] if self.limit is None else [f"{self.limit:g}"]
        return " to ".join(most if self.least is None else [f"at least {self.least:g}", *most])


def publish(title: str, rows: Sequence[Row], *, json_path: Path | None = None, notes: Sequence[str] = ()) -> int:
    """Print the rows as a table, write them as JSON if asked, and give the exit code: 0 when every limit holds, else 1."""
    table = Table(title=title, title_justify="left")
    for heading in (*rows[0].what, "measured", "limit", ""):
        table.add_column(heading, overflow="fold")
    for row in rows:
        verdict = "" if not row.bounds else "[green]good[/]" if row.good else "[red]missed[/]"
        table.add_row(*row.what.values(), row.text, row.bounds, verdict)
    console = Console()
    console = Console(width=max(console.width, 120))  # a pipe is 80 wide, which folds every figure
    console.print(table)
    for note in notes:
        console.print(note, style="dim")
    if json_path is not None:
        plain = [asdict(row) | {"good": row.good} for row in rows]
        json_path.write_text(
            json.dumps({"title": title, "machine": machine(), "rows": plain, "notes": list(notes)}, indent=1)
        )
    return 0 if all(row.good for row in rows) else 1


def tell(row: Row) -> Row:
    """Print a row as soon as it is known: the table comes at the end of a long measurement."""
    print(f"{', '.join(row.what.values())}: {' '.join(row.text.split())}", file=sys.stderr, flush=True)
    return row


def machine() -> dict[str, Any]:
    """Where figures were taken: they mean nothing elsewhere."""
    import psutil
    import torch

    return {
        "processor": platform.machine(),
        "cores": psutil.cpu_count(logical=True),
        "memory": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": psutil.getloadavg()[0],
    }


def milliseconds(seconds: float) -> str:
    """Seconds as text in milliseconds."""
    return f"{seconds * 1e3:.1f} ms"
