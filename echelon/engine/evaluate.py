"""The one true value of the loss and the metrics over a data set: each sample counts once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.data.loader import Micro, evaluation_batches
from echelon.data.source import is_stream, open_source
from echelon.data.stream import Stream, evaluation_stream
from echelon.engine.precision import autocast
from echelon.errors import JobError
from echelon.job import call_loss, call_model

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
            batch = run.move(micro.batch)
            with autocast(run.precision, run.device):
                output = call_model(job, run.model, batch)
                values = [
                    call_loss(job, output, batch, run.model),
                    *(metric(output, batch) for metric in job.metrics.values()),
                ]
            if micro.samples:  # a filler only keeps the ranks in step
                for name, row, value in zip(names, sums, values, strict=True):
                    for place, part in zip(row, _pair(value, micro.samples), strict=True):
                        place += _scalar(part, name)
    finally:
        run.model.train()
        run.rest()
    run.data.sum(sums)
    return {
        name: float(total / count) if count else float("nan") for name, (total, count) in zip(names, sums, strict=True)
    }


def _micros(run: Run, data: Any) -> Iterator[Micro]:
    data_ranks = run.data
    rank, ranks, size = data_ranks.rank, data_ranks.size, run.plan.micro or -(-run.job.batch // data_ranks.size)
    collate, seed = run.job.collate, run.job.seed
    with run.ranks.together():
        if is_stream(data):
            stream = Stream(data, collate=collate, seed=seed)
            return evaluation_stream(stream, rank=rank, ranks=ranks, size=size, agree=data_ranks.gather)
        source, pin = open_source(data, collate=collate, seed=seed), run.device.type == "cuda"
        return evaluation_batches(source, rank=rank, ranks=ranks, size=size, pin=pin, workers=run.workers)


def _pair(value: Any, samples: int) -> tuple[Any, Any]:
    """(sum, count) of a metric that gave either that or a mean."""
    if isinstance(value, tuple):
        return value
    # Half precision has too few digits for a sum over a batch.
    return (value.double() if isinstance(value, Tensor) else value) * samples, samples


def _scalar(part: Any, name: str) -> Tensor | float:
    """What can be added to a sum on any device without waiting for that device."""
    if not isinstance(part, Tensor):
        return float(part)
    if part.numel() != 1:
        raise JobError(
            f"metric {name!r} gave a tensor of shape {tuple(part.shape)}: give a scalar mean, or (sum, count)"
        )
    return part.reshape(())
