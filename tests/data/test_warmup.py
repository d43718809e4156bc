"""A small part first, then all: numbered on, resumed anywhere, and refused in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from echelon.engine.run import Run
from echelon.errors import IncompatibleCheckpointError, JobError
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.world import World

X = torch.arange(40.0).reshape(40, 1)


def job(**changes: Any) -> Job:
    given = {
        "model": lambda: nn.Linear(1, 1), "loss": lambda output, batch: F.mse_loss(output, batch[-1]),
        "optimizer": lambda p: torch.optim.SGD(p, lr=1e-4), "data": TensorDataset(X, X), "batch_size": 8, "epochs": 2,
    }  # fmt: skip
    return Job(**given | changes)


def seen(run: Run, stop: int | None = None) -> list[tuple[int, list[float]]]:
    return [(batch.step, sorted(batch.micro_batches[0].batch[0].flatten().tolist())) for batch in run.batches(stop)]


def test_a_data_set_of_its_own_comes_first_once() -> None:
    part = TensorDataset(100 + X[:12], X[:12])
    with Run(job(warmup_data=part), Plan(), World()) as run:
        assert (run.warmup_steps, run.total_steps) == (2, 2 + 10)
        found = seen(run)
    with Run(job(), Plan(), World()) as plain:
        assert [(step - 2, values) for step, values in found[2:]] == seen(plain)
    assert [step for step, _ in found] == list(range(12))
    assert sorted(value for _, values in found[:2] for value in values) == [100.0 + n for n in range(12)]


def test_a_fraction_is_a_part_of_the_data_drawn_by_the_seed() -> None:
    with Run(job(warmup_data=0.3), Plan(), World()) as run:
        assert run.warmup_steps == 2  # of 5 steps an epoch, 1.5 and no less
        first = seen(run)
        assert {value for _, values in first[:2] for value in values} <= set(X.flatten().tolist())
        assert first[0][1] != first[2][1]
    with Run(job(warmup_data=0.3), Plan(), World()) as run:
        assert seen(run) == first


def test_it_resumes_within_and_after_the_warm_up(tmp_path: Path) -> None:
    made = job(warmup_data=0.5)
    with Run(made, Plan(), World()) as run:
        whole = [float(run.step(batch).loss) for batch in run.batches()]
    for stop in (2, 5):
        with Run(made, Plan(), World()) as run:
            before = [float(run.step(batch).loss) for batch in run.batches(stop)]
            run.save(tmp_path / str(stop))
        with Run(made, Plan(), World()) as run:
            run.load(tmp_path / str(stop))
            assert before + [float(run.step(batch).loss) for batch in run.batches()] == whole
    for other in (job(), job(warmup_data=0.3)):
        with (
            Run(other, Plan(), World()) as run,
            pytest.raises(IncompatibleCheckpointError, match="the order would differ"),
        ):
            run.load(tmp_path / "2")


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(1), torch.zeros(1)


def test_what_cannot_be_is_refused() -> None:
    for given in (0, 1.0, -0.1, 1.5):
        with pytest.raises(JobError, match="the fraction of data= to begin with, above 0 and below 1"):
            job(warmup_data=given)
    with pytest.raises(JobError, match="warmup_data= is empty"):
        job(warmup_data=[])
    with pytest.raises(JobError, match="warmup_data= is a stream of unknown length"):
        Run(job(warmup_data=Endless()), Plan(), World())
    stream = replace(job(warmup_data=0.5), data=Endless(), epochs=None, steps=3)
    with pytest.raises(JobError, match="data= is a stream, which has no fraction"):
        Run(stream, Plan(), World())
