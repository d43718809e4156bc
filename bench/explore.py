"""Larger cases of the model checker: python -m bench.explore [--seconds 60] [--json OUT]

All interleavings of the server protocol where time allows, else as many states as it does, in an order that --seed draws.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.server.model import Broken, Case, explore

CASES = [
    Case(pushes=2, crash=1, servers=3),
    Case(pushes=2, judge=1),
    Case(pushes=2, judge=1, crash=1, servers=3),
    Case(pushes=2, cut=2, crash=1),
    Case(pushes=2, controller=2, crash=1),
    Case(pushes=2, controller=1, judge=1),
    Case(pushes=2, join=1, crash=1),
    Case(pushes=2, join=1, judge=1),
    Case(pushes=2, drain=1, servers=3),
    Case(pushes=1, drain=1, servers=3, crash=1),
    Case(pushes=1, drain=1, servers=3, judge=1),
    Case(pushes=1, workers=2, judge=1),
    Case(pushes=1, workers=2, servers=3, replicas=3, crash=2),
    Case(pushes=1, workers=2, servers=3, replicas=3, judge=1),
    Case(pushes=1, shards=2, judge=1),
    Case(pushes=1, shards=2, join=1, crash=1),
    Case(pushes=2, workers=2, aggregate=True, crash=1),
    Case(pushes=1, workers=2, aggregate=True, judge=1),
]


def main() -> int:
    """Explore each case for a while; 1 if an invariant broke."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each case (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws the order where a case is not explored whole")
    parser.add_argument("--case", type=int, help="only this one, counted from 0")
    parser.add_argument("--json", type=Path, help="write what was found")
    asked = parser.parse_args()
    rows, broken = [], False
    for number, case in enumerate(CASES):
        if asked.case not in (None, number):
            continue
        what = " ".join(f"{name}={value}" for name, value in asdict(case).items() if value)
        row: dict[str, object] = {"case": asdict(case), "seed": asked.seed}
        try:
            found = explore(case, seconds=asked.seconds, seed=asked.seed)
            row |= asdict(found)
            print(
                f"{number:2} {what}: {found.states} states, {found.ends} ends, {'all' if found.whole else 'a part'}, {found.seconds:.0f} s",
                flush=True,
            )
        except Broken as error:
            broken = True
            row |= {"broken": error.what, "trail": error.trail}
            print(f"{number:2} {what}: BROKEN: {error.what}\n   " + "\n   ".join(error.trail), flush=True)
        rows.append(row)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
