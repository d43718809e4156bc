"""The parity table: the engine against a plain loop on one device, in float64, over every combination of the data axis.

    python -m bench.parity [--sample 60] [--ranks 1,2,4] [--json parity.json]

ranks x zero 0-3 x accumulation 1 or 4 x even or uneven last batch x clipping x optimizer x batch norm (none, local,
synchronised). Compared at every step: the loss and every gradient; at the end: every parameter, buffer and optimizer tensor.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from bench.common import Row, publish
from echelon.data.order import Order
from echelon.job import Job
from echelon.plan.batch_split import split_batch
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.testing.models import GPT
from echelon.testing.rank_pool import RankPool
from echelon.world import World

LIMIT = 1e-9  # the project's
BATCH, STEPS, SEED = 32, 4, 3
#: Three batches an epoch: all full, or the last with 29 samples, which neither 2 nor 4 ranks divide.
SAMPLES = {False: 96, True: 93}
CLIP = 0.05  # below every gradient norm that occurs, so that it always binds


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination."""

    ranks: int
    zero: int
    accumulation: int
    uneven: bool
    clip: bool
    optimizer: Literal["adamw", "sgd"]
    norm: Literal["none", "local", "sync"]

    def plan(self) -> Plan:
        """How the engine is to compute it."""
        micro = BATCH // self.ranks // self.accumulation if self.accumulation > 1 else None
        norm: Any = "sync" if self.norm == "sync" else "local"
        return Plan(mesh=Mesh(dp=self.ranks), zero=self.zero, micro=micro, batchnorm=norm)

    def job(self) -> Job:
        """What it computes."""
        return Job(
            model=_gpt if self.norm == "none" else ConvNet,
            loss=_token_loss if self.norm == "none" else _label_loss,
            optimizer=_adamw if self.optimizer == "adamw" else _sgd,
            data=TensorDataset(*_samples(self.norm == "none", SAMPLES[self.uneven])),
            batch_size=BATCH,
            steps=STEPS,
            clip_norm=CLIP if self.clip else None,
            seed=SEED,
        )


class ConvNet(nn.Module):
    """Two convolutions with batch norm over pixels, so that a micro-batch of one sample has statistics too.

    No biases before batch norm: their gradient is zero, and what would be compared is the rounding of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5)
        self.conv2, self.bn2 = nn.Conv2d(5, 7, 3, bias=False), nn.BatchNorm2d(7, momentum=0.3)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))).mean((2, 3)))


def _gpt() -> nn.Module:
    return GPT(vocab=11, context=6, width=12, layers=2, heads=2, tied=True)


def _token_loss(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sum and count over unmasked tokens: samples weigh differently, the harder kind."""
    targets = batch[-1].flatten()
    return F.cross_entropy(output.flatten(0, 1), targets, reduction="sum", ignore_index=-1), (targets >= 0).sum()


def _label_loss(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(output, batch[-1])


def _adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def _sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def _samples(tokens: bool, count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(SEED)
    if not tokens:
        return torch.randn(count, 3, 6, 6, generator=draw), torch.randint(3, (count,), generator=draw)
    text = torch.randint(11, (count, 7), generator=draw)
    lengths = torch.randint(1, 7, (count, 1), generator=draw)
    return text[:, :-1], text[:, 1:].masked_fill(torch.arange(6) >= lengths, -1)


def cells(ranks: Iterable[int] = (1, 2, 4)) -> list[Cell]:
    """Every combination."""
    axes: dict[str, Iterable[Any]] = {
        "ranks": ranks,
        "zero": range(4),
        "accumulation": (1, 4),
        "uneven": (False, True),
        "clip": (False, True),
        "optimizer": ("adamw", "sgd"),
        "norm": ("none", "local", "sync"),
    }
    return [Cell(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a training came to: per step the loss and the gradients, at the end everything."""

    losses: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def groups(cell: Cell, size: int) -> list[list[int]]:
    """Positions of the batch that go through the model together on one device, in order.

    Local batch norm: each micro-batch by itself. Synchronised: the ranks' j-th micro-batches at once.
    """
    shares = split_batch(size, cell.ranks, cell.plan().micro)
    if cell.norm == "sync":
        turns: Iterable[Iterable[Any]] = zip(*shares, strict=True)
    else:
        turns = ([part] for share in shares for part in share)
    return [[position for part in turn for position in range(part.start, part.stop)] for turn in turns]


@cache
def reference(cell: Cell) -> Record:
    """The plain loop. Nothing of the engine is in it."""
    job = cell.job()
    torch.manual_seed(job.seed)
    model = job.model().double().train()
    optimizer: Any = job.optimizer(model.parameters())
    order = Order(samples=len(job.data), batch=job.batch_size, seed=job.seed)
    losses: dict[str, Tensor] = {}
    gradients = []
    for step in range(STEPS):
        size = order.batch_size(step)
        inputs, targets = (part[torch.tensor(order.ids(step, 0, size))] for part in job.data.tensors)
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        items = (targets >= 0).sum()
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for group in groups(cell, size):
            value = job.loss(model(inputs[group]), (inputs[group], targets[group]))  # type: ignore[misc]
            part = value[0] / items if isinstance(value, tuple) else value * len(group) / size
            part.backward()
            loss += part.detach()
        losses[f"step {step}"] = loss
        gradients.append(
            {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
        )
        if job.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
            assert norm > job.clip_norm, "clipping that does not bind proves nothing"
        optimizer.step()
    names = {id(value): name for name, value in model.named_parameters()}
    state = {
        f"{names[id(value)]}/{key}": item
        for value, entry in optimizer.state.items()
        for key, item in entry.items()
        if isinstance(item, Tensor)
    }
    return Record(
        losses=losses,
        gradients=gradients,
        parameters={name: value.detach() for name, value in model.named_parameters()},
        buffers=dict(model.named_buffers()),
        optimizer=state,
    )


def measured(world: World, cell: Cell) -> Record | None:
    """The engine's; None but on rank 0."""
    from echelon.engine.run import Run

    run = Run(cell.job(), cell.plan(), world, dtype=torch.float64)
    losses: dict[str, Tensor] = {}
    gradients = []
    for batch in run.batches():
        loss = run.backward(batch)
        state = run.gather_full_state()
        run.update(loss, batch.samples)
        losses[f"step {batch.step}"] = loss.cpu()
        gradients.append(state.gradients if state is not None else {})
    state = run.gather_full_state()
    run.close()
    if state is None:
        return None
    optimizer = {path.split("/", 1)[1]: value for path, value in state.optimizer.items()}
    return Record(
        losses=losses, gradients=gradients, parameters=state.parameters, buffers=state.buffers, optimizer=optimizer
    )


def differences(ours: Record, theirs: Record) -> dict[str, float]:
    """The largest relative difference of each kind, as DESIGN.md defines it."""
    kinds: dict[str, list[tuple[dict[str, Tensor], dict[str, Tensor]]]] = {
        "loss": [(ours.losses, theirs.losses)],
        "gradient": list(zip(ours.gradients, theirs.gradients, strict=True)),
        "parameter": [(ours.parameters, theirs.parameters)],
        "buffer": [(ours.buffers, theirs.buffers)],
        "optimizer": [(ours.optimizer, theirs.optimizer)],
    }
    return {kind: max(_difference(*pair) for pair in pairs) for kind, pairs in kinds.items()}


def _difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    if ours.keys() != theirs.keys():
        return float("inf")
    floor = 1e-6 * max((value.abs().max().item() for value in theirs.values()), default=0.0)
    worst = 0.0
    for name, expected in theirs.items():
        gap = (ours[name].double() - expected.double()).abs().max().item()
        bound = max(expected.abs().max().item(), floor)
        worst = max(worst, gap / bound if bound else gap)
    return worst if np.isfinite(worst) else float("inf")


def compare(world: World, chosen: Sequence[Cell]) -> list[dict[str, float]]:
    """On each rank: run the cells; rank 0 holds them against the plain loop."""
    found = []
    for cell in chosen:
        ours = measured(world, cell)
        if ours is not None:
            found.append(differences(ours, reference(replace(cell, zero=0))))
    return found


def run(chosen: Sequence[Cell], pool: RankPool, *, timeout: float = 600.0) -> dict[Cell, dict[str, float]]:
    """The cells' differences, each on as many ranks as it names."""
    found: dict[Cell, dict[str, float]] = {}
    for ranks in sorted({cell.ranks for cell in chosen}):
        mine = [cell for cell in chosen if cell.ranks == ranks]
        found |= dict(zip(mine, pool.run(ranks, compare, mine, timeout=timeout)[0], strict=True))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0 when every difference is within the limit."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.parity", description="the engine against one device, in float64"
    )
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, separated by commas")
    parser.add_argument("--sample", type=int, help="only so many combinations, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every figure here")
    asked = parser.parse_args(arguments)
    chosen = cells(map(int, asked.ranks.split(",")))
    if asked.sample:
        chosen = random.Random(asked.seed).sample(chosen, min(asked.sample, len(chosen)))
    with RankPool() as pool:
        found = run(chosen, pool, timeout=3600)
    rows = []
    for ranks, zero in sorted({(cell.ranks, cell.zero) for cell in found}):
        mine = {cell: values for cell, values in found.items() if (cell.ranks, cell.zero) == (ranks, zero)}
        worst = {kind: max(values[kind] for values in mine.values()) for kind in next(iter(mine.values()))}
        what = {"ranks": str(ranks), "zero": str(zero), "combinations": str(len(mine))}
        detail = {"cells": [asdict(cell) | values for cell, values in mine.items()]}
        columns = {kind: f"{value:.1e}" for kind, value in worst.items()}
        top = max(worst.values())
        rows.append(Row(what=what | columns, value=top, text=f"{top:.1e}", limit=LIMIT, detail=detail))
    bad = [cell for cell, values in found.items() if max(values.values()) > LIMIT]
    notes = ["largest relative difference in float64 over accumulation, last batch, clipping, optimizer and batch norm"]
    return publish("Parity with one device", rows, json_path=asked.json, notes=notes + [f"off: {cell}" for cell in bad])


if __name__ == "__main__":
    from bench import parity  # under its own name, by which the ranks know its classes

    raise SystemExit(parity.main())
