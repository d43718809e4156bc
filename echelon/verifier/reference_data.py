"""The job's global batches for one device, and which of them a proof looks at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from echelon.data.open_data import is_stream, open_source
from echelon.data.stream import Stream
from echelon.job import Job
from echelon.tree import copy_tensors
from echelon.trials.trial_context import single_process_world


class ReferenceData(ABC):
    """Any samples of any step's global batch, together. `total_steps`: steps of the whole training, which schedules are told."""

    batch_size: int
    total_steps: int

    @abstractmethod
    def samples_in(self, step: int) -> int:
        """Samples of that step's global batch."""

    @abstractmethod
    def read(self, step: int, positions: np.ndarray) -> Any:
        """The samples at these positions of the step's global batch, collated together."""

    def read_as_rank(self, step: int, positions: np.ndarray) -> Any:
        """The same as this rank reads them, which sees that it is one of several. None: they cannot be read again so."""
        return None

    def choose_steps(self, count: int) -> tuple[int, ...]:
        """Which steps a proof of `count` steps runs."""
        return tuple(range(min(count, self.total_steps)))


def open_reference_data(job: Job) -> ReferenceData:
    """The feed of a job's data."""
    return _IterableData(job) if is_stream(job.data) else _MapStyleData(job)


class CachedData(ReferenceData):
    """A feed whose samples are read once, for several runs that must not differ in them."""

    def __init__(self, data: ReferenceData) -> None:
        self._data = data
        self.batch_size, self.total_steps = data.batch_size, data.total_steps
        self._cache: dict[tuple[int, bytes], Any] = {}

    def samples_in(self, step: int) -> int:
        return self._data.samples_in(step)

    def read(self, step: int, positions: np.ndarray) -> Any:
        key = step, positions.tobytes()
        if key not in self._cache:
            self._cache[key] = self._data.read(step, positions)
        return copy_tensors(self._cache[key])  # forward may change what it is given


class _MapStyleData(ReferenceData):
    """Data whose samples are read by number."""

    def __init__(self, job: Job) -> None:
        self._source = open_source(job.data, collate=job.collate, seed=job.seed)
        self._order = self._source.make_order(batch=job.batch_size, seed=job.seed, drop_last=job.drop_last)
        self.batch_size = job.batch_size
        self.total_steps = job.steps if job.steps is not None else (job.epochs or 0) * self._order.steps_per_epoch

    def samples_in(self, step: int) -> int:
        return self._order.batch_size(step)

    @single_process_world()
    def read(self, step: int, positions: np.ndarray) -> Any:
        return self.read_as_rank(step, positions)

    def read_as_rank(self, step: int, positions: np.ndarray) -> Any:
        ids = self._order.ids(step, 0, self.samples_in(step))
        return self._source.read_batch(ids[positions], self._order.epoch_of(step))

    def choose_steps(self, count: int) -> tuple[int, ...]:
        """The first `count`, and the epoch's last where it is short: uneven shares are where weights go wrong."""
        chosen = super().choose_steps(count)
        last_step = self._order.steps_per_epoch - 1
        is_short = (
            last_step < self.total_steps and last_step not in chosen and self.samples_in(last_step) < self.batch_size
        )
        return (*chosen, last_step) if is_short else chosen


class _IterableData(ReferenceData):
    """Data that can only be read from its start: what was read is kept, because several runs look at it."""

    def __init__(self, job: Job) -> None:
        self._reader = Stream(job.data, collate=job.collate, seed=job.seed).make_reader()
        self._batches: list[tuple[int, list[Any]]] = []
        self.batch_size, self.total_steps = job.batch_size, job.steps or 0
        self._min_samples = job.batch_size if job.drop_last else 1

    def samples_in(self, step: int) -> int:
        return len(self._read_until(step)[1])

    @single_process_world()
    def read(self, step: int, positions: np.ndarray) -> Any:
        first, samples = self._read_until(step)
        return self._reader.collate_batch([samples[i] for i in positions], first + int(positions[0]), pin=False)

    @single_process_world()
    def _read_until(self, step: int) -> tuple[int, list[Any]]:
        while len(self._batches) <= step:
            if not self._batches or len(self._batches[-1][1]) < self.batch_size:
                self._reader.start_next_epoch()
            first, samples = self._reader.samples_read, self._reader.read(self.batch_size)
            if (
                len(samples) < self._min_samples
            ):  # the epoch before ended with a whole batch, or what is left of it is left out
                self._reader.start_next_epoch()
                first, samples = 0, self._reader.read(self.batch_size)
            self._batches.append((first, samples))
        return self._batches[step]
