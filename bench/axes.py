"""What the axes cost: echelon's step time under tp=2, pp=2 and zero=3 on two ranks against the same thing written by hand.

    python -m bench.axes [--only tp,pp,zero] [--rounds 30] [--seconds 180] [--json axes.json]

By hand is byhand.py: torch's own API on a model whose author knew how it would be cut. Both sides have the same values, batch,
micro-batches, schedule, optimizer kernel and threads (one per rank), live in the same two processes and take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.common import ROUNDS, Contender, Row, Timing, among, publish, ratio, tell
from bench.contenders import Echelon, quietly
from bench.handwritten import BY_HAND
from bench.ranks import race
from bench.workloads import WORKLOADS
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World

LIMIT = 1.03  # the project's
#: Axis -> the plan in short form.
PLANS = {"tp": "tp=2", "pp": "pp=2 micro=2", "zero": "dp=2 zero=3"}
WORKLOAD = WORKLOADS["gpt-axes"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; 0 when every limit holds."""
    parser = argparse.ArgumentParser(prog="python -m bench.axes", description="the axes against torch's API by hand")
    parser.add_argument("--only", type=among(*PLANS), default=",".join(PLANS), help="axes, separated by commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds (A B B A) of each race")
    parser.add_argument("--seconds", type=float, default=180.0, help="time limit of each race")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    rows = []
    with RankPool() as pool:
        for axis in asked.only:
            plan = complete(replace(from_text(PLANS[axis]), threads=1), WORKLOAD.job())
            patience = asked.seconds * 3 + 300
            ours, theirs = pool.run(2, race_axis, axis, plan, asked.rounds, asked.seconds, timeout=patience)[0]
            rows.append(_row(axis, ours, theirs))
    notes = [
        "ratio of step times: median [95 % interval] over the rounds; the upper end is held against the limit",
        "CPU time is of both ranks together: where it disagrees with wall time something else was running",
        WORKLOAD.what,
    ]
    return publish("Step time of the axes against torch's API by hand", rows, json_path=asked.json, notes=notes)


def race_axis(world: World, axis: str, plan: Plan, rounds: int, seconds: float) -> list[Timing]:
    """On each rank: echelon under `plan` and the same by hand, in turns."""
    torch.set_num_threads(1)
    with quietly():
        contenders: list[Contender] = [Echelon(WORKLOAD, world, plan), BY_HAND[axis](WORKLOAD, world, plan)]
        return race(contenders, block=1, rounds=rounds, seconds=seconds)


def _row(axis: str, ours: Timing, theirs: Timing) -> Row:
    wall, cpu = ratio(ours, theirs), ratio(ours, theirs, "cpu")
    spent = [float(np.median(timing.cpu)) for timing in (ours, theirs)]
    what = {
        "plan": PLANS[axis],
        "echelon, by hand": f"{ours.step:.3f} s, {theirs.step:.3f} s",
        "CPU": f"{spent[0]:.3f} s, {spent[1]:.3f} s",
        "CPU ratio": str(cpu),
    }
    detail = {"ours": ours, "theirs": theirs, "wall": wall, "cpu": cpu}
    return tell(Row(what=what, value=wall.high, text=f"{wall}, {len(ours.wall)} rounds", limit=LIMIT, detail=detail))


if __name__ == "__main__":
    raise SystemExit(main())
