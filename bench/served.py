"""Forecasts of plans with a parameter server against runs of the engine, on this machine.

    python -m bench.served [--json OUT] [--rounds 2] [--refresh]

A recommender with two tables of 200,000 rows under plans with 1 and 2 ranks, 1 and 2 servers, with and without a replica, in step and not.
Ids are drawn evenly, as a forecast takes them. The plain plan is run beside them: what the ranks themselves do is forecast elsewhere
(bench.forecast), and its error is not the servers'.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from bench.common import Row, publish
from echelon.engine.run import Run
from echelon.hardware import measure
from echelon.hardware.measure_cluster import BackgroundLoad
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.profiler import profile
from echelon.simulator import simulate
from echelon.testing.rank_pool import RankPool
from echelon.world import World

#: DESIGN.md: time within 25 %.
TIME = 0.25
ROWS, DIM, BATCH, SEEN = 200_000, 64, 2048, 8
#: Steps that are timed, after those in which the tables' ids are learned to be foreseen.
STEPS, WARM = 20, 5
PLANS = (
    "dp=1 threads=1",
    "dp=1 threads=1 exchange=server",
    "dp=1 threads=1 exchange=server servers=2 replicas=2",
    "dp=1 threads=1 exchange=server dense=server",
    "dp=2 threads=1 exchange=server",
    "dp=2 threads=1 exchange=server servers=2",
    "dp=2 threads=1 exchange=server servers=2 staleness=4",
    "dp=2 threads=1 exchange=server servers=2 staleness=4 dense=server",
)


class Clicks(nn.Module):
    """A user and what was seen before, as rows of two tables, through three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.seen = nn.Embedding(ROWS, DIM), nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.top = nn.Sequential(nn.Linear(2 * DIM, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, users: Tensor, seen: Tensor) -> Tensor:
        """Logits."""
        return self.top(torch.cat([self.users(users), self.seen(seen)], 1)).squeeze(1)


def job() -> Job:
    """Clicks drawn evenly."""
    draw, count = torch.Generator().manual_seed(0), BATCH * (STEPS + WARM + 2)
    users, seen = (torch.randint(ROWS, shape, generator=draw) for shape in ((count,), (count, SEEN)))
    return Job(
        name="clicks",
        model=Clicks,
        loss=lambda output, batch: F.binary_cross_entropy_with_logits(output, batch[-1]),
        optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
        data=TensorDataset(users, seen, torch.rand(count, generator=draw).round()),
        batch_size=BATCH,
        steps=1000,
    )


def run_plan(world: World, document: str) -> list[float]:
    """On each rank: seconds of each step."""
    torch.set_num_threads(1)
    run = Run(job(), Plan.from_json(document), world, device=torch.device("cpu"))
    seconds = []
    began = time.perf_counter()
    for batch in run.batches(STEPS + WARM):
        run.step(batch)
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    run.synchronize()
    run.ranks.barrier()  # the servers end with rank 0
    run.close()
    return seconds[WARM:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.served", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="times that every plan is run")
    parser.add_argument("--refresh", action="store_true", help="measure the machine again")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    cluster, made, others = measure(refresh=options.refresh), job(), BackgroundLoad()
    known = profile(made)
    forecasts = {text: simulate(known, cluster, complete(from_text(text), made, known)) for text in PLANS}
    seconds: dict[str, list[float]] = {text: [] for text in PLANS}
    for _ in range(options.rounds):
        for text, forecast in forecasts.items():
            with RankPool() as pool:
                answers = pool.run(forecast.plan.ranks, run_plan, forecast.plan.to_json(), timeout=300)
            seconds[text] += [float(np.mean(each)) for each in zip(*answers, strict=True)]
            print(f"{text}: {np.median(seconds[text]) * 1e3:.1f} ms", file=sys.stderr, flush=True)
    lines = []
    for text, forecast in forecasts.items():
        told, truth = forecast.time.step, float(np.median(seconds[text]))
        lines.append(
            Row(
                what={"plan": text, "forecast": f"{told * 1e3:.1f} ms", "measured": f"{truth * 1e3:.1f} ms"},
                value=abs(told / truth - 1),
                text=f"{told / truth - 1:+.0%}",
                limit=TIME,
                detail={"interval": [forecast.time.low, forecast.time.high], "steps": seconds[text]},
            )
        )
    notes = [*cluster.notes, f"others used {others.share:.0%} of the cores during the runs"]
    return publish("Forecast against measured: parameter servers", lines, json_path=options.json, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
