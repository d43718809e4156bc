"""A job can leave out the short last batch of an epoch, whatever its data is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from echelon.engine.run import Run
from echelon.plan.plan import Plan
from echelon.verifier.reference_data import open_reference_data
from echelon.world import World
from tests.flow.jobs import make


class Ten(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.full((8,), float(number)), torch.ones(1)) for number in range(10)])


def sizes(data: Any, drop_last: bool) -> list[int]:
    job = make(data=data, batch_size=4, epochs=None, steps=6, drop_last=drop_last)
    found = [batch.samples for batch in Run(job, Plan(), World()).batches()]
    feed = open_reference_data(job)
    assert [feed.samples_in(step) for step in range(6)] == found  # the proof sees the same
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_short_batches_are_left_out_if_asked(stream: bool) -> None:
    data = Ten() if stream else TensorDataset(torch.ones(10, 8), torch.ones(10, 1))
    assert sizes(data, False) == [4, 4, 2, 4, 4, 2]
    assert sizes(data, True) == [4] * 6
