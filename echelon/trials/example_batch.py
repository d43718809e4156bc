"""A small batch of a job's own data, for tracing: a few samples, repeated to any size."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, Subset, default_collate

from echelon.errors import DataError
from echelon.job import Job
from echelon.tree import tree_tensors
from echelon.trials.dataset_state import preserve_datasets

#: Samples that are read, spread over the data set: enough to see that lengths differ, few enough to read at once.
MAX_SAMPLES = 8


class ExampleBatches:
    """Batches of any size out of a few real samples."""

    def __init__(self, job: Job) -> None:
        self._dataset = job.data
        self.collate = job.collate or getattr(_find_full_dataset(job.data), "packed_collate", None) or default_collate
        with preserve_datasets(job.data):
            self.samples, self.dataset_length = _read_samples(job.data)
        self.sample_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tree_tensors(self.batch(1)))

    def batch(self, size: int, *, first_sample: int = 0) -> Any:
        """A collated batch of `size` samples, from number `first_sample` on."""
        return self.collate([self.samples[i % len(self.samples)] for i in range(first_sample, first_sample + size)])

    def read_more(self, count: int, seconds: float) -> list[Any]:
        """Up to `count` samples spread over the data set, as many as can be read in `seconds`; an even number."""
        samples, deadline = list[Any]() if self.dataset_length else self.samples, time.monotonic() + seconds
        with preserve_datasets(self._dataset):
            for index in _spread_indices(count, self.dataset_length):
                samples.append(self._dataset[index])
                if time.monotonic() > deadline:
                    break
        return samples[: len(samples) // 2 * 2]


def _spread_indices(count: int, length: int) -> list[int]:
    return [index * length // min(count, length) for index in range(min(count, length))]


def _find_full_dataset(data: Any) -> Any:
    """The data set of a Subset, which knows how to collate its samples."""
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
            name = type(data).__name__
            raise DataError(f"data={name} has no length; give a data set with __len__ and __getitem__") from error
        samples = [data[index] for index in _spread_indices(MAX_SAMPLES, length)]
    if not samples:
        raise DataError("data= is empty: there is no sample to profile with")
    return samples, length
