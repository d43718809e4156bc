"""The one true value of the loss and the metrics over a data set: each sample counts once, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.data.loader import Micro, evaluation_batches
from echelon.data.source import is_stream, open_source
from echelon.data.stream import Stream, evaluation_stream
from echelon.errors import JobError
from echelon.job import Job, call_loss, call_model
from echelon.plan.split import sizes

if TYPE_CHECKING:
    from echelon.engine.run import Run


@torch.no_grad()
def evaluate(run: Run, data: Any = None) -> dict[str, float]:
    """Loss and the job's metrics over `data` (default: the job's evaluation set). Every rank must call it."""
    job = run.job
    data = job.evaluation if data is None else data
    if data is None:
        raise JobError("nothing to evaluate on: give the job evaluation=, or pass a data set")
    names = ["loss", *job.metrics]
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=run.device)
    run.model.eval()
    try:
        for micro in _micros(run, data):
            values = run.values(run.move(micro.batch))
            if micro.samples and values is not None:  # a filler only keeps the ranks in step
                sums += _pairs(values, micro.samples)
    finally:
        run.model.train()
        run.rest()
    run.data.sum(sums)
    run.core.sum(sums if run.tells else sums.zero_())
    return {
        name: float(total / count) if count else float("nan") for name, (total, count) in zip(names, sums, strict=True)
    }


def _pairs(values: Tensor, samples: int) -> Tensor:
    """(sum, count) for each value, of means (whose count is NaN) as well."""
    means = values[:, 1].isnan()
    return torch.where(means[:, None], torch.stack([values[:, 0] * samples, means.double() * samples], 1), values)


def measured(job: Job, model: nn.Module, batch: Any) -> Tensor:
    """The loss and each metric of a batch, as rows of (sum, count), or of (mean, NaN)."""
    output = call_model(job, model, batch)
    loss = call_loss(job, output, batch, model)
    where = (loss[0] if isinstance(loss, tuple) else loss).device
    found = {"loss": loss} | {name: metric(output, batch) for name, metric in job.metrics.items()}
    return torch.stack([_row(name, value, where) for name, value in found.items()])


def _row(name: str, value: Any, device: torch.device) -> Tensor:
    pair = value if isinstance(value, tuple) else (value, math.nan)
    # Half precision has too few digits for a sum over a batch.
    return torch.stack([torch.as_tensor(_scalar(part, name), dtype=torch.float64, device=device) for part in pair])


def _micros(run: Run, data: Any) -> Iterator[Micro]:
    data_ranks = run.data
    rank, ranks = data_ranks.rank, data_ranks.size
    # All ranks have as many samples here, so that no more than the smallest share fits everywhere.
    size = run.plan.micro or (min if run.plan.shares else max)(sizes(run.job.batch, ranks, run.plan.shares))
    collate, seed = run.job.collate, run.job.seed
    with run.ranks.together():
        pin = run.device.type == "cuda"
        if is_stream(data):
            stream = Stream(data, collate=collate, seed=seed)
            alike = run.ranks.size // ranks
            agree = run.ranks.gather
            return evaluation_stream(stream, rank=rank, ranks=ranks, size=size, agree=agree, pin=pin, alike=alike)
        source = open_source(data, collate=collate, seed=seed)
        return evaluation_batches(source, rank=rank, ranks=ranks, size=size, pin=pin, workers=run.workers)


def _scalar(part: Any, name: str) -> Tensor | float:
    """What can be added to a sum on any device without waiting for that device."""
    if not isinstance(part, Tensor):
        return float(part)
    if part.numel() != 1:
        raise JobError(
            f"metric {name!r} gave a tensor of shape {tuple(part.shape)}: give a scalar mean, or (sum, count)"
        )
    return part.reshape(())
