"""What workers did to the parameter server and saw of it, written down as it happened, and whether that can be so (after Jepsen).

Every life of a worker owns one column of the table. It pushes whole numbers with SGD at lr=1, so a column only grows and its value is
the exact sum of the pushes applied. Pushes are numbered, and acknowledged in order; so a shard's part of a column must at all times be
the sum of the first k pushes of that life, for some k: at least all that were acknowledged before one looked, at most all that were sent.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

#: Columns of the table: lives of workers that one schedule may have.
LIVES = 16
#: Each of them many times over: a push and an answer are then mostly long enough to go by shared memory, also where four servers share them.
TIMES = 64
WIDTH = LIVES * TIMES
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


def once(rows: np.ndarray) -> np.ndarray:
    """Rows with each life's column once; all times they must say the same."""
    many = rows.reshape(len(rows), TIMES, LIVES)
    if not (many == many[:, :1]).all():
        raise AssertionError("a row is torn: the columns of one life differ")
    return many[:, 0]


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
        now = client.last_acknowledged()
        if now > known:
            known = now
            write("ok", known, time.monotonic())

    number = 0
    while not stopped():
        keys = draw.choice(KEYS, 48)
        amounts = draw.integers(1, 8, len(keys))
        gradients = np.zeros((len(keys), WIDTH), np.float32)
        gradients[:, column::LIVES] = -amounts[:, None]
        number += 1
        write("push", number, time.monotonic(), keys.tolist(), amounts.tolist())
        sent = client.push({table: (base + keys, gradients)})
        assert sent == number, f"push {number} was given the number {sent}"
        heard()
        if number % 4 == 0:
            keys = draw.choice(KEYS, 64, replace=False)
            asked = time.monotonic()
            rows = once(client.pull({table: base + keys})[table])
            write("read", asked, time.monotonic(), keys.tolist(), rows.astype(int).tolist())
    client.flush()
    heard()
    write("end")


class Column:
    """What a life's column can look like: per number of pushes applied, the sum at each key."""

    def __init__(self, life: Life) -> None:
        self.column, self.count = life.column, len(life.pushes)
        sums = np.zeros((KEYS, self.count + 1))
        for place, (_, _, keys, amounts) in enumerate(life.pushes):
            np.add.at(sums[:, place + 1], keys, amounts)
        sums.cumsum(axis=1, out=sums)
        # Sums only grow, so the numbers of pushes that explain a value are an interval. All keys behind one another, each further on
        # than the last, are one sorted row: a look-up for many keys at once.
        self._sums, self._apart = sums, float(sums[:, -1].max()) + 1
        self._row = (sums + self._apart * np.arange(KEYS)[:, None]).ravel()
        self._known = [when for _, when in life.acknowledged]
        self._least = [0, *(number for number, _ in life.acknowledged)]
        self._sent = [when for _, when, *_ in life.pushes]

    def between(self, asked: float, answered: float) -> tuple[int, int]:
        """How many pushes a read may show: at least those acknowledged before it was asked, at most those sent before its answer."""
        return self._least[bisect_right(self._known, asked)], bisect_right(self._sent, answered)

    def wrong(
        self, keys: np.ndarray, values: np.ndarray, starts: np.ndarray, least: int, most: int
    ) -> Iterator[tuple[int, str]]:
        """Of keys in groups (of one shard each, from `starts`): where a group begins that shows no possible number of pushes, and why."""
        possible = (values >= 0) & (values < self._apart)
        wanted = np.where(possible, values, 0) + self._apart * keys
        first = np.searchsorted(self._row, wanted, "left") - keys * (self.count + 1)
        after = np.searchsorted(self._row, wanted, "right") - keys * (self.count + 1)
        first[~possible], after[~possible] = self.count + 1, 0
        lowest, highest = np.maximum.reduceat(first, starts), np.minimum.reduceat(after, starts) - 1
        for place in np.flatnonzero(np.maximum(lowest, least) > np.minimum(highest, most)):
            here = slice(starts[place], starts[place + 1] if place + 1 < len(starts) else None)
            if lowest[place] <= highest[place]:
                what = "lost" if highest[place] < least else "from the future"
                yield starts[place], f"shows {lowest[place]} pushes, of which {least} to {most} are possible: {what}"
                continue
            low, high = self._sums[keys[here], least][:6], self._sums[keys[here], most][:6]
            yield (
                starts[place],
                f"shows {values[here][:6]}.., the sums of no number of pushes ({least}: {low}.., {most}: {high}..)",
            )


def check(lives: Sequence[Life], final: np.ndarray, shards: np.ndarray) -> list[str]:
    """What cannot be. `final`: (KEYS, LIVES) as read when all was quiet; `shards`: the shard of each key."""
    wrong: list[str] = []
    columns = [Column(life) for life in lives]
    every, starts = _by_shard(np.arange(KEYS), shards)
    for life, column in zip(lives, columns, strict=True):
        numbers = [number for number, *_ in life.pushes]
        if numbers != list(range(1, len(numbers) + 1)):
            wrong.append(f"column {life.column}: pushes are numbered {numbers}")
            continue
        least = max((number for number, _ in life.acknowledged), default=0)
        if life.finished and least != len(numbers):
            wrong.append(f"column {life.column}: {len(numbers)} pushes, but flush left at {least}")
        for place, said in column.wrong(every, final[every, life.column], starts, least, len(numbers)):
            wrong.append(f"column {life.column}, shard {shards[every[place]]}: at the end {said}")
    spare = np.setdiff1d(np.arange(LIVES), [life.column for life in lives])
    if final[:, spare].any():
        wrong.append("a column that nobody pushed to is not zero")
    for life in lives:
        for asked, answered, keys, rows in life.reads:
            order, starts = _by_shard(np.array(keys), shards)
            values = np.array(rows)[order]
            seen = np.array(keys)[order]
            for column in columns:
                least, most = column.between(asked, answered)
                for place, said in column.wrong(seen, values[:, column.column], starts, least, most):
                    wrong.append(
                        f"column {column.column}, shard {shards[seen[place]]}: a read from {asked:.3f} to {answered:.3f} {said}"
                    )
    return wrong


def _by_shard(keys: np.ndarray, shards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An order of keys in which those of one shard are neighbours, and where each shard begins."""
    order = np.argsort(shards[keys], kind="stable")
    mine = shards[keys][order]
    return order, np.flatnonzero(np.concatenate([[True], mine[1:] != mine[:-1]]))


def failover(lives: Sequence[Life], when: float) -> float | None:
    """Seconds from a fault until a push was acknowledged that was sent after it (every push goes to every shard); None: not so far."""
    waits = []
    for life in lives:
        first = next((number for number, sent, *_ in life.pushes if sent > when), None)
        heard = next((at for number, at in life.acknowledged if first is not None and number >= first), None)
        if heard is not None:
            waits.append(heard - when)
    return min(waits, default=None)


def outlast(
    records: Mapping[int, Path],
    faults: Sequence[float],
    *,
    patience: float,
    going: Callable[[], bool] = lambda: True,
    pause: float = 0.1,
) -> bool:
    """Let the load (columns and their records) go on until it has overcome every fault; False: it does not within its time.

    A load that is stopped before has seen the quick failovers only: who waits in a push for the slow one sends nothing after the fault.
    """
    left, deadline = list(faults), time.monotonic() + patience
    while left:
        # Asked before the records are read: what the load wrote last is in them.
        more = going() and time.monotonic() < deadline
        lives = [Life.read(path, column) for column, path in records.items()]
        left = [when for when in left if failover(lives, when) is None]
        if left and not more:
            return False
        if left:
            time.sleep(pause)
    return True
