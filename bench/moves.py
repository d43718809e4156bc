"""Servers and workers join and leave under load: throughput never below half for longer than 2 s, no update lost.

    python -m bench.moves [--json OUT] [--seconds 6] [--seed 0] [--bulk 200000]

Two workers push to three servers (two replicas), which also hold `--bulk` rows that nobody pushes to and that move with the rest. Then, one
after another: a server joins, a server is drained and leaves, a worker joins, a worker leaves, a server joins and another is killed (the seed
says which, and when). Every push is written down (histories.py); the history is checked at the end. A phase that does not end within
its time is said to have not ended, and is the last one.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.chaos_cluster import Result, Schedule, Yard
from bench.common import Row, publish
from bench.crash_worker import TABLE, live
from bench.history_check import KEYS, Life
from echelon.errors import ServerError
from echelon.server import Init, Rule, Table, connect

#: Issue 6.
SLOW_LIMIT = 2.0
#: Seconds of one reading of the throughput.
BIN = 0.25
#: The phase that others are compared with, and the least that it must show: below one push a reading, nothing can be below half of it.
QUIET, LEAST = "quiet", 1 / BIN
#: Seconds after which a phase is taken not to end.
PATIENCE = 45.0
BULK = "bulk"


class Moves(Yard):
    """A yard with members that come and go instead of faults."""

    def begin(self, slot: int, folder: Path, number: int) -> tuple[Any, Any, Path, int]:
        """A worker under load."""
        path = folder / f"moves-{number}.jsonl"
        here, there = self._context.Pipe()
        who = (self.servers.address, self.servers.secret, f"worker{slot}")
        process = self._context.Process(target=live, args=(*who, 0, number, number, str(path), there), daemon=True)
        process.start()
        return process, here, path, number

    def settle(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for the map to say so."""
        waited = Result(Schedule(number=0, faults=(), seconds=0.0))
        with connect(self.servers.address, secret=self.servers.secret, worker="watcher", timeout=PATIENCE) as client:
            self.client = client
            self.until(ready, what, waited, patience=PATIENCE)
        if waited.wrong:
            raise EndlessError(waited.wrong[0])

    def balanced(self) -> bool:
        """Whether every chain is complete, and every server heads its part of them."""
        state = self.client.map
        return self.whole() and all(state.heads.count(name) >= state.num_shards // self.count for name in self.names())

    def fill(self, rows: int) -> None:
        """Rows that make moving a shard some work."""
        with connect(self.servers.address, secret=self.servers.secret, worker="filler") as client:
            client.declare(Table(name=BULK, dim=64, rule=Rule(kind="sgd", lr=1.0), init=Init(kind="zeros")))
            for first in range(0, rows, 8192):
                ids = np.arange(first, min(first + 8192, rows))
                client.push({BULK: (ids, np.ones((len(ids), 64), np.float32))})
            client.flush()


class EndlessError(RuntimeError):
    """A phase did not end."""


def drained(yard: Moves, name: str) -> Callable[[], bool]:
    """Whether a server holds nothing any more."""
    return lambda: not any(name in chain for chain in (*yard.client.map.chains, *yard.client.map.learners))


def tell(text: str) -> None:
    """Where we are."""
    print(text, file=sys.stderr, flush=True)


def run(
    folder: Path, seconds: float, *, seed: int, bulk: int
) -> tuple[Result, list[tuple[str, float, float]], list[Life]]:
    """All moves. Result, (what, from, until) of each phase, histories."""
    from echelon.server.protocol import wire
    from echelon.server.status import send_request

    dice = random.Random(seed)
    yard = Moves(folder, servers=3, replicas=2, workers=2, staleness=None)
    result = Result(Schedule(number=0, faults=(), seconds=0.0))
    phases: list[tuple[str, float, float]] = []
    try:
        yard.fill(bulk)
        lives = [yard.begin(slot, folder, slot) for slot in range(2)]
        yard.until(lambda: all(path.exists() and path.stat().st_size for *_, path, _ in lives), "workers", result)

        def phase(what: str, act: Callable[[], None]) -> None:
            began = time.monotonic()
            tell(f"{what} ...")
            act()
            settled = time.monotonic()
            time.sleep(max(0.0, began + seconds - settled))
            phases.append((what, began, time.monotonic()))
            tell(f"{what}: done in {settled - began:.1f} s")

        def join() -> None:
            yard.count += 1
            yard.settle(yard.balanced, "a joined server to hold its part")

        def leave() -> None:
            name = dice.choice(yard.names())
            yard.count -= 1
            send_request(yard.servers.address, yard.servers.secret, wire.DRAIN, {"server": name}, timeout=PATIENCE)
            yard.settle(drained(yard, name), f"{name} to be drained")
            yard.servers.servers.pop(name).stop()

        def end(place: int) -> None:
            lives[place][1].send("stop")
            lives[place][0].join(PATIENCE)
            if lives[place][0].is_alive():
                raise EndlessError(f"waited {PATIENCE:g} s for a worker to leave")

        def join_and_kill() -> None:
            victim = dice.choice(yard.names())
            yard.servers.start()
            time.sleep(dice.uniform(0.0, 3.0))
            os.kill(yard.servers.servers[victim].pid, signal.SIGKILL)
            yard.servers.servers.pop(victim).stop()
            yard.settle(yard.balanced, "the chains to be complete without the killed server")

        try:
            phase(QUIET, lambda: None)
            phase("a server joins", join)
            phase("a server leaves", leave)
            phase("a worker joins", lambda: lives.append(yard.begin(2, folder, 2)))
            phase("a worker leaves", lambda: end(2))
            phase("a server joins, another is killed", join_and_kill)
        except (EndlessError, ServerError) as error:
            result.wrong.append(f"{error}")
            tell(f"DID NOT END: {error}")
        yard.stop(lives, result)
        tell("judging ...")
        histories = [Life.read(path, column) for _, _, path, column in lives]
        yard.judge(result.schedule, histories, result)
        return result, phases, histories
    finally:
        yard.close()


def judged(lives: Sequence[Life], phases: Sequence[tuple[str, float, float]]) -> list[Row]:
    """Per phase: pushes acknowledged per second, and for how long at a stretch it was below half of the quiet phase's."""
    times = np.sort([when for life in lives for when in _acknowledgements(life)])
    readings = {
        what: np.diff(np.searchsorted(times, np.arange(began, ended + 1e-9, BIN))) / BIN
        for what, began, ended in phases
    }
    base = float(np.median(readings[QUIET])) if QUIET in readings else 0.0
    rows = [
        Row(what={"phase": QUIET, "figure": "its throughput"}, value=base, text=f"{base:.0f} pushes/s", least=LEAST)
    ]
    for what, counts in readings.items():
        longest = stretch = 0
        for count in counts:
            stretch = stretch + 1 if count < base / 2 else 0
            longest = max(longest, stretch)
        below, rate = longest * BIN, float(counts.mean())
        figure = {"phase": what, "figure": "longest below half"}
        rows.append(Row(what=figure, value=below, text=f"{below:.2f} s ({rate:.0f} pushes/s)", limit=SLOW_LIMIT))
    return rows


def _acknowledgements(life: Life) -> list[float]:
    """When each push of a life was known to be acknowledged."""
    found, before = [], 0
    for number, when in life.acknowledged:
        found += [when] * (number - before)
        before = number
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each phase, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bulk", type=int, default=200_000, help="rows of 64 numbers that move along")
    settings = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        result, phases, lives = run(Path(scratch), settings.seconds, seed=settings.seed, bulk=settings.bulk)
    rows = judged(lives, phases)
    pushes = sum(len(life.pushes) for life in lives)
    rows.append(
        Row(
            what={"phase": "all", "figure": "lost, doubled, unequal"},
            value=len(result.wrong),
            text=f"{len(result.wrong)} of {pushes}",
            limit=0,
        )
    )
    return publish(
        "Join and leave under load",
        rows,
        json_path=settings.json,
        notes=[f"{KEYS} ids of {TABLE}, {settings.bulk} rows of {BULK}, seed {settings.seed}", *result.wrong[:10]],
    )


if __name__ == "__main__":
    sys.exit(main())
