"""A rank that reads wrong samples is named; samples that change with every reading raise no alarm."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from echelon.engine.run import Run
from echelon.plan.text import from_text
from echelon.verifier.reference_data import ReferenceData, open_reference_data
from echelon.verifier.spot_check_batch import MicroBatchReading, collect_readings, find_misreading_rank
from echelon.world import World
from tests.verifier import unusual

BATCH = torch.arange(16.0).reshape(8, 2)


class Flips(ReferenceData):
    """One batch, of which the readings with these numbers (from 1) have the sign of a sample changed."""

    def __init__(self, *flipped: int, sample: int = 6) -> None:
        self.batch_size, self.total_steps, self.reads = len(BATCH), 1, 0
        self._flipped, self._sample = flipped, sample

    def samples_in(self, step: int) -> int:
        return self.batch_size

    def read(self, step: int, positions: numpy.ndarray) -> Any:
        self.reads += 1
        return _flipped(BATCH, self._sample if self.reads in self._flipped else None)[positions]


def _flipped(batch: Tensor, *samples: int | None) -> Tensor:
    batch = batch.clone()
    batch[[each for each in samples if each is not None]] *= -1
    return batch


def parts(*samples: int, steady: bool | None = None) -> list[MicroBatchReading]:
    """Two ranks' parts, of which these samples are flipped."""
    read = _flipped(BATCH, *samples)
    return [MicroBatchReading(0, read[:4], 4, steady), MicroBatchReading(1, read[4:], 4, steady)]


@pytest.mark.parametrize(
    ("read", "feed", "rank"),
    [
        (parts(steady=True), Flips(), None),
        (parts(6, steady=True), Flips(), 1),
        (parts(6, steady=False), Flips(), None),
        (parts(6, steady=True), Flips(9), None),
        (parts(6), Flips(), None),
        (parts(4, 5, 6), Flips(), 1),
        (parts(4, 5, 6), Flips(9), None),
        (parts(0, 1, 2, 4, 5, 6), Flips(), None),
    ],
    ids=[
        "equal", "another sample", "changes on its rank", "changes on rank 0", "one sample, read once", "most samples, read once",
        "most samples change", "every rank's differ",
    ],
)  # fmt: skip
def test_a_rank_misreads_where_its_samples_differ_again_and_again(
    read: list[MicroBatchReading], feed: Flips, rank: int | None
) -> None:
    assert find_misreading_rank(0, read, feed) == rank


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Once it is `armed`, it flips one sample in one of its readings."""

    def __init__(self) -> None:
        self.armed, self.reads = False, 0

    def __len__(self) -> int:
        return len(unusual.X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += self.armed
        flips = self.armed and self.reads == 30
        return unusual.X[index] * (-1 if flips else 1), unusual.Y[index]


def test_a_part_is_steady_where_it_is_read_the_same_many_times() -> None:
    data = Augmented()
    job = unusual.job(data=data)
    with Run(job, from_text("dp=1 micro=4"), World()) as run:
        batch = next(run.batches())
        assert [part.is_steady for part in collect_readings(run, batch, open_reference_data(job))] == [True, True]
        assert [part.is_steady for part in collect_readings(run, batch)] == [None, None]
        data.armed = True  # the thirtieth reading is of the first part, of four samples
        assert [part.is_steady for part in collect_readings(run, batch, open_reference_data(job))] == [False, True]
