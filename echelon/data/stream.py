"""Data that can only be read from its start (IterableDataset): every rank reads the whole stream and keeps its own part.

This works for any number of ranks, and for streams of unknown length. The ranks exchange how much they have read before they compute
with it: if one stream ends before the others, all ranks stop with a message instead of deadlocking. Ranks that compute the same samples
together (tp, pp) also compare the first batch: a stream that splits its samples by rank hands each of them a different one of equal size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from echelon.data import rng
from echelon.data.collate import collate as collate_as_torch
from echelon.data.collate import pin_batch
from echelon.data.error_text import collation_error, type_name
from echelon.data.loader import MicroBatch, StepBatch, small_batch_error
from echelon.data.open_data import is_stream
from echelon.data.sample_digest import digest
from echelon.data.source import Collate
from echelon.data.workers import prefetch_in_process
from echelon.errors import DataError
from echelon.job import with_torch_format
from echelon.plan.batch_split import SampleRange, split_batch, split_evenly

#: Gathers one small value from each rank, in rank order, to every rank.
AllGather = Callable[[Any], list[Any]]

_READ_FAILED = -1  # instead of a position: this rank could not read or collate
_EPOCH_SHIFT = 40  # a position is one number: the epoch above this many bits of samples

_T = TypeVar("_T")
#: The global batch's size, this rank's micro-batches and their sizes; or the error to raise once the ranks agree.
_Item = tuple[int, list[Any], list[int]] | DataError


class Stream:
    """An IterableDataset and how its samples are collated."""

    def __init__(self, data: Any, *, collate: Collate | None = None, seed: int = 0) -> None:
        if not is_stream(data):
            raise DataError(f"{type_name(data)} is not a stream (torch IterableDataset): read it with open_source")
        self._data, self._seed = with_torch_format(data) if collate is None else data, seed
        self._collate = collate or collate_as_torch

    def make_reader(self) -> StreamReader:
        return StreamReader(self._data, self._collate, self._seed)


class StreamReader:
    """Reads a stream piece by piece, epoch after epoch, with its own random generators (the same on every rank)."""

    def __init__(self, data: Any, collate: Collate, seed: int) -> None:
        self.name = type_name(data)
        self._data, self._collate, self._seed = data, collate, seed
        # Two sets: what the stream draws must not depend on how this rank cuts and collates its batches.
        self._read_rng, self._collate_rng = rng.IsolatedRng(), rng.IsolatedRng()
        self._samples: Iterator[Any] = iter(())
        self.epoch = -1
        #: Samples read in this epoch.
        self.samples_read = 0

    def start_next_epoch(self) -> None:
        """Start the next epoch, or the first one."""
        self.epoch, self.samples_read = self.epoch + 1, 0
        with self._read_rng:
            rng.seed_generators(self._derive_seed(0))
            try:
                if hasattr(self._data, "set_epoch"):  # HF streams shuffle by it
                    self._data.set_epoch(self.epoch)
                self._samples = iter(self._data)
                self._read_rng.save_state()
            except Exception as error:
                problem = f"epoch {self.epoch} could not start: {type(error).__name__}: {error}"
                raise DataError(f"{self.name}: {problem}; repair its `__iter__`") from error

    def read(self, count: int) -> list[Any]:
        """Read the next `count` samples; fewer only at the end of the epoch."""
        samples: list[Any] = []
        with self._read_rng:
            try:
                samples.extend(islice(self._samples, count))
                self._read_rng.save_state()
            except Exception as error:
                # `extend` adds one by one: the samples before the failing one are in the list.
                position = f"sample {self.samples_read + len(samples)} of epoch {self.epoch}"
                problem = f"{position} could not be read: {type(error).__name__}: {error}"
                raise DataError(f"{self.name}: {problem}; repair the stream or let it skip such a sample") from error
        self.samples_read += len(samples)
        return samples

    def collate_batch(self, samples: list[Any], first_index: int, *, pin: bool) -> Any:
        """Collate samples; `first_index`: the number of the first one in the epoch."""
        with self._collate_rng:
            rng.seed_generators(self._derive_seed(1 + first_index))
            try:
                batch = self._collate(samples)
            except Exception as error:
                indices = list(range(first_index, first_index + len(samples)))
                raise collation_error(samples, indices, error, self._collate is not collate_as_torch) from error
        return pin_batch(batch) if pin else batch

    def _derive_seed(self, stream_position: int) -> int:
        return rng.derive_seeds(self._seed, self.epoch, np.array([stream_position]))[0]


class StreamLoader:
    """Like Loader, for a stream. `all_gather` is collective: all ranks step together."""

    def __init__(
        self, stream: Stream, *, batch: int, dp_rank: int, dp_size: int, micro_batch_size: int | None, all_gather: AllGather,
        drop_last: bool = False, pin: bool = False, workers: int = 0, model_parallel_size: int = 1, shares: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`model_parallel_size`: tp x pp, the ranks of one data rank; `all_gather` is over all ranks. `workers`: if any, one reads
        ahead, because a stream has one order."""
        if batch < dp_size:
            raise small_batch_error(batch, dp_size)
        self._stream, self._batch, self._micro_batch_size = stream, batch, micro_batch_size
        self._dp_rank, self._dp_size, self._shares = dp_rank, dp_size, shares
        self._all_gather, self._drop_last, self._model_parallel_size = all_gather, drop_last, model_parallel_size
        self._pin, self._workers = pin, workers

    def steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        """The batches of steps `start` to `stop` (exclusive); what is before them is read and skipped."""
        reader = self._stream.make_reader()
        local_batches = self._local_batches(reader, start)
        if self._workers:
            local_batches = _read_ahead(local_batches, reader, self._pin)
        for step in range(start, stop):
            start_time = time.perf_counter()
            item = _next_in_lockstep(local_batches, reader, self._all_gather, f"step {step}")
            if isinstance(item, DataError):
                raise item
            size, batches, sizes = item
            micro_batches = tuple(map(MicroBatch, batches, sizes))
            if step == start and self._model_parallel_size > 1:
                _require_same_batch(reader.name, self._dp_rank, micro_batches, self._all_gather)
            epoch, wait = reader.epoch, time.perf_counter() - start_time
            yield StepBatch(step=step, epoch=epoch, samples=size, micro_batches=micro_batches, wait_seconds=wait)

    def _local_batches(self, reader: StreamReader, start: int) -> Iterator[_Item]:
        """Yield the item of each step from `start` on. Not collective: of errors, a disagreement of the ranks is reported first."""
        step = 0
        reader.start_next_epoch()
        while True:
            first_index = reader.samples_read
            samples = reader.read(self._batch)
            size = len(samples)
            if not first_index and (not size or (size < self._batch and self._drop_last)):
                problem = f"ends after {size} sample{'s' * (size != 1)}, before the first batch of {self._batch}"
                remedy = "give a stream with more samples, which starts again each time it is iterated"
                yield DataError(f"{reader.name}: epoch {reader.epoch} {problem}; {remedy}")
            if size == self._batch or (size and not self._drop_last):
                if step >= start:
                    yield self._make_local_batch(reader, samples, first_index, step)
                step += 1
            if size < self._batch:
                reader.start_next_epoch()

    def _make_local_batch(self, reader: StreamReader, samples: list[Any], first: int, step: int) -> _Item:
        size = len(samples)
        if size < self._dp_size:
            problem = f"ends at step {step} with {size} sample{'s' * (size != 1)} for {self._dp_size} data ranks"
            remedy = "use fewer ranks, another batch, or let the stream leave these out"
            return DataError(f"{reader.name}: epoch {reader.epoch} {problem}: each needs at least one; {remedy}")
        spans = split_batch(size, self._dp_size, self._micro_batch_size, self._shares)[self._dp_rank]
        pin = self._pin and not self._workers  # with a worker, the training process pins
        parts = [(samples[span.start : span.stop], first + span.start) for span in spans]
        return size, [reader.collate_batch(*part, pin=pin) for part in parts], [span.size for span in spans]


def _read_ahead(local_batches: Iterator[_T], reader: StreamReader, pin: bool) -> Iterator[_T]:
    """Run `local_batches` in a process of its own; `reader`, which does not read here, gets the position of that process."""
    positioned_items = ((item, reader.epoch, reader.samples_read) for item in local_batches)
    for item, epoch, count in prefetch_in_process(positioned_items, pin=pin):
        reader.epoch, reader.samples_read = epoch, count
        yield item


def evaluation_stream(
    stream: Stream, *, dp_rank: int, dp_size: int, batch_size: int, all_gather: AllGather, pin: bool = False,
    model_parallel_size: int = 1,
) -> Iterator[MicroBatch]:  # fmt: skip
    """Like evaluation_batches, for a stream: each sample once over all ranks, and equally many micro-batches on each."""
    reader = stream.make_reader()
    local_batches = _local_evaluation_batches(reader, dp_rank, dp_size, batch_size, pin)
    needs_check = model_parallel_size > 1
    while micro_batch := _next_in_lockstep(local_batches, reader, all_gather, "evaluation"):
        if needs_check:
            _require_same_batch(reader.name, dp_rank, (micro_batch,), all_gather)
            needs_check = False
        yield micro_batch


def _local_evaluation_batches(
    reader: StreamReader, dp_rank: int, dp_size: int, batch_size: int, pin: bool
) -> Iterator[MicroBatch | None]:
    reader.start_next_epoch()
    while samples := reader.read(dp_size * batch_size):
        first_index = reader.samples_read - len(samples)
        span = split_evenly(0, len(samples), dp_size)[dp_rank]
        collated = span if span.size else SampleRange(0, 1)
        part = samples[collated.start : collated.stop]
        batch = reader.collate_batch(part, first_index + collated.start, pin=pin)
        yield MicroBatch(batch=batch, samples=span.size)
    if not reader.samples_read:
        raise DataError(f"{reader.name}: the stream is empty: an evaluation needs at least one sample")
    yield None


def _next_in_lockstep(items: Iterator[_T], reader: StreamReader, all_gather: AllGather, context: str) -> _T:
    """Return the next item once every rank has it and is at the same sample of the same epoch."""
    try:
        item = next(items)
    except DataError:
        all_gather(_READ_FAILED)  # the other ranks wait for this one, and stop too
        raise
    positions = all_gather(reader.epoch << _EPOCH_SHIFT | reader.samples_read)
    failed_ranks = [rank for rank, position in enumerate(positions) if position == _READ_FAILED]
    if failed_ranks:
        ranks = ", ".join(map(str, failed_ranks))
        raise DataError(f"{reader.name}: rank {ranks} could not read its part of {context}; its own message says why")
    if len(set(positions)) > 1:
        epoch = min(position >> _EPOCH_SHIFT for position in positions)
        counts = [position & ((1 << _EPOCH_SHIFT) - 1) for position in positions]
        ranks_ahead = [rank for rank, position in enumerate(positions) if position >> _EPOCH_SHIFT > epoch]
        early_ranks = ranks_ahead or [rank for rank, count in enumerate(counts) if count < max(counts)]
        pairs = zip(counts, positions, strict=True)
        progress = ", ".join(f"{count} of epoch {position >> _EPOCH_SHIFT}" for count, position in pairs)
        raise DataError(
            f"{reader.name}: the stream ended early on rank {', '.join(map(str, early_ranks))}: at {context} ranks 0 to {len(positions) - 1} "
            f"have read {progress}; give every rank the same whole stream (it must not split its samples by rank)"
        )
    return item


def _require_same_batch(name: str, dp_rank: int, micro_batches: tuple[MicroBatch, ...], all_gather: AllGather) -> None:
    digests = all_gather((dp_rank, digest([micro_batch.batch for micro_batch in micro_batches])))
    first_of_replica: dict[int, tuple[int, str]] = {}
    for rank, (replica, batch_digest) in enumerate(digests):
        other_rank, expected = first_of_replica.setdefault(replica, (rank, batch_digest))
        if batch_digest != expected:
            raise DataError(
                f"{name}: ranks {other_rank} and {rank} compute the same samples together (tp, pp), and their first batches differ; give every "
                "rank the same whole stream: it must not split its samples by rank (split_dataset_by_node, WebDataset's split_by_node), and "
                "must draw random numbers from the same seed on every rank"
            )
