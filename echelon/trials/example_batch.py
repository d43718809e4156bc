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
from echelon.trials.dataset_state import unread

#: Samples that are read, spread over the data set: enough to see that lengths differ, few enough to be read at once.
SPREAD = 8


class Example:
    """Batches of any size out of a few real samples."""

    def __init__(self, job: Job) -> None:
        self._data = job.data
        self.collate = job.collate or getattr(_whole(job.data), "packed_collate", None) or default_collate
        with unread(job.data):
            self.samples, self.length = _take(job.data)
        self.bytes = _bytes(self.batch(1))

    def batch(self, size: int, *, first: int = 0) -> Any:
        """A collated batch of `size` samples, from number `first` on."""
        return self.collate([self.samples[i % len(self.samples)] for i in range(first, first + size)])

    def more(self, count: int, seconds: float) -> list[Any]:
        """Up to `count` samples spread over the data set, and no more than can be read in so many seconds; an even number."""
        if not self.length:
            return self.samples[: len(self.samples) // 2 * 2]
        found, end = [], time.monotonic() + seconds
        with unread(self._data):
            for i in range(min(count, self.length)):
                found.append(self._data[i * self.length // min(count, self.length)])
                if time.monotonic() > end:
                    break
        return found[: len(found) // 2 * 2]


def _whole(data: Any) -> Any:
    """The data set that a Subset is a part of; it says how samples are put together."""
    return _whole(data.dataset) if type(data) is Subset else data


def _take(data: Any) -> tuple[list[Any], int]:
    """A few samples, and how many there are (0: unknown)."""
    if isinstance(data, IterableDataset):
        found = [sample for sample, _ in zip(data, range(SPREAD), strict=False)]
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
        found = [data[i * length // min(SPREAD, length)] for i in range(min(SPREAD, length))]
    if not found:
        raise DataError("data= is empty: there is no sample to profile with")
    return found, length


def _bytes(batch: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
