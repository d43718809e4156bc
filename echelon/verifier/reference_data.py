"""The job's global batches for one device, and which of them a proof looks at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from echelon.data.source import is_stream, open_source
from echelon.data.stream import Stream
from echelon.job import Job
from echelon.tree import copy_tensors
from echelon.trials.trial_context import one_process


class Feed(ABC):
    """Any samples of any step's global batch, together. `total`: steps of the whole training, which schedules are told."""

    batch: int
    total: int

    @abstractmethod
    def size(self, step: int) -> int:
        """Samples of that step's global batch."""

    @abstractmethod
    def take(self, step: int, positions: np.ndarray) -> Any:
        """The samples at these positions of the step's global batch, collated together."""

    def take_as_rank(self, step: int, positions: np.ndarray) -> Any:
        """The same as this rank reads them, which sees that it is one of several. None: they cannot be read again so."""
        return None

    def steps(self, count: int) -> tuple[int, ...]:
        """Which steps a proof of `count` steps runs."""
        return tuple(range(min(count, self.total)))


def open_feed(job: Job) -> Feed:
    """The feed of a job's data."""
    return _Streamed(job) if is_stream(job.data) else _Numbered(job)


class ReadOnce(Feed):
    """A feed whose samples are read once, for several runs that must not differ in them."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.batch, self.total = feed.batch, feed.total
        self._read: dict[tuple[int, bytes], Any] = {}

    def size(self, step: int) -> int:
        return self._feed.size(step)

    def take(self, step: int, positions: np.ndarray) -> Any:
        place = step, positions.tobytes()
        if place not in self._read:
            self._read[place] = self._feed.take(step, positions)
        return copy_tensors(self._read[place])  # forward may change what it is given


class _Numbered(Feed):
    """Data whose samples are read by number."""

    def __init__(self, job: Job) -> None:
        self._source = open_source(job.data, collate=job.collate, seed=job.seed)
        self._order = self._source.order(batch=job.batch, seed=job.seed, drop_last=job.drop_last)
        self.batch = job.batch
        self.total = job.steps if job.steps is not None else (job.epochs or 0) * self._order.steps_per_epoch

    def size(self, step: int) -> int:
        return self._order.size(step)

    @one_process()
    def take(self, step: int, positions: np.ndarray) -> Any:
        return self.take_as_rank(step, positions)

    def take_as_rank(self, step: int, positions: np.ndarray) -> Any:
        ids = self._order.ids(step, 0, self.size(step))
        return self._source.take(ids[positions], self._order.epoch_of(step))

    def steps(self, count: int) -> tuple[int, ...]:
        """The first `count`, and the epoch's last where it is short: uneven shares are where weights go wrong."""
        chosen = super().steps(count)
        last = self._order.steps_per_epoch - 1
        short = last < self.total and last not in chosen and self.size(last) < self.batch
        return (*chosen, last) if short else chosen


class _Streamed(Feed):
    """Data that can only be read from its start: what was read is kept, because several runs look at it."""

    def __init__(self, job: Job) -> None:
        self._reader = Stream(job.data, collate=job.collate, seed=job.seed).reader()
        self._read: list[tuple[int, list[Any]]] = []
        self.batch, self.total = job.batch, job.steps or 0
        self._least = job.batch if job.drop_last else 1

    def size(self, step: int) -> int:
        return len(self._samples(step)[1])

    @one_process()
    def take(self, step: int, positions: np.ndarray) -> Any:
        first, samples = self._samples(step)
        return self._reader.batch([samples[i] for i in positions], first + int(positions[0]), pin=False)

    @one_process()
    def _samples(self, step: int) -> tuple[int, list[Any]]:
        while len(self._read) <= step:
            if not self._read or len(self._read[-1][1]) < self.batch:
                self._reader.next_epoch()
            first, samples = self._reader.count, self._reader.read(self.batch)
            if (
                len(samples) < self._least
            ):  # the epoch before ended with a whole batch, or what is left of it is left out
                self._reader.next_epoch()
                first, samples = 0, self._reader.read(self.batch)
            self._read.append((first, samples))
        return self._read[step]
