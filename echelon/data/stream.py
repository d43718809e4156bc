"""Data that can only be read from its start (IterableDataset): every rank reads the whole stream and keeps its own part.

That is right at any number of ranks, also where nobody knows how long the stream is. The ranks tell each other how much they
read before they compute with it: where one stream ends before the others, all of them stop with a message instead of waiting
for each other for ever. Ranks that compute the same samples together (tp, pp) also compare what the first batch holds: a stream
that deals its samples out by rank gives each of them another, as many as the others have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from echelon.data import rng
from echelon.data.collate import collate as collate_as_torch
from echelon.data.collate import pinned
from echelon.data.error_text import collation_error, kind_of
from echelon.data.loader import Micro, StepBatch
from echelon.data.sample_digest import digest
from echelon.data.source import Collate, is_stream
from echelon.data.workers import ahead
from echelon.errors import DataError
from echelon.plan.batch_split import Span, cut, split

#: Gathers one small value from each rank, in rank order, on every rank.
Agree = Callable[[Any], list[Any]]

_FAILED = -1  # instead of a place: this rank could not read or collate
_EPOCH = 40  # a place is one number: the epoch above this many bits of samples

_T = TypeVar("_T")
_Own = tuple[int, list[Any], list[int]]


class Stream:
    """An IterableDataset and how its samples become batches; `reader` begins to read it."""

    def __init__(self, data: Any, *, collate: Collate | None = None, seed: int = 0) -> None:
        if not is_stream(data):
            raise DataError(
                f"{kind_of(data)} is not a stream (torch IterableDataset): read it by number, with open_source"
            )
        self._data, self._seed = data, seed
        self._collate = collate_as_torch if collate is None else collate

    def reader(self) -> Reader:
        """A new way through the stream, from its first sample."""
        return Reader(self._data, self._collate, self._seed)


class Reader:
    """Reads a stream in pieces, epoch after epoch, with random generators of its own (the same on every rank)."""

    def __init__(self, data: Any, collate: Collate, seed: int) -> None:
        self.name = kind_of(data)
        self._data, self._collate, self._seed = data, collate, seed
        # Two sets: what the stream draws must not depend on how this rank cuts and collates its batches.
        self._reading, self._collating = rng.Apart(), rng.Apart()
        self._samples: Iterator[Any] = iter(())
        self.epoch = -1
        #: Samples read in this epoch.
        self.count = 0

    def next_epoch(self) -> None:
        """Begin the next epoch (the first, at first) at its first sample."""
        self.epoch, self.count = self.epoch + 1, 0
        with self._reading:
            rng.seed(self._number(0))
            try:
                if hasattr(self._data, "set_epoch"):  # as HF's streams have it, for their shuffle
                    self._data.set_epoch(self.epoch)
                self._samples = iter(self._data)
                self._reading.keep()
            except Exception as error:
                raise DataError(
                    f"{self.name}: epoch {self.epoch} could not begin: {type(error).__name__}: {error}; repair its `__iter__`"
                ) from error

    def read(self, count: int) -> list[Any]:
        """The next `count` samples; fewer only at the epoch's end."""
        samples: list[Any] = []
        with self._reading:
            try:
                samples.extend(islice(self._samples, count))
                self._reading.keep()
            except Exception as error:
                # A sample that was read before the failing one is in the list already: extend adds one by one.
                raise DataError(
                    f"{self.name}: sample {self.count + len(samples)} of epoch {self.epoch} could not be read: "
                    f"{type(error).__name__}: {error}; repair the stream or let it pass over such a sample"
                ) from error
        self.count += len(samples)
        return samples

    def batch(self, samples: list[Any], first: int, *, pin: bool) -> Any:
        """Collated. `first` is the number of the first sample in the epoch."""
        with self._collating:
            rng.seed(self._number(1 + first))
            try:
                batch = self._collate(samples)
            except Exception as error:
                numbers = list(range(first, first + len(samples)))
                raise collation_error(samples, numbers, error, self._collate is not collate_as_torch) from error
        return pinned(batch) if pin else batch

    def _number(self, what: int) -> int:
        return rng.seeds(self._seed, self.epoch, np.array([what]))[0]


class StreamLoader:
    """Like Loader, for a stream: the steps of data rank `rank` of `ranks`. `agree` is collective: all ranks step together."""

    def __init__(
        self, stream: Stream, *, batch: int, rank: int, ranks: int, micro: int | None, agree: Agree,
        drop_last: bool = False, pin: bool = False, workers: int = 0, alike: int = 1, shares: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`alike`: how many ranks are data rank `rank` together, tp x pp; `agree` is over all of them. `workers`: of any number one
        reads ahead, because a stream has one order."""
        if batch < ranks:
            raise DataError(
                f"a batch of {batch} cannot feed {ranks} data ranks: use batch={ranks} or more, or fewer ranks"
            )
        self._stream, self._batch, self._micro = stream, batch, micro
        self._rank, self._ranks, self._shares = rank, ranks, shares
        self._agree, self._drop_last, self._alike = agree, drop_last, alike
        self._pin, self._workers = pin, workers

    def steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        """The batches of steps `start` to `stop` (exclusive); what lies before is read and skipped."""
        reader = self._stream.reader()
        own = _ahead(self._own(reader, start), reader, self._pin) if self._workers else self._own(reader, start)
        for step in range(start, stop):
            begin = time.perf_counter()
            item = _together(own, reader, self._agree, f"step {step}")
            if isinstance(item, DataError):
                raise item
            size, batches, counts = item
            micros = tuple(map(Micro, batches, counts))
            if step == start and self._alike > 1:
                _require_same(reader.name, self._rank, micros, self._agree)
            waited = time.perf_counter() - begin
            yield StepBatch(step=step, epoch=reader.epoch, samples=size, micros=micros, waited=waited)

    def _own(self, reader: Reader, start: int) -> Iterator[_Own | DataError]:
        """For each step from `start` on the global batch's size, this rank's micro-batches of it and their sizes. Not collective.

        A batch that feeds no training is given as the error to raise once the ranks agree: where they do not, that comes first.
        """
        step = 0
        reader.next_epoch()
        while True:
            first = reader.count
            samples = reader.read(self._batch)
            size = len(samples)
            if not first and (not size or (size < self._batch and self._drop_last)):
                yield DataError(
                    f"{reader.name}: epoch {reader.epoch} ends after {size} sample{'s' * (size != 1)}, before the first batch of {self._batch}; "
                    "give a stream that has more, from its start each time it is iterated"
                )
            if size == self._batch or (size and not self._drop_last):
                if step >= start:
                    yield self._step(reader, samples, first, step)
                step += 1
            if size < self._batch:
                reader.next_epoch()

    def _step(self, reader: Reader, samples: list[Any], first: int, step: int) -> _Own | DataError:
        size = len(samples)
        if size < self._ranks:
            return DataError(
                f"{reader.name}: epoch {reader.epoch} ends at step {step} with {size} sample{'s' * (size != 1)} for {self._ranks} data ranks: "
                "each needs at least one; use fewer ranks, another batch, or let the stream leave these out"
            )
        parts = split(size, self._ranks, self._micro, self._shares)[self._rank]
        pin = self._pin and not self._workers  # a worker leaves that to the process that has the device
        batches = [reader.batch(samples[part.start : part.stop], first + part.start, pin=pin) for part in parts]
        return size, batches, [part.size for part in parts]


def _ahead(own: Iterator[_T], reader: Reader, pin: bool) -> Iterator[_T]:
    """`own` in a process that reads ahead; `reader`, which stays behind here, is told where that one stood."""
    there = ((item, reader.epoch, reader.count) for item in own)
    for item, epoch, count in ahead(there, pin=pin):
        reader.epoch, reader.count = epoch, count
        yield item


def evaluation_stream(
    stream: Stream, *, rank: int, ranks: int, size: int, agree: Agree, pin: bool = False, alike: int = 1
) -> Iterator[Micro]:
    """Like evaluation_batches, for a stream: each sample once over all ranks, as many micro-batches on each."""
    reader = stream.reader()
    own = _evaluation(reader, rank, ranks, size, pin)
    first = True
    while True:
        micro = _together(own, reader, agree, "evaluation")
        if micro is None:
            return
        if first and alike > 1:
            _require_same(reader.name, rank, (micro,), agree)
        first = False
        yield micro


def _evaluation(reader: Reader, rank: int, ranks: int, size: int, pin: bool) -> Iterator[Micro | None]:
    reader.next_epoch()
    while samples := reader.read(ranks * size):
        first = reader.count - len(samples)
        part = cut(0, len(samples), ranks)[rank]
        filled = part if part.size else Span(0, 1)
        batch = reader.batch(samples[filled.start : filled.stop], first + filled.start, pin=pin)
        yield Micro(batch=batch, samples=part.size)
    if not reader.count:
        raise DataError(f"{reader.name}: the stream is empty: an evaluation needs at least one sample")
    yield None


def _together(own: Iterator[_T], reader: Reader, agree: Agree, where: str) -> _T:
    """The next of `own`, once every rank has it and stands at the same sample of the same epoch."""
    try:
        item = next(own)
    except DataError:
        agree(_FAILED)  # so that the others, who wait for this rank, stop too
        raise
    places = agree(reader.epoch << _EPOCH | reader.count)
    failed = [rank for rank, place in enumerate(places) if place == _FAILED]
    if failed:
        raise DataError(
            f"{reader.name}: rank {_words(failed)} could not read its part of {where}; its own message says why"
        )
    if len(set(places)) > 1:
        epoch = min(place >> _EPOCH for place in places)
        counts = [place & ((1 << _EPOCH) - 1) for place in places]
        further = [rank for rank, place in enumerate(places) if place >> _EPOCH > epoch]
        early = further or [rank for rank, count in enumerate(counts) if count < max(counts)]
        stands = ", ".join(f"{count} of epoch {place >> _EPOCH}" for place, count in zip(places, counts, strict=True))
        raise DataError(
            f"{reader.name}: the stream ended early on rank {_words(early)}: at {where} the ranks 0 to {len(places) - 1} have read "
            f"{stands}; give every rank the same whole stream (one that deals its samples out to the ranks itself must not)"
        )
    return item


def _require_same(name: str, rank: int, micros: tuple[Micro, ...], agree: Agree) -> None:
    """Refuse a batch that is not the same on every rank that is data rank `rank`."""
    told = agree((rank, digest([micro.batch for micro in micros])))
    first: dict[int, tuple[int, str]] = {}
    for place, (data, text) in enumerate(told):
        other, expected = first.setdefault(data, (place, text))
        if text != expected:
            raise DataError(
                f"{name}: ranks {other} and {place} compute the same samples together (tp, pp), and their first batches differ; give every "
                "rank the same whole stream: one that deals its samples out to the ranks itself (split_dataset_by_node, WebDataset's "
                "split_by_node) must not, and random numbers of its own need the same seed everywhere"
            )


def _words(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
