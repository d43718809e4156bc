"""Samples by number, put together into batches: the one way in which the rest reads any map-style data set."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from echelon.data import rng
from echelon.data.collate import collate as collate_as_torch
from echelon.data.collate import pinned
from echelon.data.column_gather import Gather, gather_of
from echelon.data.error_text import collation_error, kind_of
from echelon.data.order import Bucketed, Order
from echelon.errors import DataError

Collate = Callable[[list[Any]], Any]


class Source(ABC):
    """A data set of known length. `gathers`: a batch is one copy by index that draws no random numbers and needs no worker."""

    gathers: bool
    #: Equal parts that lie apart: an order over them lets ranks read from their own.
    lanes: int = 1
    #: What it holds, as one short text, where that is known without reading samples.
    identity: str | None = None
    #: Files of equal size, and how many of a lane's are shuffled at a time (None: all).
    files: int = 1
    window: int | None = None
    #: The length of each sample, where batches are to hold samples of similar length.
    lengths: np.ndarray | None = None
    #: Steps whose samples are told to `expect` before they are read, where that helps.
    ahead: int = 0
    #: Bytes of a sample, where they are so few that shares of several steps are best gathered together.
    sample_bytes: float = inf
    #: Whether reading runs code of the user's, which may keep something.
    runs_code: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def parts(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        """The samples `ids` as consecutive collated batches of `sizes`."""

    def take(self, ids: np.ndarray, epoch: int, *, pin: bool = False) -> Any:
        """The samples `ids` as one collated batch."""
        return self.parts(ids, (len(ids),), epoch, pin=pin)[0]

    def expect(self, ids: np.ndarray) -> None:
        """These samples are needed soon. Does not wait."""
        return

    def order(self, *, batch: int, seed: int, drop_last: bool = False) -> Order:
        """The order in which a training visits it."""
        how: dict[str, Any] = {"batch": batch, "seed": seed, "drop_last": drop_last}
        how |= {"samples": len(self), "lanes": self.lanes, "files": self.files, "window": self.window}
        return Order(**how) if self.lengths is None else Bucketed(lengths=self.lengths, **how)

    def sample(self, number: int) -> Any:
        """One sample as the first epoch has it: by itself, not collated where that is not how it is read."""
        return self.take(np.array([number]), 0)


def is_stream(data: Any) -> bool:
    """Whether `data` can only be read from its start (stream.py), not by number."""
    return isinstance(data, IterableDataset)


def open_source(data: Any, *, collate: Collate | None = None, seed: int = 0) -> Source:
    """`data` as a Source: a map-style Dataset, a list of samples, a tensor, a packed data set or its folder, or whatever has
    `__len__` and `__getitem__`."""
    data = opened(data)
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
    gathered = None if collate else _gathered(data)
    if gathered is not None:
        return gathered
    if not hasattr(data, "__getitem__") and not hasattr(data, "__getitems__"):
        raise DataError(f"{kind_of(data)} has no `__getitem__`: samples are read by number, as data[17]")
    packed, rows = _packed_part(data)
    if packed is None:
        source = Samples(data, collate=collate, seed=seed)
        source.identity = getattr(data, "packed_identity", None)
        return source
    source = Samples(data, collate=collate, padding=packed.packed_collate, seed=seed)
    if rows is None:
        source.lanes, source.files, source.window = packed.lanes, packed.files, packed.window
    lengths = packed.bucketed()
    source.lengths = lengths if lengths is None or rows is None else lengths[rows]
    source.identity = packed.identified(rows)
    return source


def _refuse_what_is_no_data_set(data: Any) -> None:
    """Things that have a length and can be indexed, yet are not samples: each was once given as data by somebody."""
    if isinstance(data, DataLoader):
        raise DataError(
            "data is a DataLoader: give its data set, data=loader.dataset; batches and shuffling are the job's"
        )
    if isinstance(data, str | bytes | Path):
        raise DataError(
            f"data={data!r} is text: give a torch Dataset, a list of samples, or the folder of a packed data set (`echelon pack`)"
        )
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


def opened(data: Any) -> Any:
    """A folder's name or URL as the packed data set in it; anything else as it is."""
    if isinstance(data, str) and "://" in data:
        from echelon.data.packed.reader import Packed

        return Packed(data)
    if isinstance(data, str | Path) and any(
        (Path(data) / name).is_file() for name in ("manifest.json", "packing.json")
    ):
        from echelon.data.packed.reader import Packed

        return Packed(data)
    return data


def _is_packed(data: Any) -> bool:
    """Whether it is a packed data set. Only one whose module was imported can be."""
    module = sys.modules.get("echelon.data.packed.reader")
    return module is not None and isinstance(data, module.Packed)


def _packed_part(data: Any) -> tuple[Any, np.ndarray | None]:
    """The packed data set that `data` is (None: it is none), and which of its samples, where it is torch's Subset of it (None: all)."""
    if type(data) is not Subset:
        return (data if _is_packed(data) else None), None
    whole, rows = _packed_part(data.dataset)
    if whole is None:
        return None, None
    chosen = inside(data.indices, len(whole) if rows is None else len(rows))
    return whole, chosen if rows is None else rows[chosen]


def _gathered(data: Any) -> Source | None:
    """`data` as a source that gathers, if it can be."""
    packed, rows = _packed_part(data)
    if packed is None:
        return _tensors(data)
    from echelon.data.packed.reader import Packed, PackedSource, gathers

    return PackedSource(packed, rows) if type(packed) is Packed and gathers(packed) else None


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


def inside(places: Sequence[int], length: int) -> np.ndarray:
    """The indices of a Subset, counted from the start, once they are known to lie in a data set of `length`."""
    chosen = np.asarray(places, dtype=np.int64)
    outside = chosen[(chosen < -length) | (chosen >= length)]
    if len(outside):
        raise DataError(
            f"Subset names sample {outside[0]} of a data set of {length}: its indices must lie in it; make the Subset of this data set"
        )
    return chosen % length  # -1 is the last


class Tensors(Source):
    """Columns in memory: a share of a batch is one gather per column, its micro-batches are views of that."""

    gathers = True

    def __init__(self, columns: Sequence[Gather], *, length: int, rows: np.ndarray | None = None, single: bool) -> None:
        """`rows`: which rows are the samples (None: all). `single`: a sample is a row itself, not a tuple of one."""
        self._columns, self._length, self._rows, self._single = tuple(columns), length, rows, single

    def only(self, places: Sequence[int]) -> Tensors:
        """The samples at these places, as torch's Subset has them."""
        chosen = inside(places, self._length)
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

    def __init__(
        self, data: Any, *, collate: Collate | None = None, padding: Collate | None = None, seed: int = 0
    ) -> None:
        """`collate`: the job's; without it samples are put together by `padding`, or as torch does."""
        self._data, self._seed, self._length = data, seed, len(data)
        self._collate, self._own = collate or padding or collate_as_torch, collate is not None
        self._many = getattr(data, "__getitems__", None)
        self._generators = rng.Apart()
        self._draws: set[str] = set()
        # A list put together by torch runs nobody's code that could draw: nothing to watch.
        self.runs_code = type(data) not in (list, tuple) or collate is not None

    def __len__(self) -> int:
        return self._length

    def parts(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        batches = self._watched(ids, sizes, epoch) if self.runs_code else self._plain(ids, sizes)
        return [pinned(batch) for batch in batches] if pin else batches

    def sample(self, number: int) -> Any:
        with self._generators:
            rng.seed(rng.seeds(self._seed, 0, np.array([number]))[0])
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
        numbers, seeds = ids.tolist(), rng.seeds(self._seed, epoch, ids)
        kinds = tuple(self._draws)
        batches, start = [], 0
        for size in sizes:
            samples = []
            for place in range(start, start + size):
                rng.seed(seeds[place], kinds)
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
            raise collation_error(samples, numbers, error, self._own) from error
