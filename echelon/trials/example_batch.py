"""A small batch of a job's own data, for tracing: a few samples, repeated to the size that is asked for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset, default_collate

from echelon.errors import DataError
from echelon.job import Job
from echelon.tree import tree_leaves
from echelon.trials.dataset_state import preserve_datasets

#: Samples that are read, spread over the data set: enough to see that lengths differ, few enough to be read at once.
MAX_SAMPLES = 8


class ExampleBatches:
    """Batches of any size out of a few real samples."""

    def __init__(self, job: Job) -> None:
        self._dataset = job.data
        self.collate = job.collate or getattr(_find_full_dataset(job.data), "packed_collate", None) or default_collate
        with preserve_datasets(job.data):
            self.samples, self.dataset_length = _read_samples(job.data)
        self.sample_bytes = _count_bytes(self.batch(1))

    def batch(self, size: int, *, first_sample: int = 0) -> Any:
        """A collated batch of `size` samples, from number `first_sample` on."""
        return self.collate(
            [self.samples[index % len(self.samples)] for index in range(first_sample, first_sample + size)]
        )

    def read_more(self, count: int, seconds: float) -> list[Any]:
        """Up to `count` samples spread over the data set, and no more than can be read in so many seconds; an even number."""
        if not self.dataset_length:
            return self.samples[: len(self.samples) // 2 * 2]
        samples, deadline = [], time.monotonic() + seconds
        with preserve_datasets(self._dataset):
            for index in range(min(count, self.dataset_length)):
                samples.append(self._dataset[index * self.dataset_length // min(count, self.dataset_length)])
                if time.monotonic() > deadline:
                    break
        return samples[: len(samples) // 2 * 2]


def _find_full_dataset(data: Any) -> Any:
    """The data set that a Subset is a part of; it says how samples are put together."""
    return _find_full_dataset(data.dataset) if type(data) is Subset else data


def _read_samples(data: Any) -> tuple[list[Any], int]:
    """A few samples, and how many there are (0: unknown)."""
    if isinstance(data, IterableDataset):
        samples = [sample for sample, _ in zip(data, range(MAX_SAMPLES), strict=False)]
        length = 0
    elif isinstance(data, str | Path) or (isinstance(data, tuple) and data and hasattr(data[0], "shape")):
        raise DataError(
            f"data= is a {type(data).__name__}, not a data set: give one with __len__ and __getitem__, for arrays "
            "torch.utils.data.TensorDataset(inputs, targets), for packed data echelon.data.Packed(folder)"
        )
    else:
        try:
            length = len(data)
        except TypeError as error:
            raise DataError(
                f"data={type(data).__name__} has no length; give a data set with __len__ and __getitem__"
            ) from error
        samples = [data[index * length // min(MAX_SAMPLES, length)] for index in range(min(MAX_SAMPLES, length))]
    if not samples:
        raise DataError("data= is empty: there is no sample to profile with")
    return samples, length


def _count_bytes(batch: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
