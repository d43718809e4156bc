"""Samples that are read once and handed to every rank: so a plan can be proved on data that differs from reading to reading.

A data set with entropy of its own (augmentation by `os.urandom`) gives every reader other samples. Under data parallelism that is as it
should be, since each sample is read by one rank; only two runs cannot be compared unless both get the same reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Dataset

from echelon.data.source import is_stream, open_source
from echelon.engine.process_groups import Ranks
from echelon.job import Job
from echelon.trials.dataset_state import unread
from echelon.verifier.reference_data import open_feed


class FrozenSamples(Dataset[Any]):
    """A data set of which some samples were read beforehand."""

    def __init__(self, data: Any, kept: Mapping[int, Any]) -> None:
        self._data, self._kept = data, kept

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._kept[index] if index in self._kept else self._data[index]


def freeze(job: Job, ranks: Ranks, steps: int) -> Job | None:
    """The job with the samples of its first steps as rank 0 reads them; None: it has no samples by number. Every rank must call it."""
    if is_stream(job.data) or not hasattr(job.data, "__getitem__"):
        return None
    kept: dict[int, Any] = {}
    with ranks.together():
        if ranks.world.main:
            with unread(job.data):
                kept = {int(index): job.data[int(index)] for index in _numbers(job, steps)}
    box = [kept]
    if ranks.size > 1:
        dist.broadcast_object_list(box, 0)
    return dataclasses.replace(job, data=FrozenSamples(job.data, box[0]))


def _numbers(job: Job, steps: int) -> np.ndarray:
    """The samples that a proof of `steps` steps reads."""
    order = open_source(job.data, collate=job.collate, seed=job.seed).order(
        batch=job.batch, seed=job.seed, drop_last=job.drop_last
    )
    chosen = open_feed(job).steps(steps)
    return np.unique(np.concatenate([order.ids(step, 0, order.size(step)) for step in chosen]))
