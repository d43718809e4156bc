"""The batches of each step as one data rank needs them: its share of the global batch, cut into micro-batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from echelon.data.order import Order
from echelon.data.source import Source
from echelon.data.workers import Request, from_workers
from echelon.errors import DataError
from echelon.plan.batch_split import split

#: Bytes that are gathered at once: a call costs as much as copying a few of the smallest shares, and its memory is asked for once.
_TOGETHER = 2**21
#: Shares that are gathered ahead while the device computes: one ready, one being made.
_READY = 2


@dataclass(frozen=True, slots=True)
class Micro:
    """One micro-batch: the collated `batch` and how many `samples` of it count (0: a filler that only keeps step)."""

    batch: Any
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What one rank computes in one step. `samples` is the global batch's size, `waited` the seconds that getting it took."""

    step: int
    epoch: int
    samples: int
    micros: tuple[Micro, ...]
    waited: float


class _Share(NamedTuple):
    """Positions `start` to `stop` of the global batch, in micro-batches of `sizes`."""

    start: int
    stop: int
    sizes: list[int]


class Loader:
    """Reads, for data rank `rank` of `ranks`, its part of each global batch of `order` in micro-batches of `micro` samples.

    `workers`: processes that read ahead; for data sets whose samples are made in Python. `pin`: into page-locked memory.
    """

    def __init__(
        self, source: Source, order: Order, *, rank: int, ranks: int, micro: int | None,
        pin: bool = False, workers: int = 0, shares: Sequence[int] = (),
    ) -> None:  # fmt: skip
        if order.samples != len(source):
            raise DataError(f"the order is over {order.samples} samples but the data set has {len(source)}")
        if order.samples < ranks:
            raise DataError(
                f"{order.samples} sample{'s' * (order.samples > 1)} cannot feed {ranks} data ranks: each needs at least one; "
                f"use dp={order.samples} or less, or more data"
            )
        if order.batch < ranks:
            raise DataError(
                f"a batch of {order.batch} cannot feed {ranks} data ranks: use batch={ranks} or more, or fewer ranks"
            )
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks} data ranks")
        self.source, self.order = source, order
        self._rank, self._ranks, self._micro = rank, ranks, micro
        self._pin, self._workers, self._parts = pin, workers, shares
        self._shares: dict[int, _Share] = {}  # by the batch's size, of which there are two at most

    def steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        """The batches of steps `start` to `stop` (exclusive); a run that begins at `start` sees what an unbroken one would."""
        self._check_short_batch(start, stop)
        return self._steps(start, stop)

    def _check_short_batch(self, start: int, stop: int) -> None:
        """Refuse now, not at the end of the first epoch, a last batch that is too short for the ranks."""
        order, per_epoch = self.order, self.order.steps_per_epoch
        short = order.size(per_epoch - 1)
        first = start + (per_epoch - 1 - start) % per_epoch  # the first step from `start` on that ends an epoch
        if short >= self._ranks or first >= stop:
            return
        raise DataError(
            f"step {first} is the last of epoch {order.epoch_of(first)} and has {short} of {order.samples} samples left for "
            f"{self._ranks} data ranks: each needs at least one; leave them out (drop_last=True), use dp={short} or less, "
            f"or a batch that does not leave so few (batch={_fitting_batch(order, self._ranks)})"
        )

    def _steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        order = self.order
        requests = map(self._request, range(start, stop))
        with closing(_fetch(self.source, requests, pin=self._pin, workers=self._workers)) as fetched:
            for step in range(start, stop):
                begin = time.perf_counter()
                batches = next(fetched)
                size = order.size(step)
                micros = tuple(map(Micro, batches, self._share(size).sizes))
                waited = time.perf_counter() - begin
                yield StepBatch(step=step, epoch=order.epoch_of(step), samples=size, micros=micros, waited=waited)

    def _request(self, step: int) -> Request:
        order = self.order
        share = self._share(order.size(step))
        return Request(order.ids(step, share.start, share.stop), share.sizes, order.epoch_of(step))

    def _share(self, size: int) -> _Share:
        share = self._shares.get(size)
        if share is None:
            parts = split(size, self._ranks, self._micro, self._parts)[self._rank]
            share = _Share(parts[0].start, parts[-1].stop, [part.size for part in parts])
            self._shares[size] = share
        return share


def evaluation_batches(
    source: Source, *, rank: int, ranks: int, size: int, pin: bool = False, workers: int = 0
) -> Iterator[Micro]:
    """Every sample of `source` exactly once over all ranks: rank after rank a consecutive share, `size` samples at a time.

    All ranks give the same number of micro-batches, because the forward of a sharded model needs every rank: one that has
    run out gives a single sample that counts as none (`samples=0`).
    """
    if size < 1:
        raise ValueError(f"size={size}: an evaluation batch has at least one sample")
    # Cut as packed files are: ranks whose number divides them read their own.
    first, last = (part * len(source) // ranks for part in (rank, rank + 1))
    turns = -(-len(source) // ranks) // size + bool(-(-len(source) // ranks) % size)
    parts = [(min(first + turn * size, last), min(first + (turn + 1) * size, last)) for turn in range(turns)]
    filler = max(last - 1, 0)  # one of its own, where it has any
    requests = (_evaluation_request(start, stop, filler) for start, stop in parts)
    with closing(_fetch(source, requests, pin=pin, workers=workers)) as fetched:
        for (start, stop), batches in zip(parts, fetched, strict=True):
            yield Micro(batches[0], stop - start)


def _evaluation_request(start: int, stop: int, filler: int) -> Request:
    ids = np.arange(start, stop, dtype=np.int64) if stop > start else np.array([filler], np.int64)
    return Request(ids, [len(ids)], 0)


def _fetch(source: Source, requests: Iterator[Request], *, pin: bool, workers: int) -> Generator[list[Any]]:
    if source.ahead:
        requests = _told_of(source, requests)
    if source.gathers:
        # A gather is one memory copy: a worker process would only add two more.
        return _from_thread(source, requests) if pin else _inline(source, requests, pin)
    return from_workers(source, requests, pin=pin, workers=workers) if workers else _inline(source, requests, pin)


def _inline(source: Source, requests: Iterator[Request], pin: bool) -> Generator[list[Any]]:
    for group in _groups(requests, _TOGETHER / source.sample_bytes):
        if len(group) == 1:
            yield source.parts(group[0].ids, group[0].sizes, group[0].epoch, pin=pin)
            continue
        sizes = [size for request in group for size in request.sizes]
        parts = iter(source.parts(np.concatenate([request.ids for request in group]), sizes, group[0].epoch, pin=pin))
        for request in group:
            yield list(islice(parts, len(request.sizes)))


def _told_of(source: Source, requests: Iterator[Request]) -> Iterator[Request]:
    """The same requests, each told to the source some steps before it is read."""
    waiting: deque[Request] = deque()
    for request in requests:
        source.expect(request.ids)
        waiting.append(request)
        if len(waiting) > source.ahead:
            yield waiting.popleft()
    yield from waiting


def _groups(requests: Iterator[Request], most: float) -> Iterator[list[Request]]:
    """Requests that are read together: as many as have no more than `most` samples, one at least."""
    group: list[Request] = []
    count = 0
    for request in requests:
        if group and count + len(request.ids) > most:
            yield group
            group, count = [], 0
        group.append(request)
        count += len(request.ids)
    if group:
        yield group


def _from_thread(source: Source, requests: Iterator[Request]) -> Generator[list[Any]]:
    """Gathered ahead by a thread, for a device that computes meanwhile (on a CPU it would take a core from the computation).

    Only for sources that draw no random numbers: another thread's draws would land in the training's.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="echelon-data") as thread:
        waiting: deque[Any] = deque()
        for request in requests:
            waiting.append(thread.submit(source.parts, request.ids, request.sizes, request.epoch, pin=True))
            if len(waiting) > _READY:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _fitting_batch(order: Order, ranks: int) -> int:
    """The batch next to the wanted one whose last step feeds all ranks."""
    for distance in count():
        for batch in (order.batch - distance, order.batch + distance):
            if ranks <= batch <= order.samples and not 0 < order.samples % batch < ranks:
                return batch
    raise AssertionError("one batch of all samples always fits")
