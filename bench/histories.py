"""What workers did to the parameter server and saw of it, written down as it happened, and whether that can be so (after Jepsen).

Every life of a worker owns one column of the table. It pushes whole numbers with SGD at lr=1, so a column only grows and its value is
the exact sum of the pushes applied. Pushes are numbered, and acknowledged in order; so a shard's part of a column must at all times be
the sum of the first k pushes of that life, for some k: at least all that were acknowledged before one looked, at most all that were sent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

#: Columns of the table: lives of workers that one schedule may have.
LIVES = 16
#: Distinct ids of one schedule.
KEYS = 384


@dataclass(slots=True, kw_only=True)
class Life:
    """One life of a worker, by its own record."""

    column: int
    #: (number, when sent, keys, amounts)
    pushes: list[tuple[int, float, list[int], list[int]]] = field(default_factory=list)
    #: (number up to which all are acknowledged, when known)
    acknowledged: list[tuple[int, float]] = field(default_factory=list)
    #: (when asked, when answered, keys, rows)
    reads: list[tuple[float, float, list[int], list[list[float]]]] = field(default_factory=list)
    finished: bool = False

    @classmethod
    def read(cls, path: Path, column: int) -> Life:
        """A record off the disk; its last line may be cut by the worker's death."""
        life = cls(column=column)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                what, *rest = json.loads(line)
            except ValueError:
                break
            match what:
                case "push":
                    life.pushes.append(tuple(rest))
                case "ok":
                    life.acknowledged.append(tuple(rest))
                case "read":
                    life.reads.append(tuple(rest))
                case "end":
                    life.finished = True
        return life


def work(
    client: Any, table: str, base: int, column: int, seed: int, record: TextIO, stopped: Callable[[], bool]
) -> None:
    """Push and pull until told to stop, writing each step down before and after it is done."""
    draw = np.random.default_rng(seed)
    known = 0

    def write(*what: Any) -> None:
        record.write(json.dumps(what) + "\n")
        record.flush()

    def heard() -> None:
        nonlocal known
        now = client.acknowledged()
        if now > known:
            known = now
            write("ok", known, time.monotonic())

    number = 0
    while not stopped():
        keys = draw.choice(KEYS, 48)
        amounts = draw.integers(1, 8, len(keys))
        gradients = np.zeros((len(keys), LIVES), np.float32)
        gradients[:, column] = -amounts
        number += 1
        write("push", number, time.monotonic(), keys.tolist(), amounts.tolist())
        sent = client.push({table: (base + keys, gradients)})
        assert sent == number, f"push {number} was given the number {sent}"
        heard()
        if number % 4 == 0:
            keys = draw.choice(KEYS, 64, replace=False)
            asked = time.monotonic()
            rows = client.pull({table: base + keys})[table]
            write("read", asked, time.monotonic(), keys.tolist(), rows.astype(int).tolist())
    client.flush()
    heard()
    write("end")


def check(lives: Sequence[Life], final: np.ndarray, shards: np.ndarray) -> list[str]:
    """What cannot be. `final`: (KEYS, LIVES) as read when all was quiet; `shards`: the shard of each key."""
    wrong: list[str] = []
    members = {int(shard): np.flatnonzero(shards == shard) for shard in np.unique(shards)}
    sums = {life.column: _sums(life) for life in lives}
    for life in lives:
        numbers = [number for number, *_ in life.pushes]
        if numbers != list(range(1, len(numbers) + 1)):
            wrong.append(f"column {life.column}: pushes are numbered {numbers}")
            continue
        least = max((number for number, _ in life.acknowledged), default=0)
        if life.finished and least != len(numbers):
            wrong.append(f"column {life.column}: {len(numbers)} pushes, but flush left at {least}")
        for shard, keys in members.items():
            said = _fits(sums[life.column], keys, final[keys, life.column], least, len(numbers))
            if said:
                wrong.append(f"column {life.column}, shard {shard}: at the end {said}")
    spare = np.setdiff1d(np.arange(LIVES), list(sums))
    if final[:, spare].any():
        wrong.append("a column that nobody pushed to is not zero")
    for life in lives:
        for asked, answered, keys, rows in life.reads:
            wrong += _check_read(lives, sums, shards, asked, answered, np.array(keys), np.array(rows))
    return wrong


def _check_read(
    lives: Sequence[Life],
    sums: Mapping[int, np.ndarray],
    shards: np.ndarray,
    asked: float,
    answered: float,
    keys: np.ndarray,
    rows: np.ndarray,
) -> Iterator[str]:
    groups = [np.flatnonzero(shards[keys] == shard) for shard in np.unique(shards[keys])]
    for life in lives:
        least = max((number for number, when in life.acknowledged if when <= asked), default=0)
        most = sum(when <= answered for _, when, *_ in life.pushes)
        for group in groups:
            said = _fits(sums[life.column], keys[group], rows[group, life.column], least, most)
            if said:
                yield f"column {life.column}, shard {shards[keys[group[0]]]}: a read from {asked:.3f} to {answered:.3f} {said}"


def _sums(life: Life) -> np.ndarray:
    """Per k the sums of the first k pushes, by key."""
    found = np.zeros((len(life.pushes) + 1, KEYS))
    for place, (_, _, keys, amounts) in enumerate(life.pushes):
        np.add.at(found[place + 1], keys, amounts)
    return found.cumsum(axis=0)


def _fits(sums: np.ndarray, keys: np.ndarray, values: np.ndarray, least: int, most: int) -> str:
    """What is wrong with these values, if they are not the sums after some k pushes from `least` to `most`."""
    same = (sums[:, keys] == values).all(axis=1)
    if same[least : most + 1].any():
        return ""
    found = np.flatnonzero(same)
    if len(found):
        return f"shows {found[0]} pushes, of which {least} to {most} are possible: {'lost' if found[-1] < least else 'from the future'}"
    return f"shows {values[:6]}.., the sums of no number of pushes ({least}: {sums[least, keys][:6]}.., {most}: {sums[most, keys][:6]}..)"


def failover(lives: Sequence[Life], when: float) -> float | None:
    """Seconds from a fault until a push was acknowledged that was sent after it (every push goes to every shard)."""
    waits = []
    for life in lives:
        first = next((number for number, sent, *_ in life.pushes if sent > when), None)
        heard = next((at for number, at in life.acknowledged if first is not None and number >= first), None)
        if heard is not None:
            waits.append(heard - when)
    return min(waits, default=None)
