"""Reads ahead with torch's DataLoader workers, micro-batch by micro-batch, with the same result for any number of workers."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from echelon.data.source import Source
from echelon.errors import DataError


class BatchRequest(NamedTuple):
    """The samples of a rank's share of a step, and the micro-batches to cut them into."""

    ids: np.ndarray
    sizes: list[int]
    epoch: int


@dataclass(frozen=True, slots=True)
class _WorkerError:
    """A worker's DataError, sent as a value: torch would wrap the message in a traceback."""

    message: str


class _RequestDataset(Dataset[Any]):
    """A source whose "samples" are whole micro-batches."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, request: tuple[np.ndarray, int]) -> Any:
        try:
            return self._source.read_batch(*request)
        except DataError as error:
            return _WorkerError(str(error))


def _no_collate(batch: Any) -> Any:
    return batch


def read_with_workers(
    source: Source, requests: Iterator[BatchRequest], *, pin: bool, workers: int
) -> Generator[list[Any]]:
    """Yield the micro-batches of each request, which `workers` processes read ahead."""
    counts: list[int] = []  # micro-batches per request; the sampler runs ahead of what is yielded

    def iterate_micro_batches() -> Iterator[tuple[np.ndarray, int]]:
        for request in requests:
            counts.append(len(request.sizes))
            for ids in np.split(request.ids, np.cumsum(request.sizes)[:-1]):
                yield ids, request.epoch

    sampler = _IteratorSampler(iterate_micro_batches())
    loader = _make_loader(_RequestDataset(source), sampler=sampler, num_workers=workers, pin_memory=pin)
    with closing(_iterate_loader(loader)) as batches:
        for first_batch in batches:
            yield [first_batch, *islice(batches, counts.pop(0) - 1)]


def prefetch_in_process(items: Iterator[Any], *, pin: bool) -> Generator[Any]:
    """Yield the same items, which one process reads ahead. A DataError that ends them is raised here.

    The process is forked, whatever the start method of others: an iterator that has begun cannot be sent to a spawned process.
    """
    dataset = _IteratorDataset(items)
    return _iterate_loader(_make_loader(dataset, num_workers=1, multiprocessing_context="fork", pin_memory=pin))


def _make_loader(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    # Without a generator of its own it draws the workers' seeds from the training's.
    return DataLoader(dataset, batch_size=None, collate_fn=_no_collate, generator=torch.Generator(), **options)


def _iterate_loader(loader: DataLoader[Any]) -> Generator[Any]:
    """Yield what the workers make, in order. Their errors are raised here."""
    iterator = _start_workers(loader)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            # OSError and EOFError: from receiving the last message of a dead worker.
            cause = f"{type(error).__name__}: {error}"
        else:
            if isinstance(item, _WorkerError):
                raise DataError(item.message)
            yield item
            continue
        # Drop the workers first: while torch knows of the dead one, it raises again at any child's signal.
        del iterator
        raise DataError(f"a data worker process died: {cause}; workers=0 reads in the training process and shows why")


def _start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start workers that never collect garbage in what they inherit.

    A worker could collect GPU objects of an earlier run, which a forked process cannot release, and crash.
    """
    froze_here = not gc.get_freeze_count()
    gc.freeze()
    try:
        return iter(loader)
    finally:
        if froze_here:
            gc.unfreeze()


class _IteratorDataset(IterableDataset[Any]):
    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._items
        except DataError as error:
            yield _WorkerError(str(error))


class _IteratorSampler:
    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items
