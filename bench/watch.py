"""What watching a run costs: step times on two ranks with everything watched and with nothing, in turns.

    python -m bench.watch [--only mlp,gpt] [--rounds 100] [--json watch.json]

Watched: replicas' checksums, samples, the order of calls, the counts of averaged losses. Each round times four runs, a few steps each:
A B B A in half of the rounds, B A A B in the others. The figures are medians over rounds, with the standard error of the cost (by
resampling rounds) and the cost in CPU time, which other processes disturb less.
Limit: 0.5 % of steps of 100 ms and more, else 0.3 ms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.engine.run import Run
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.testing.models import GPT, MLP
from echelon.testing.rank_pool import RankPool
from echelon.world import World

SHARE, SECONDS, LONG = 0.005, 3e-4, 0.1
#: Workload -> (plan, steps per turn).
CASES = {"mlp": ("dp=2", 5), "mlp tp": ("tp=2", 5), "gpt": ("dp=2", 2), "gpt zero": ("dp=2 zero=3", 2)}

ORDERS = ((True, False, False, True), (False, True, True, False))

#: Seconds of a step with the watch and without, by the clock and of this process's CPU time.
Round = tuple[float, float, float, float]


def job(name: str) -> Job:
    """The workload's job."""
    draw = torch.Generator().manual_seed(0)
    if name.startswith("mlp"):
        return Job(
            model=lambda: MLP(width=128, layers=4, inputs=64, classes=10),
            loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
            data=TensorDataset(torch.randn(4096, 64, generator=draw), torch.randint(0, 10, (4096,), generator=draw)),
            batch_size=128,
            epochs=10000,
        )
    text = torch.randint(0, 512, (512, 65), generator=draw)
    return Job(
        model=lambda: GPT(vocab=512, context=64, width=192, layers=4, heads=4),
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[-1].flatten()),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        data=TensorDataset(text[:, :-1].clone(), text[:, 1:].clone()),
        batch_size=16,
        epochs=10000,
    )


def race(world: World, name: str, rounds: int, order: tuple[bool, ...]) -> list[Round]:
    """The rounds as this rank measured them. `order`: which of four runs are watched."""
    made = job(name)
    plan, steps = CASES[name]
    runs = [Run(made, complete(from_text(plan), made), world, monitor_divergence=on) for on in order]
    for run, on in zip(runs, order, strict=True):
        if not on:
            _blind(run)
    batches = [run.batches() for run in runs]

    def turn(which: int) -> tuple[float, float]:
        runs[which].ranks.barrier()
        clock, cpu = time.perf_counter(), time.process_time()
        for batch in itertools.islice(batches[which], steps):
            runs[which].step(batch)
        return (time.perf_counter() - clock) / steps, (time.process_time() - cpu) / steps

    for which in (0, 1, 2, 3) * 5:
        turn(which)
    found = []
    for _ in range(rounds):
        turns = [turn(which) for which in range(4)]
        watched, without = (
            [sum(each[i] for each, on in zip(turns, order, strict=True) if on == kind) / 2 for i in (0, 1)]
            for kind in (True, False)
        )
        found.append((watched[0], without[0], watched[1], without[1]))
    for run in runs:
        run.close()
    return found


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the median, by resampling."""
    draw = random.Random(0)
    return statistics.stdev(statistics.median(draw.choices(values, k=len(values))) for _ in range(300))


def _blind(run: Any) -> None:
    """Have a run look at nothing: neither at counts nor at buffers that a step might have to put back."""
    run.train_step.loss_weighing.averages.add_part = lambda loss, samples, again: ()
    run.train_step._buffer_rollback.save = lambda: None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; 0 when every limit holds."""
    parser = argparse.ArgumentParser(prog="python -m bench.watch", description="What watching a run costs")
    parser.add_argument("--only", default=",".join(CASES), help="workloads, separated by commas")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    rows = []
    with RankPool() as pool:
        for name in asked.only.split(","):
            found = [
                each
                for order in ORDERS
                for each in pool.run(2, "bench.watch:race", name, -(-asked.rounds // 2), order, timeout=1200)[0]
            ]
            off = statistics.median(without for _, without, _, _ in found)
            costs = [watched - without for watched, without, _, _ in found]
            cost, cpu = (
                statistics.median(costs),
                statistics.median(watched - without for _, _, watched, without in found),
            )
            spread = standard_error(costs)
            limit = SHARE * off if off >= LONG else SECONDS
            rows.append(
                {"workload": name, "plan": CASES[name][0], "step_ms": off * 1e3, "cost_ms": cost * 1e3, "error_ms": spread * 1e3,
                 "cpu_ms": cpu * 1e3, "percent": 100 * cost / off, "limit_ms": limit * 1e3, "holds": cost <= limit}
            )  # fmt: skip
            print(
                f"{name:10} {CASES[name][0]:12} step {off * 1e3:8.2f} ms  watch {cost * 1e3:7.3f} ± {spread * 1e3:.3f} ms "
                f"({100 * cost / off:.2f} %), CPU {cpu * 1e3:.3f} ms  limit {limit * 1e3:.2f} ms",
                flush=True,
            )
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
