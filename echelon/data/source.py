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
from echelon.data.collate import pin_batch
from echelon.data.column_gather import ColumnGather, make_column_gather
from echelon.data.error_text import collation_error, type_name
from echelon.data.order import BucketedOrder, Order
from echelon.errors import DataError

Collate = Callable[[list[Any]], Any]


class Source(ABC):
    """A data set of known length. `supports_gather`: a batch is one copy by index that draws no random numbers and needs no worker."""

    supports_gather: bool
    #: Equal parts that lie apart: an order over them lets ranks read from their own.
    lanes: int = 1
    #: What it holds, as one short text, where that is known without reading samples.
    identity: str | None = None
    #: Files of equal size, and how many of a lane's are shuffled at a time (None: all).
    files: int = 1
    window: int | None = None
    #: The length of each sample, where batches are to hold samples of similar length.
    lengths: np.ndarray | None = None
    #: Steps whose samples are told to `prefetch` before they are read, where that helps.
    prefetch_steps: int = 0
    #: Bytes of a sample, where they are so few that shares of several steps are best gathered together.
    sample_bytes: float = inf
    #: Whether reading runs code of the user's, which may keep something.
    runs_user_code: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read_micro_batches(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        """The samples `ids` as consecutive collated batches of `sizes`."""

    def read_batch(self, ids: np.ndarray, epoch: int, *, pin: bool = False) -> Any:
        """The samples `ids` as one collated batch."""
        return self.read_micro_batches(ids, (len(ids),), epoch, pin=pin)[0]

    def prefetch(self, ids: np.ndarray) -> None:
        """These samples are needed soon. Does not wait."""
        return

    def make_order(self, *, batch: int, seed: int, drop_last: bool = False) -> Order:
        """The order in which a training visits it."""
        options: dict[str, Any] = {"batch": batch, "seed": seed, "drop_last": drop_last}
        options |= {"samples": len(self), "lanes": self.lanes, "files": self.files, "window": self.window}
        return Order(**options) if self.lengths is None else BucketedOrder(lengths=self.lengths, **options)

    def read_sample(self, index: int) -> Any:
        """One sample as the first epoch has it: by itself, not collated where that is not how it is read."""
        return self.read_batch(np.array([index]), 0)


def is_stream(data: Any) -> bool:
    """Whether `data` can only be read from its start (stream.py), not by number."""
    return isinstance(data, IterableDataset)


def open_source(data: Any, *, collate: Collate | None = None, seed: int = 0) -> Source:
    """`data` as a Source: a map-style Dataset, a list of samples, a tensor, a packed data set or its folder, or whatever has
    `__len__` and `__getitem__`."""
    data = open_if_packed(data)
    _require_dataset(data)
    try:
        samples = len(data)
    except TypeError as error:
        raise DataError(
            f"{type_name(data)} has no length: give it `__len__` (a data set is read by number, in an order that is known "
            "beforehand), or make it a torch IterableDataset and the job's length steps="
        ) from error
    if samples < 1:
        raise DataError(f"{type_name(data)} is empty: a training or an evaluation needs at least one sample")
    gather_source = None if collate else _open_gather_source(data)
    if gather_source is not None:
        return gather_source
    if not hasattr(data, "__getitem__") and not hasattr(data, "__getitems__"):
        raise DataError(f"{type_name(data)} has no `__getitem__`: samples are read by number, as data[17]")
    packed, rows = _unwrap_packed(data)
    if packed is None:
        source = SampleSource(data, collate=collate, seed=seed)
        source.identity = getattr(data, "packed_identity", None)
        return source
    source = SampleSource(data, collate=collate, padding_collate=packed.packed_collate, seed=seed)
    if rows is None:
        source.lanes, source.files, source.window = packed.lanes, packed.files, packed.window
    lengths = packed.bucket_lengths()
    source.lengths = lengths if lengths is None or rows is None else lengths[rows]
    source.identity = packed.subset_identity(rows)
    return source


def _require_dataset(data: Any) -> None:
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
            f"{type_name(data)} is a stream (IterableDataset): it has no samples by number; give a map-style data set here"
        )
    if isinstance(data, Mapping):
        keys = ", ".join(repr(key) for key in list(data)[:5])
        raise DataError(
            f"data is a {type(data).__name__} with the keys {keys}: give one of its data sets, or, if these are columns, "
            "TensorDataset(*data.values())"
        )
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        raise DataError(
            f"data is a tuple of {len(data)} {type_name(data[0])}s, which is columns, not samples: "
            "give torch.utils.data.TensorDataset(*data), or list(data) if each is one sample"
        )


def open_if_packed(data: Any) -> Any:
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


def _unwrap_packed(data: Any) -> tuple[Any, np.ndarray | None]:
    """The packed data set that `data` is (None: it is none), and which of its samples, where it is torch's Subset of it (None: all)."""
    if type(data) is not Subset:
        return (data if _is_packed(data) else None), None
    packed, rows = _unwrap_packed(data.dataset)
    if packed is None:
        return None, None
    selected = normalize_indices(data.indices, len(packed) if rows is None else len(rows))
    return packed, selected if rows is None else rows[selected]


def _open_gather_source(data: Any) -> Source | None:
    """`data` as a source that gathers, if it can be."""
    packed, rows = _unwrap_packed(data)
    if packed is None:
        return _open_tensors(data)
    from echelon.data.packed.reader import Packed, PackedSource, can_gather

    return PackedSource(packed, rows) if type(packed) is Packed and can_gather(packed) else None


def _open_tensors(data: Any) -> TensorSource | None:
    """`data` as columns, where one gather gives what collating single samples would; None where it would not."""
    if type(data) is Subset:
        source = _open_tensors(data.dataset)
        return None if source is None else source.select(data.indices)
    # A subclass may do anything in its __getitem__: only the class itself is known to give rows.
    columns = data.tensors if type(data) is TensorDataset else (data,)
    column_gathers = [gather for gather in map(make_column_gather, columns) if gather is not None]
    if len(column_gathers) < len(columns):
        return None
    return TensorSource(column_gathers, length=len(data), single_column=type(data) is not TensorDataset)


def normalize_indices(indices: Sequence[int], length: int) -> np.ndarray:
    """The indices of a Subset, counted from the start, once they are known to lie in a data set of `length`."""
    selected = np.asarray(indices, dtype=np.int64)
    invalid = selected[(selected < -length) | (selected >= length)]
    if len(invalid):
        raise DataError(
            f"Subset names sample {invalid[0]} of a data set of {length}: its indices must lie in it; make the Subset of this data set"
        )
    return selected % length  # -1 is the last


class TensorSource(Source):
    """Columns in memory: a share of a batch is one gather per column, its micro-batches are views of that."""

    supports_gather = True

    def __init__(
        self, columns: Sequence[ColumnGather], *, length: int, rows: np.ndarray | None = None, single_column: bool
    ) -> None:
        """`rows`: which rows are the samples (None: all). `single_column`: a sample is a row itself, not a tuple of one."""
        self._columns, self._length, self._rows, self._single_column = tuple(columns), length, rows, single_column

    def select(self, indices: Sequence[int]) -> TensorSource:
        """The samples at these places, as torch's Subset has them."""
        selected = normalize_indices(indices, self._length)
        rows = selected if self._rows is None else self._rows[selected]
        return TensorSource(self._columns, length=len(rows), rows=rows, single_column=self._single_column)

    def __len__(self) -> int:
        return self._length

    def read_micro_batches(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        if self._rows is not None:
            ids = self._rows[ids]
        columns = [gather(ids, pin) for gather in self._columns]
        if len(sizes) == 1:
            return columns if self._single_column else [columns]
        split_columns = [torch.split(column, list(sizes)) for column in columns]
        return (
            list(split_columns[0]) if self._single_column else [list(part) for part in zip(*split_columns, strict=True)]
        )


class SampleSource(Source):
    """Any data set in Python, sample by sample.

    The generators that a data set draws from (augmentation) are seeded for each sample. Which ones it draws from shows in
    their state: no time goes into the others, and the batch in which it first draws is read again.
    """

    supports_gather = False

    def __init__(
        self, data: Any, *, collate: Collate | None = None, padding_collate: Collate | None = None, seed: int = 0
    ) -> None:
        """`collate`: the job's; without it samples are put together by `padding_collate`, or as torch does."""
        self._data, self._seed, self._length = data, seed, len(data)
        self._collate, self._has_custom_collate = collate or padding_collate or collate_as_torch, collate is not None
        self._getitems = getattr(data, "__getitems__", None)
        self._rng = rng.IsolatedRng()
        self._used_kinds: set[str] = set()
        # A list put together by torch runs nobody's code that could draw: nothing to watch.
        self.runs_user_code = type(data) not in (list, tuple) or collate is not None

    def __len__(self) -> int:
        return self._length

    def read_micro_batches(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        batches = self._read_tracking_rng(ids, sizes, epoch) if self.runs_user_code else self._read_unseeded(ids, sizes)
        return [pin_batch(batch) for batch in batches] if pin else batches

    def read_sample(self, index: int) -> Any:
        with self._rng:
            rng.seed_generators(rng.derive_seeds(self._seed, 0, np.array([index]))[0])
            return self._read_samples([index])[0]

    def _read_tracking_rng(self, ids: np.ndarray, sizes: Sequence[int], epoch: int) -> list[Any]:
        """The batches, with those generators seeded that reading them draws from."""
        with self._rng:
            while True:
                batches = self._read_seeded(ids, sizes, epoch) if self._used_kinds else self._read_unseeded(ids, sizes)
                used_kinds = self._rng.find_used_kinds()
                if used_kinds <= self._used_kinds:
                    return batches
                self._used_kinds |= used_kinds

    def _read_unseeded(self, ids: np.ndarray, sizes: Sequence[int]) -> list[Any]:
        """The batches of a data set that draws nothing."""
        indices = ids.tolist()
        samples = self._read_samples(indices) if self._getitems is None else self._read_with_getitems(indices)
        if len(sizes) == 1:
            return [self._collate_samples(samples, indices)]
        batches, start = [], 0
        for size in sizes:
            batches.append(self._collate_samples(samples[start : start + size], indices[start : start + size]))
            start += size
        return batches

    def _read_seeded(self, ids: np.ndarray, sizes: Sequence[int], epoch: int) -> list[Any]:
        """The batches, with the generators seeded before each sample; a collate that draws goes on from the last one's."""
        indices, seeds = ids.tolist(), rng.derive_seeds(self._seed, epoch, ids)
        kinds = tuple(self._used_kinds)
        batches, start = [], 0
        for size in sizes:
            samples = []
            for position in range(start, start + size):
                rng.seed_generators(seeds[position], kinds)
                samples += self._read_samples(indices[position : position + 1])
            batches.append(self._collate_samples(samples, indices[start : start + size]))
            start += size
        return batches

    def _read_samples(self, indices: list[int]) -> list[Any]:
        """The samples, one by one."""
        samples, data, getitems = [], self._data, self._getitems
        for index in indices:
            try:
                samples.append(data[index] if getitems is None else getitems([index])[0])
            except Exception as error:
                raise self._read_error(f"sample {index}", error) from error
        return samples

    def _read_with_getitems(self, indices: list[int]) -> list[Any]:
        assert self._getitems is not None
        try:
            samples = self._getitems(indices)
        except Exception as error:
            self._read_samples(indices)  # names the one that fails, where it also fails alone
            raise self._read_error(f"samples {indices}, read together with `__getitems__`,", error) from error
        if len(samples) != len(indices):
            raise DataError(
                f"{type_name(self._data)}: `__getitems__` gave {len(samples)} samples for the {len(indices)} numbers "
                f"{indices[:8]}...: return one sample per number, in their order"
            )
        return list(samples)

    def _read_error(self, failed_items: str, error: Exception) -> DataError:
        return DataError(
            f"{type_name(self._data)}: {failed_items} of {self._length} could not be read: {type(error).__name__}: {error}; "
            "repair it or leave it out of the data set (torch.utils.data.Subset)"
        )

    def _collate_samples(self, samples: list[Any], indices: list[int]) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            raise collation_error(samples, indices, error, self._has_custom_collate) from error
