"""Seeded faults on the parameter server under load: nothing acknowledged is lost, nothing is applied twice, every run ends.

    python -m bench.crashes --schedules 300 --seed 0 [--json OUT] [--keep FOLDER]

A schedule draws up to four faults (kill -9, SIGSTOP then SIGCONT, connections cut) and whom they hit: servers, workers, the controller;
never more servers down at once than a chain can lose. Real processes, real signals; a cut shuts a socket down inside the process that
holds it (pidfd_getfd). Workers write down what they do and see (histories.py); afterwards the history is checked, all replicas of each shard
must be equal byte for byte, and the time from a server's death until pushes are acknowledged again is noted: the load goes on until they are.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.chaos_cluster import Fault, Result, Schedule, Yard
from bench.common import Row, median, publish

#: Issue 6.
FAILOVER_LIMIT = 1.0


def draw(seed: int, number: int, *, replicas: int, servers: int, workers: int) -> Schedule:
    """A schedule: the same for the same seed and number."""
    dice = random.Random(f"{seed} {number} {replicas}")
    spare, faults = replicas - 1, []
    targets = dice.sample(range(servers), servers)
    for _ in range(dice.choice((1, 1, 2, 2, 3, 4))):
        after = round(dice.uniform(0.05, 0.9), 3)
        whom = dice.choices(("server", "worker", "controller"), (6, 3, 2))[0]
        what = dice.choice(("kill", "stop", "cut"))
        lasting = round(dice.choice((dice.uniform(0.05, 0.4), dice.uniform(0.4, 1.5))), 3)
        if whom == "server" and what != "cut":
            # Only so many may be away at once that every chain keeps a living replica; each is hit once.
            if not spare:
                what = "cut"
            else:
                spare -= 1
        which = {"server": targets[spare], "worker": dice.randrange(workers), "controller": 0}[whom]
        if what == "cut":
            which = dice.randrange(servers if whom == "server" else workers)
        keep = what == "stop" or (what == "kill" and whom == "controller")
        faults.append(Fault(after=after, what=what, whom=whom, which=which, lasting=lasting if keep else 0.0))
    ends = [each.after + each.lasting for each in faults]
    return Schedule(
        number=number, faults=tuple(sorted(faults, key=lambda each: each.after)), seconds=round(max(ends) + 0.5, 3)
    )


#: Yards: replicas, staleness. Schedules are dealt out to them in turn, a block at a time.
YARDS = ((2, None), (3, None), (2, 8), (3, 8))


def run(
    schedules: Sequence[int],
    *,
    seed: int,
    folder: Path,
    replicas: int,
    staleness: int | None,
    servers: int = 4,
    workers: int = 2,
) -> Iterator[Result]:
    """These schedules on one yard."""
    yard = Yard(folder, servers=servers, replicas=replicas, workers=workers, staleness=staleness)
    try:
        for number in schedules:
            yield yard.run(draw(seed, number, replicas=replicas, servers=servers, workers=workers))
    finally:
        yard.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first one, to run some again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for the histories")
    settings = parser.parse_args(argv)
    results: list[Result] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = settings.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        numbers = range(settings.first, settings.first + settings.schedules)
        block = -(-settings.schedules // len(YARDS))
        for place, (replicas, staleness) in enumerate(YARDS):
            part = numbers[place * block : (place + 1) * block]
            for result in (
                run(part, seed=settings.seed, folder=folder, replicas=replicas, staleness=staleness) if part else ()
            ):
                results.append(result)
                _tell(result, replicas, staleness)
    return _publish(results, settings, time.monotonic() - began)


def _tell(result: Result, replicas: int, staleness: int | None) -> None:
    waits = ", ".join(f"{what} {'never' if wait is None else f'{wait:.2f} s'}" for what, wait in result.failovers)
    print(
        f"{result.schedule.number}: replicas {replicas}, staleness {staleness}, {'; '.join(map(str, result.schedule.faults))}: "
        f"{result.pushes} pushes, {result.reads} reads, {result.seconds:.1f} s{', failover ' + waits if waits else ''}",
        file=sys.stderr,
        flush=True,
    )
    for each in result.wrong[:10]:
        print(f"  WRONG: {each}", file=sys.stderr, flush=True)


def _publish(results: Sequence[Result], settings: argparse.Namespace, seconds: float) -> int:
    def row(what: str, value: float, text: str, **bounds: float) -> Row:
        return Row(what={"what": what}, value=value, text=text, **bounds)

    wrong = [each for result in results for each in result.wrong]
    rows = [
        row("schedules with anything lost, twice, unequal or without end", sum(bool(result.wrong) for result in results),
            f"{sum(bool(result.wrong) for result in results)} of {len(results)}", limit=0),
        row("acknowledged pushes checked", sum(result.pushes for result in results), f"{sum(result.pushes for result in results)}"),
        row("reads checked", sum(result.reads for result in results), f"{sum(result.reads for result in results)}"),
    ]  # fmt: skip
    deaths = [each for result in results for each in result.failovers]
    endless = sum(wait is None for _, wait in deaths)
    rows.append(row("failovers that never ended", endless, f"{endless} of {len(deaths)}", limit=0))
    for kind in ("kill", "stop"):
        waits = [wait for what, wait in deaths if what == kind and wait is not None]
        if waits:
            middle = median(waits)
            text = f"median {middle.median:.3f} s, 95 % below {np.percentile(waits, 95):.3f} s, most {max(waits):.3f} s ({len(waits)})"
            rows.append(row(f"failover after a server's {kind}", middle.median, text, limit=FAILOVER_LIMIT))
    notes = [f"seed {settings.seed}, {seconds:.0f} s in all", *wrong[:20]]
    return publish("Faults on the parameter server", rows, json_path=settings.json, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
