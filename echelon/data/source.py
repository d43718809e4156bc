"""Samples by number, collated into batches: the interface through which everything else reads a map-style data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.data import rng
from echelon.data.collate import collate as collate_as_torch
from echelon.data.collate import pin_batch
from echelon.data.error_text import collation_error, type_name
from echelon.data.order import BucketedOrder, Order
from echelon.errors import DataError

Collate = Callable[[list[Any]], Any]


class Source(ABC):
    """A data set of known length."""

    #: A batch is one copy by index, which draws no random numbers and gains nothing from workers.
    supports_gather: bool
    #: Equal consecutive parts of the data; an order over them lets each rank read from its own.
    lanes: int = 1
    #: What the data holds, where that is known without reading samples.
    identity: str | None = None
    #: Files of equal size, and how many of a lane's files are shuffled together (None: all).
    files: int = 1
    window: int | None = None
    #: The length of each sample, where batches should hold samples of similar length.
    lengths: np.ndarray | None = None
    #: How many steps before it is read a batch is announced with `prefetch`.
    prefetch_steps: int = 0
    #: Bytes of a sample, where batches are small enough for several to be gathered together.
    sample_bytes: float = inf
    #: Whether reading runs user code, which may keep state.
    runs_user_code: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read_micro_batches(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        """Read the samples `ids` as consecutive collated batches of `sizes`."""

    def read_batch(self, ids: np.ndarray, epoch: int, *, pin: bool = False) -> Any:
        return self.read_micro_batches(ids, (len(ids),), epoch, pin=pin)[0]

    def prefetch(self, ids: np.ndarray) -> None:
        """Announce that these samples are needed soon. Does not wait."""
        return

    def make_order(self, *, batch: int, seed: int, drop_last: bool = False) -> Order:
        """Make the order in which a training visits the samples."""
        options: dict[str, Any] = {"batch": batch, "seed": seed, "drop_last": drop_last}
        options |= {"samples": len(self), "lanes": self.lanes, "files": self.files, "window": self.window}
        return Order(**options) if self.lengths is None else BucketedOrder(lengths=self.lengths, **options)

    def read_sample(self, index: int) -> Any:
        """Read one sample of the first epoch: not collated, except from sources that gather."""
        return self.read_batch(np.array([index]), 0)


class GatherSource(Source):
    """Columns that are gathered by index; micro-batches are views of the gathered share."""

    supports_gather = True

    def __init__(
        self, gather_columns: Callable[[np.ndarray, bool], list[Any]], build_batch: Callable[[list[Any]], Any],
        length: int, rows: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """`rows`: the rows of the columns that are samples (None: all `length`)."""
        self._gather_columns, self._build_batch = gather_columns, build_batch
        self._length, self._rows = length if rows is None else len(rows), rows

    def __len__(self) -> int:
        return self._length

    def map_ids(self, ids: np.ndarray) -> np.ndarray:
        return ids if self._rows is None else self._rows[ids]

    def read_micro_batches(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        columns = self._gather_columns(self.map_ids(ids), pin)
        if len(sizes) == 1:
            return [self._build_batch(columns)]
        split_columns = [_split_column(column, sizes) for column in columns]
        return [self._build_batch(list(part)) for part in zip(*split_columns, strict=True)]


def _split_column(column: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if isinstance(column, Tensor):
        return torch.split(column, list(sizes))
    ends = np.cumsum(sizes).tolist()
    return [column[end - size : end] for end, size in zip(ends, sizes, strict=True)]


class SampleSource(Source):
    """Any data set in Python, read sample by sample.

    The random generators that a data set draws from (augmentation) are seeded for each sample. Their state shows which ones it uses:
    the others are not seeded, and the batch in which the data set first draws is read again.
    """

    supports_gather = False

    def __init__(
        self, data: Any, *, collate: Collate | None = None, padding_collate: Collate | None = None, seed: int = 0
    ) -> None:
        """`collate`: the job's; without it samples are collated by `padding_collate`, or as torch does."""
        self._data, self._seed, self._length = data, seed, len(data)
        self._collate, self._has_custom_collate = collate or padding_collate or collate_as_torch, collate is not None
        self._getitems = getattr(data, "__getitems__", None)
        self._rng = rng.IsolatedRng()
        self._used_kinds: set[str] = set()
        # A list collated by torch runs no user code that could draw.
        self.runs_user_code = type(data) not in (list, tuple) or collate is not None

    def __len__(self) -> int:
        return self._length

    def read_micro_batches(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        read = self._read_tracking_rng if self.runs_user_code else self._read_batches
        batches = read(ids, sizes, epoch)
        return [pin_batch(batch) for batch in batches] if pin else batches

    def read_sample(self, index: int) -> Any:
        with self._rng:
            rng.seed_generators(rng.derive_seeds(self._seed, 0, np.array([index]))[0])
            return self._read_samples([index])[0]

    def _read_tracking_rng(self, ids: np.ndarray, sizes: Sequence[int], epoch: int) -> list[Any]:
        """Read batches with every generator seeded that reading them draws from."""
        with self._rng:
            while True:
                batches = self._read_batches(ids, sizes, epoch)
                used_kinds = self._rng.find_used_kinds()
                if used_kinds <= self._used_kinds:
                    return batches
                self._used_kinds |= used_kinds

    def _read_batches(self, ids: np.ndarray, sizes: Sequence[int], epoch: int) -> list[Any]:
        """Read all samples together, or seed before each; a collate that draws continues from the last one's generators."""
        indices, kinds = ids.tolist(), tuple(self._used_kinds)
        seeds = rng.derive_seeds(self._seed, epoch, ids) if kinds else []
        samples = [] if kinds else self._read_together(indices)
        batches, stop = [], 0
        for size in sizes:
            start, stop = stop, stop + size
            for position in range(start, stop) if kinds else ():
                rng.seed_generators(seeds[position], kinds)
                samples += self._read_samples(indices[position : position + 1])
            batches.append(self._collate_samples(samples[start:stop], indices[start:stop]))
        return batches

    def _read_samples(self, indices: list[int]) -> list[Any]:
        samples, data, getitems = [], self._data, self._getitems
        for index in indices:
            try:
                samples.append(data[index] if getitems is None else getitems([index])[0])
            except Exception as error:
                raise self._read_error(f"sample {index}", error) from error
        return samples

    def _read_together(self, indices: list[int]) -> list[Any]:
        if self._getitems is None:
            return self._read_samples(indices)
        try:
            samples = self._getitems(indices)
        except Exception as error:
            self._read_samples(indices)  # names the sample that fails, if it also fails alone
            raise self._read_error(f"samples {indices}, read together with `__getitems__`,", error) from error
        if len(samples) != len(indices):
            problem = f"returned {len(samples)} samples for the {len(indices)} indices {indices[:8]}..."
            remedy = "return one sample per index, in their order"
            raise DataError(f"{type_name(self._data)}: `__getitems__` {problem}: {remedy}")
        return list(samples)

    def _read_error(self, failed_items: str, error: Exception) -> DataError:
        problem = f"{failed_items} of {self._length} could not be read: {type(error).__name__}: {error}"
        remedy = "repair it or leave it out of the data set (torch.utils.data.Subset)"
        return DataError(f"{type_name(self._data)}: {problem}; {remedy}")

    def _collate_samples(self, samples: list[Any], indices: list[int]) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            raise collation_error(samples, indices, error, self._has_custom_collate) from error
