"""A recommender on clicks whose best possible AUC is known, with the parameter server in step, within a bound, and without one.

    python -m bench.dlrm [--workers 2] [--seeds 5] [--first 0] [--train 1000000] [--test 1000000] [--json dlrm.json]

Clicks are drawn from a model that is known, over ids whose frequencies fall by a power law: no predictor orders new clicks better than that
model's own probabilities do. A DLRM (tables, a bottom and a top perceptron, products of pairs) learns from a part of them, once through,
with all parameters on the servers: workers really run at once and meet at the servers alone, but for staleness=0, where a step is of all.
What asynchrony costs is told seed by seed, against the synchronous run of the same clicks and the same first weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from bench.common import Row, publish, tell
from echelon.engine.backends.parameter_server import ParameterServerBackend
from echelon.engine.run import Run
from echelon.job import Job
from echelon.plan.parameter_server import ServedTable
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World

#: Rows of each table, and numbers in a row.
TABLES, DIM = (10_000, 5_000, 5_000, 2_000, 1_000, 500), 16
NUMBERS = 4
#: How fast frequencies of ids fall: the id number n comes n ** -POWER times as often as the first.
POWER = 1.05
BATCH = 1024
MODES = {
    "synchronous": "staleness=0",
    "staleness 4": "staleness=4",
    "asynchronous": "staleness=none",
}
#: What asynchrony may cost in AUC.
ALLOWED = 0.002
_SCORED = 2**15


@dataclasses.dataclass(frozen=True)
class Clicks:
    """What was shown and whether it was clicked; `truth`: the log-odds that a click was drawn by."""

    numbers: Tensor
    ids: Tensor
    labels: Tensor
    truth: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@lru_cache(maxsize=2)
def clicks(seed: int, count: int, part: str) -> Clicks:
    """`count` clicks of the world number `seed`; `part`: other draws of the same world."""
    world = np.random.default_rng([seed, 0])
    weights = world.normal(0, 0.5, NUMBERS)
    effects = [world.normal(0, 0.6, rows) for rows in TABLES]
    factors = [world.normal(0, 0.35, (rows, 4)) for rows in TABLES]
    draw = np.random.default_rng([seed, 1 + (part == "test")])
    numbers = draw.normal(0, 1, (count, NUMBERS)).astype(np.float32)
    ids = np.empty((count, len(TABLES)), np.int64)
    truth = numbers @ weights - 1.2
    for table, rows in enumerate(TABLES):
        often = np.arange(1, rows + 1, dtype=np.float64) ** -POWER
        found = np.searchsorted(np.cumsum(often / often.sum()), draw.random(count))
        ids[:, table] = world.permutation(rows)[np.minimum(found, rows - 1)]
        truth += effects[table][ids[:, table]]
    for left, right in ((0, 1), (2, 3), (4, 5)):
        truth += (factors[left][ids[:, left]] * factors[right][ids[:, right]]).sum(1)
    labels = (draw.random(count) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    return Clicks(torch.from_numpy(numbers), torch.from_numpy(ids), torch.from_numpy(labels), truth)


class Dlrm(nn.Module):
    """Tables, a perceptron for the numbers, the products of all pairs, and a perceptron over these."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, DIM, mode="sum") for rows in TABLES])
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        pairs = (len(TABLES) + 1) * len(TABLES) // 2
        self.top = nn.Sequential(nn.Linear(DIM * (len(TABLES) + 1) + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.05)  # type: ignore[arg-type]
        places = torch.tril_indices(len(TABLES) + 1, len(TABLES) + 1, -1)
        self.register_buffer("left", places[0], persistent=False)
        self.register_buffer("right", places[1], persistent=False)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        rows = [table(ids[:, place : place + 1]) for place, table in enumerate(self.tables)]
        features = torch.stack([self.bottom(numbers), *rows], 1)
        products = (features @ features.transpose(1, 2))[:, self.left, self.right]
        found: Tensor = self.top(torch.cat([features.flatten(1), products], 1)).squeeze(1)
        return found


def job(seed: int, count: int) -> Job:
    """Once through the clicks of a world."""
    held = clicks(seed, count, "train")
    return Job(
        name="dlrm",
        model=Dlrm,
        loss=lambda output, batch: F.binary_cross_entropy_with_logits(output, batch[-1]),
        optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.04),
        data=TensorDataset(held.numbers, held.ids, held.labels),
        batch_size=BATCH,
        epochs=1,
        seed=seed,
    )


def plan_of(workers: int, mode: str) -> Plan:
    """All tables and all else on two servers."""
    text = f"dp={workers} exchange=server dense=server servers=2 rows=500 threads=1 {MODES[mode]}"
    tables = tuple(ServedTable(path=f"tables.{place}", rows=rows, dim=DIM) for place, rows in enumerate(TABLES))
    return from_text(text).replace(tables=tables)


def learn(world: World, mode: str, seed: int, train: int, test: int) -> dict[str, float]:
    """Train on this rank beside the others; on rank 0 how well new clicks are told apart."""
    made = job(seed, train)
    began = cpu = 0.0
    most = 0
    with Run(made, plan_of(world.size, mode), world) as run:
        began, cpu = time.perf_counter(), time.process_time()
        for batch in run.batches():
            run.step(batch)
            if batch.step % 16 == 15 and isinstance(run.backend, ParameterServerBackend):
                most = max(most, run.backend.steps_ahead_of_slowest())
        run.check_last_step()
        run.synchronize()
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        held = clicks(seed, test, "test")
        scores = _gathered(world, torch.cat(list(_scored(run, held, world))))
        most = int(max(run.ranks.all_gather_object(most)))
    if not world.is_main:
        return {}
    labels = held.labels.numpy()
    return {"auc": auc(scores, labels), "best": auc(held.truth, labels), "seconds": took, "cpu": cpu, "ahead": most}


@torch.no_grad()
def _scored(run: Run, held: Clicks, world: World) -> Iterator[Tensor]:
    """This rank's share of the test."""
    run.model.eval()
    device = next(run.model.parameters()).device
    first, last = (part * len(held) // world.size for part in (world.rank, world.rank + 1))
    for begin in range(first, last, _SCORED):
        chosen = slice(begin, min(begin + _SCORED, last))
        yield run.model(held.numbers[chosen].to(device), held.ids[chosen].to(device)).cpu()


def _gathered(world: World, mine: Tensor) -> np.ndarray:
    if world.size == 1:
        return mine.numpy()
    everyone: list[np.ndarray] | None = [np.empty(0)] * world.size if world.is_main else None
    dist.gather_object(mine.numpy(), everyone)
    return np.concatenate(everyone) if everyone is not None else np.empty(0)


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """How often a click has a higher score than what was not clicked; equal ones count half."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    hits = labels > 0.5
    n, m = int(hits.sum()), int((~hits).sum())
    return float((ranks[hits].sum() - n * (n + 1) / 2) / (n * m))


def main() -> int:
    """All modes for each seed, in one order and then in the other."""
    parser = argparse.ArgumentParser(prog="python -m bench.dlrm", description="what asynchrony costs a recommender")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed, where several runs share them")
    parser.add_argument("--train", type=int, default=1_000_000)
    parser.add_argument("--test", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    rows: list[Row] = []
    with RankPool() as pool:
        for seed in range(asked.first, asked.first + asked.seeds):
            for mode in MODES if seed % 2 == 0 else reversed(MODES):
                made = pool.run(asked.workers, learn, mode, seed, asked.train, asked.test, timeout=1800)[0]
                found[mode].append(made["auc"])
                rows.append(tell(_learned(mode, seed, made)))
    rows += [tell(_cost(mode, found["synchronous"], found[mode])) for mode in list(MODES)[1:]]
    notes = [
        f"{asked.workers} workers, {asked.train:,} clicks learned, {asked.test:,} told apart, batches of {BATCH} over all workers"
    ]
    return publish("AUC of a DLRM with a parameter server", rows, json_path=asked.json, notes=notes)


def _learned(mode: str, seed: int, made: dict[str, float]) -> Row:
    text = f"AUC {made['auc']:.5f}, the best possible is {made['best']:.5f}; {made['seconds']:.1f} s, up to {made['ahead']:.0f} steps ahead"
    return Row(what={"mode": mode, "world": f"seed {seed}"}, value=made["auc"], text=text, detail=made)


def _cost(mode: str, true: list[float], mine: list[float]) -> Row:
    """What is lost against the synchronous run: the mean over seeds, and twice its standard error on top."""
    costs = np.array(true) - np.array(mine)
    error = float(costs.std(ddof=1) / np.sqrt(len(costs))) if len(costs) > 1 else 0.0
    worst = float(costs.mean()) + 2 * error
    text = f"{costs.mean():+.5f} ± {2 * error:.5f} less than synchronous (each: {', '.join(f'{each:+.5f}' for each in costs)})"
    return Row(what={"mode": mode, "world": "all seeds"}, value=worst, text=text, limit=ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
