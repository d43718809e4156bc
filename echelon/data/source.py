"""Samples by number, put together into batches: the one way in which the rest reads any map-style data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from echelon.data import draws
from echelon.data.collate import collate as collate_as_torch
from echelon.data.collate import pinned
from echelon.data.describe import collation_error, kind_of
from echelon.data.gather import Gather, gather_of
from echelon.errors import DataError

Collate = Callable[[list[Any]], Any]


class Source(ABC):
    """A data set of known length. `gathers`: a batch is one copy by index that draws no random numbers and needs no worker."""

    gathers: bool

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def parts(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        """The samples `ids` as consecutive collated batches of `sizes`."""

    def take(self, ids: np.ndarray, epoch: int, *, pin: bool = False) -> Any:
        """The samples `ids` as one collated batch."""
        return self.parts(ids, (len(ids),), epoch, pin=pin)[0]

    def sample(self, number: int) -> Any:
        """One sample as the first epoch has it: by itself, not collated where that is not how it is read."""
        return self.take(np.array([number]), 0)


def is_stream(data: Any) -> bool:
    """Whether `data` can only be read from its start (stream.py), not by number."""
    return isinstance(data, IterableDataset)


def open_source(data: Any, *, collate: Collate | None = None, seed: int = 0) -> Source:
    """`data` as a Source: a map-style Dataset, a list of samples, a tensor, or whatever has `__len__` and `__getitem__`."""
    _refuse_what_is_no_data_set(data)
    try:
        samples = len(data)
    except TypeError as error:
        raise DataError(
            f"{kind_of(data)} has no length: give it `__len__` (a data set is read by number, in an order that is known "
            "beforehand), or make it a torch IterableDataset and the job's length steps="
        ) from error
    if samples < 1:
        raise DataError(f"{kind_of(data)} is empty: a training or an evaluation needs at least one sample")
    tensors = None if collate else _tensors(data)
    if tensors is not None:
        return tensors
    if not hasattr(data, "__getitem__") and not hasattr(data, "__getitems__"):
        raise DataError(f"{kind_of(data)} has no `__getitem__`: samples are read by number, as data[17]")
    return Samples(data, collate=collate, seed=seed)


def _refuse_what_is_no_data_set(data: Any) -> None:
    """Things that have a length and can be indexed, yet are not samples: each was once given as data by somebody."""
    if isinstance(data, DataLoader):
        raise DataError(
            "data is a DataLoader: give its data set, data=loader.dataset; batches and shuffling are the job's"
        )
    if isinstance(data, str | bytes | Path):
        raise DataError(f"data={data!r} is text: give a torch Dataset, or a list of samples")
    if is_stream(data):
        raise DataError(
            f"{kind_of(data)} is a stream (IterableDataset): it has no samples by number; give a map-style data set here"
        )
    if isinstance(data, Mapping):
        keys = ", ".join(repr(key) for key in list(data)[:5])
        raise DataError(
            f"data is a {type(data).__name__} with the keys {keys}: give one of its data sets, or, if these are columns, "
            "TensorDataset(*data.values())"
        )
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        raise DataError(
            f"data is a tuple of {len(data)} {kind_of(data[0])}s, which is columns, not samples: "
            "give torch.utils.data.TensorDataset(*data), or list(data) if each is one sample"
        )


def _tensors(data: Any) -> Tensors | None:
    """`data` as columns, where one gather gives what collating single samples would; None where it would not."""
    if type(data) is Subset:
        whole = _tensors(data.dataset)
        return None if whole is None else whole.only(data.indices)
    # A subclass may do anything in its __getitem__: only the class itself is known to give rows.
    columns = data.tensors if type(data) is TensorDataset else (data,)
    gathers = [gather for gather in map(gather_of, columns) if gather is not None]
    if len(gathers) < len(columns):
        return None
    return Tensors(gathers, length=len(data), single=type(data) is not TensorDataset)


class Tensors(Source):
    """Columns in memory: a share of a batch is one gather per column, its micro-batches are views of that."""

    gathers = True

    def __init__(self, columns: Sequence[Gather], *, length: int, rows: np.ndarray | None = None, single: bool) -> None:
        """`rows`: which rows are the samples (None: all). `single`: a sample is a row itself, not a tuple of one."""
        self._columns, self._length, self._rows, self._single = tuple(columns), length, rows, single

    def only(self, places: Sequence[int]) -> Tensors:
        """The samples at these places, as torch's Subset has them."""
        chosen = np.asarray(places, dtype=np.int64)
        outside = chosen[(chosen < -self._length) | (chosen >= self._length)]
        if len(outside):
            raise DataError(
                f"Subset names sample {outside[0]} of a data set of {self._length}: its indices must lie in it; "
                "make the Subset of this data set"
            )
        chosen = chosen % self._length  # -1 is the last
        rows = chosen if self._rows is None else self._rows[chosen]
        return Tensors(self._columns, length=len(rows), rows=rows, single=self._single)

    def __len__(self) -> int:
        return self._length

    def parts(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        if self._rows is not None:
            ids = self._rows[ids]
        columns = [gather(ids, pin) for gather in self._columns]
        if len(sizes) == 1:
            return columns if self._single else [columns]
        cuts = [torch.split(column, list(sizes)) for column in columns]
        return list(cuts[0]) if self._single else [list(part) for part in zip(*cuts, strict=True)]


class Samples(Source):
    """Any data set in Python, sample by sample.

    The generators that a data set draws from (augmentation) are seeded for each sample. Which ones it draws from shows in
    their state: no time goes into the others, and the batch in which it first draws is read again.
    """

    gathers = False

    def __init__(self, data: Any, *, collate: Collate | None = None, seed: int = 0) -> None:
        self._data, self._seed, self._length = data, seed, len(data)
        self._collate = collate_as_torch if collate is None else collate
        self._many = getattr(data, "__getitems__", None)
        self._generators = draws.Apart()
        self._draws: set[str] = set()
        # A list put together by torch runs nobody's code that could draw: nothing to watch.
        self._silent = type(data) in (list, tuple) and collate is None

    def __len__(self) -> int:
        return self._length

    def parts(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        batches = self._plain(ids, sizes) if self._silent else self._watched(ids, sizes, epoch)
        return [pinned(batch) for batch in batches] if pin else batches

    def sample(self, number: int) -> Any:
        with self._generators:
            draws.seed(draws.seeds(self._seed, 0, np.array([number]))[0])
            return self._read([number])[0]

    def _watched(self, ids: np.ndarray, sizes: Sequence[int], epoch: int) -> list[Any]:
        """The batches, with those generators seeded that reading them draws from."""
        with self._generators:
            while True:
                batches = self._seeded(ids, sizes, epoch) if self._draws else self._plain(ids, sizes)
                drawn = self._generators.drawn()
                if drawn <= self._draws:
                    return batches
                self._draws |= drawn

    def _plain(self, ids: np.ndarray, sizes: Sequence[int]) -> list[Any]:
        """The batches of a data set that draws nothing."""
        numbers = ids.tolist()
        samples = self._read(numbers) if self._many is None else self._read_many(numbers)
        if len(sizes) == 1:
            return [self._batch(samples, numbers)]
        batches, start = [], 0
        for size in sizes:
            batches.append(self._batch(samples[start : start + size], numbers[start : start + size]))
            start += size
        return batches

    def _seeded(self, ids: np.ndarray, sizes: Sequence[int], epoch: int) -> list[Any]:
        """The batches, with the generators seeded before each sample; a collate that draws goes on from the last one's."""
        numbers, seeds = ids.tolist(), draws.seeds(self._seed, epoch, ids)
        kinds = tuple(self._draws)
        batches, start = [], 0
        for size in sizes:
            samples = []
            for place in range(start, start + size):
                draws.seed(seeds[place], kinds)
                samples += self._read(numbers[place : place + 1])
            batches.append(self._batch(samples, numbers[start : start + size]))
            start += size
        return batches

    def _read(self, numbers: list[int]) -> list[Any]:
        """The samples, one by one."""
        samples, data, many = [], self._data, self._many
        for number in numbers:
            try:
                samples.append(data[number] if many is None else many([number])[0])
            except Exception as error:
                raise self._failure(f"sample {number}", error) from error
        return samples

    def _read_many(self, numbers: list[int]) -> list[Any]:
        assert self._many is not None
        try:
            samples = self._many(numbers)
        except Exception as error:
            self._read(numbers)  # names the one that fails, where it also fails alone
            raise self._failure(f"samples {numbers}, read together with `__getitems__`,", error) from error
        if len(samples) != len(numbers):
            raise DataError(
                f"{kind_of(self._data)}: `__getitems__` gave {len(samples)} samples for the {len(numbers)} numbers "
                f"{numbers[:8]}...: return one sample per number, in their order"
            )
        return list(samples)

    def _failure(self, what: str, error: Exception) -> DataError:
        return DataError(
            f"{kind_of(self._data)}: {what} of {self._length} could not be read: {type(error).__name__}: {error}; "
            "repair it or leave it out of the data set (torch.utils.data.Subset)"
        )

    def _batch(self, samples: list[Any], numbers: list[int]) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            raise collation_error(samples, numbers, error, self._collate is not collate_as_torch) from error
