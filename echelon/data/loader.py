"""Batches of each step for one data rank: its share of the global batch, cut into micro-batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from echelon.data.order import Order
from echelon.data.source import Source
from echelon.data.workers import BatchRequest, read_with_workers
from echelon.errors import DataError
from echelon.plan.batch_split import split_batch

#: Bytes that are gathered at once: a call costs as much as copying a few of the smallest shares.
_GATHER_BYTES = 2**21
#: Shares that are gathered ahead while the device computes: one ready, one in progress.
_PREFETCH_DEPTH = 2

_Requests = Iterator[BatchRequest]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The collated `batch` and how many of its `samples` count (0: a filler that keeps the ranks in lockstep)."""

    batch: Any
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What one rank computes in one step. `samples`: the global batch's size; `wait_seconds`: how long reading took."""

    step: int
    epoch: int
    samples: int
    micro_batches: tuple[MicroBatch, ...]
    wait_seconds: float


class _BatchSlice(NamedTuple):
    """Positions `start` to `stop` of the global batch, in micro-batches of `sizes`."""

    start: int
    stop: int
    sizes: list[int]


class Loader:
    """Reads a data rank's part of each global batch of `order` in micro-batches.

    `workers`: processes that read ahead, for data sets whose samples are made in Python. `pin`: into page-locked memory.
    """

    def __init__(
        self, source: Source, order: Order, *, dp_rank: int, dp_size: int, micro_batch_size: int | None,
        pin: bool = False, workers: int = 0, shares: Sequence[int] = (),
    ) -> None:  # fmt: skip
        if order.samples != len(source):
            raise DataError(f"the order is over {order.samples} samples but the data set has {len(source)}")
        if order.samples < dp_size:
            samples = f"{order.samples} sample{'s' * (order.samples > 1)}"
            remedy = f"use dp={order.samples} or less, or more data"
            raise DataError(f"{samples} cannot feed {dp_size} data ranks: each needs at least one; {remedy}")
        if order.batch < dp_size:
            raise small_batch_error(order.batch, dp_size)
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"rank {dp_rank} is not one of {dp_size} data ranks")
        self.source, self.order = source, order
        self._dp_rank, self._dp_size, self._micro_batch_size = dp_rank, dp_size, micro_batch_size
        self._pin, self._workers, self._shares = pin, workers, shares
        self._slices: dict[int, _BatchSlice] = {}  # by the batch's size, of which there are two at most

    def steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        """The batches of steps `start` to `stop` (exclusive), the same as in a run from step 0 on."""
        self._check_short_batch(start, stop)
        return self._read_steps(start, stop)

    def _check_short_batch(self, start: int, stop: int) -> None:
        """Refuse a last batch that is too short for the ranks now, not at the end of the first epoch."""
        order, per_epoch = self.order, self.order.steps_per_epoch
        last_size = order.batch_size(per_epoch - 1)
        last_step = start + (per_epoch - 1 - start) % per_epoch  # the first step from `start` on that ends an epoch
        if last_size >= self._dp_size or last_step >= stop:
            return
        raise DataError(
            f"step {last_step} is the last of epoch {order.epoch_of(last_step)} and has {last_size} of {order.samples} samples left for "
            f"{self._dp_size} data ranks: each needs at least one; leave them out (drop_last=True), use dp={last_size} or less, "
            f"or another batch (batch={_nearest_valid_batch(order, self._dp_size)})"
        )

    def _read_steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        order, requests = self.order, map(self._make_request, range(start, stop))
        with closing(_fetch_batches(self.source, requests, pin=self._pin, workers=self._workers)) as fetched_batches:
            for step in range(start, stop):
                start_time = time.perf_counter()
                batches = next(fetched_batches)
                size = order.batch_size(step)
                micro_batches = tuple(map(MicroBatch, batches, self._find_slice(size).sizes))
                epoch, wait = order.epoch_of(step), time.perf_counter() - start_time
                yield StepBatch(step=step, epoch=epoch, samples=size, micro_batches=micro_batches, wait_seconds=wait)

    def _make_request(self, step: int) -> BatchRequest:
        part = self._find_slice(self.order.batch_size(step))
        return BatchRequest(self.order.ids(step, part.start, part.stop), part.sizes, self.order.epoch_of(step))

    def _find_slice(self, size: int) -> _BatchSlice:
        batch_slice = self._slices.get(size)
        if batch_slice is None:
            spans = split_batch(size, self._dp_size, self._micro_batch_size, self._shares)[self._dp_rank]
            batch_slice = _BatchSlice(spans[0].start, spans[-1].stop, [span.size for span in spans])
            self._slices[size] = batch_slice
        return batch_slice


def evaluation_batches(
    source: Source, *, dp_rank: int, dp_size: int, batch_size: int, pin: bool = False, workers: int = 0
) -> Iterator[MicroBatch]:
    """Read every sample of `source` exactly once over all ranks: each rank a consecutive share, `batch_size` samples at a time.

    All ranks yield the same number of micro-batches, because the forward of a sharded model needs every rank: one that has run out yields
    a sample that does not count (`samples=0`).
    """
    if batch_size < 1:
        raise ValueError(f"size={batch_size}: an evaluation batch has at least one sample")
    # Cut as packed files are: ranks whose number divides the files read their own.
    first_id, end_id = (boundary * len(source) // dp_size for boundary in (dp_rank, dp_rank + 1))
    rounds = -(-len(source) // (dp_size * batch_size))
    bounds = [min(first_id + index * batch_size, end_id) for index in range(rounds + 1)]
    spans = list(pairwise(bounds))
    filler = np.array([max(end_id - 1, 0)])  # one of its own, if it has any
    id_parts = (np.arange(start, stop) if start < stop else filler for start, stop in spans)
    requests = (BatchRequest(ids, [len(ids)], 0) for ids in id_parts)
    with closing(_fetch_batches(source, requests, pin=pin, workers=workers)) as fetched_batches:
        for (start, stop), batches in zip(spans, fetched_batches, strict=True):
            yield MicroBatch(batches[0], stop - start)


def _fetch_batches(source: Source, requests: _Requests, *, pin: bool, workers: int) -> Generator[list[Any]]:
    if source.prefetch_steps:
        requests = _prefetch_requests(source, requests)
    if source.supports_gather:
        # A gather is one memory copy: a worker process would only add two more.
        return _fetch_in_thread(source, requests) if pin else _fetch_inline(source, requests, pin)
    if workers:
        return read_with_workers(source, requests, pin=pin, workers=workers)
    return _fetch_inline(source, requests, pin)


def _fetch_inline(source: Source, requests: _Requests, pin: bool) -> Generator[list[Any]]:
    for group in _group_requests(requests, _GATHER_BYTES / source.sample_bytes):
        if len(group) == 1:
            yield source.read_micro_batches(*group[0], pin=pin)
            continue
        ids = np.concatenate([request.ids for request in group])
        sizes = [size for request in group for size in request.sizes]
        micro_batches = iter(source.read_micro_batches(ids, sizes, group[0].epoch, pin=pin))
        for request in group:
            yield list(islice(micro_batches, len(request.sizes)))


def _prefetch_requests(source: Source, requests: _Requests) -> _Requests:
    """Announce each request to the source some steps before it is read."""
    pending_requests: deque[BatchRequest] = deque()
    for request in requests:
        source.prefetch(request.ids)
        pending_requests.append(request)
        if len(pending_requests) > source.prefetch_steps:
            yield pending_requests.popleft()
    yield from pending_requests


def _group_requests(requests: _Requests, max_samples: float) -> Iterator[list[BatchRequest]]:
    """Group requests to read together: up to `max_samples` samples, at least one request."""
    group: list[BatchRequest] = []
    sample_count = 0
    for request in requests:
        if group and sample_count + len(request.ids) > max_samples:
            yield group
            group, sample_count = [], 0
        group.append(request)
        sample_count += len(request.ids)
    if group:
        yield group


def _fetch_in_thread(source: Source, requests: _Requests) -> Generator[list[Any]]:
    """Gather ahead in a thread while a device computes (on a CPU it would take a core from the computation).

    Only for sources that draw no random numbers: another thread's draws would get into the training's.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="echelon-data") as executor:
        pending: deque[Any] = deque()
        for request in requests:
            pending.append(executor.submit(source.read_micro_batches, *request, pin=True))
            if len(pending) > _PREFETCH_DEPTH:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def small_batch_error(batch: int, dp_size: int) -> DataError:
    remedy = f"use batch={dp_size} or more, or fewer ranks"
    return DataError(f"a batch of {batch} cannot feed {dp_size} data ranks: {remedy}")


def _nearest_valid_batch(order: Order, ranks: int) -> int:
    """Find the batch nearest to the order's whose last step feeds all ranks."""
    for distance in count():
        for batch in (order.batch - distance, order.batch + distance):
            if ranks <= batch <= order.samples and not 0 < order.samples % batch < ranks:
                return batch
    raise AssertionError("one batch of all samples always fits")
