"""Read samples once and send them to every rank, to verify a plan on data that differs between reads.

A data set with entropy of its own (augmentation by `os.urandom`) returns other samples to every reader. That is fine under data
parallelism, where one rank reads each sample; but two runs can only be compared on the same samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from echelon.data.open_data import is_stream, open_source
from echelon.engine.process_groups import WorldCommunicator
from echelon.job import Job
from echelon.trials.dataset_state import preserve_datasets
from echelon.verifier.reference_data import open_reference_data


class FrozenSamples(Dataset[Any]):
    """A data set with some samples read in advance."""

    def __init__(self, data: Any, samples: Mapping[int, Any]) -> None:
        self._data, self._samples = data, samples

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index] if index in self._samples else self._data[index]


def freeze_samples(job: Job, ranks: WorldCommunicator, steps: int) -> Job | None:
    """The job with the samples of its first steps as rank 0 reads them; None: it has no samples by index. Every rank must call it."""
    if is_stream(job.data) or not hasattr(job.data, "__getitem__"):
        return None
    samples: dict[int, Any] = {}
    with ranks.raise_on_all_ranks():
        if ranks.world.is_main:
            with preserve_datasets(job.data):
                source = open_source(job.data, collate=job.collate, seed=job.seed)
                order = source.make_order(batch=job.batch_size, seed=job.seed, drop_last=job.drop_last)
                chosen_steps = open_reference_data(job).choose_steps(steps)
                ids = np.unique(np.concatenate([order.ids(step, 0, order.batch_size(step)) for step in chosen_steps]))
                samples = {index: job.data[index] for index in ids.tolist()}
    return dataclasses.replace(job, data=FrozenSamples(job.data, ranks.broadcast_object(samples)))
