"""A packed data set: a map-style data set of torch's kind, and a Source that gathers whole batches."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from echelon.data.collate import collate as collated
from echelon.data.packed import manifest as documents
from echelon.data.packed import sample_schema
from echelon.data.packed.manifest import Column, Manifest
from echelon.data.packed.remote_cache import Cache, default_folder
from echelon.data.packed.remote_files import RemoteRows, far_rows
from echelon.data.packed.remote_store import Store, is_url, shown
from echelon.data.packed.row_reader import File, Kept, LocalRows, Rows, damage, files_of, wrong
from echelon.data.source import Source
from echelon.errors import DataError

if TYPE_CHECKING:
    from echelon.data.packed.sequence_packing import Filled


#: Steps ahead of which remote files begin to be copied.
_EXPECTED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """How a data set was asked for: another process opens it in the same way."""

    folders: tuple[str | Path, ...]
    damaged: str
    check: bool
    lanes: int | None
    cache: str | Path | None
    cache_bytes: int
    timeout: float


class Packed:
    """Packed data in one or more folders, one behind the other. Give it to a job as data=, index it, or read batches of it.

    `transform(sample)` is applied to each sample as it is read (in workers, seeded per sample). `pad`: fill rows that differ in
    length up to the longest of the batch with this value. `bucket`: the column by whose length samples of a batch are to be alike.
    `damaged`: "stop" at a damaged file or block, naming it, or "skip" them all, found by reading everything once when it is opened.
    `check=False` reads without looking at checksums.

    Folders may be on remote stores (s3://...): their files are copied to the folder `cache`, of `cache_bytes` at most, which the
    ranks of a machine share; a read from which nothing comes for `timeout` seconds ends with an error. `window`: shuffle so many
    files of a lane at a time instead of all, so that a cache smaller than the data serves; `lanes`: so many instead of one per file.
    """

    def __init__(
        self, *folders: str | Path, transform: Callable[[Any], Any] | None = None, pad: float | None = None,
        damaged: Literal["stop", "skip"] = "stop", check: bool = True, window: int | None = None, lanes: int | None = None,
        bucket: str | None = None, cache: str | Path | None = None, cache_bytes: int = 64 * 2**30, timeout: float = 60.0,
    ) -> None:  # fmt: skip
        if not folders:
            raise DataError("Packed() needs the folder of a packed data set; `echelon pack SRC DST` makes one")
        if damaged not in ("stop", "skip"):
            raise DataError(f"damaged={damaged!r}: stop or skip")
        if window is not None and (type(window) is not int or window < 1):
            raise DataError(f"window={window!r}: give a whole number of files, 1 or more")
        for name, value in (("cache_bytes", cache_bytes), ("timeout", timeout)):
            if not isinstance(value, int | float) or not value > 0:
                raise DataError(
                    f"{name}={value!r}: give a number above 0 of {'bytes' if name == 'cache_bytes' else 'seconds'}"
                )
        remote = [folder for folder in folders if is_url(folder)]
        if remote and len(remote) < len(folders):
            raise DataError(
                f"{shown(remote[0])} is remote and {len(folders) - len(remote)} others are not: give URLs for all (file:///...)"
            )
        self.transform, self.pad, self.window, self.bucket = transform, pad, window, bucket
        self._given = _Given(
            folders=folders,
            damaged=damaged,
            check=check,
            lanes=lanes,
            cache=cache,
            cache_bytes=cache_bytes,
            timeout=timeout,
        )
        self._open()

    def _open(self) -> None:
        given = self._given
        folders = given.folders
        stores = [Store(str(folder), given.timeout) for folder in folders if is_url(folder)]
        self.manifests = [store.manifest() for store in stores] or [documents.load(Path(folder)) for folder in folders]
        first = self.manifests[0]
        for folder, other in zip(folders, self.manifests, strict=True):
            if (other.columns, other.sample) != (first.columns, first.sample):
                raise DataError(
                    f"{shown(folder)} holds {describe(other)} and {shown(folders[0])} {describe(first)}: pack them alike"
                )
        self.columns: tuple[Column, ...] = first.columns
        self._structure, self._names = first.sample, [column.name for column in first.columns]
        files = files_of([Path(shown(folder)) if stores else Path(folder) for folder in folders], self.manifests)
        self.identity = documents.identity(self.manifests)
        self._length, self.skipped, self.files = files[-1].first + files[-1].shard.samples, 0, len(files)
        self.lanes = len(files) if given.lanes is None else given.lanes
        if type(self.lanes) is not int or self.lanes < 1 or len(files) % self.lanes:
            raise DataError(f"lanes={given.lanes!r}: lanes are equal numbers of the {len(files)} files")
        if self.window is not None and (not _equal(files) or given.damaged == "skip"):
            raise DataError(
                f"window={self.window} needs files that hold equally many samples each: pack the data in one go, and let damaged= stop"
            )
        if stores:
            folder = default_folder() if given.cache is None else Path(given.cache)
            self._rows: Rows = far_rows(stores, self.manifests, Cache(folder, given.cache_bytes), given.timeout)
            if given.damaged == "skip":
                self._rows = self._reachable(files, self._rows)
        elif given.damaged == "stop":
            self._rows = LocalRows(files, self.columns, check=given.check)
        else:
            self._rows = self._healthy(files)
        self.build = sample_schema.builder(self._structure, self._names)

    def _healthy(self, files: list[File]) -> Rows:
        """The rows that can be read; what cannot is counted and told."""
        problems: list[str] = []
        dropped: list[tuple[int, int]] = []
        gone: list[tuple[int, int]] = []  # of those, whole files
        good: list[File] = []
        for file in files:
            problem = wrong(file)
            if problem:
                problems.append(problem)
                gone.append((file.first, file.first + file.shard.samples))
                dropped.append(gone[-1])
                continue
            good.append(file)
            content = np.memmap(file.path, np.uint8, "r")
            for block in range(len(file.shard.checksums)):
                problem = damage(content, self.columns, file, block)
                if problem:
                    start = file.first + block * file.block
                    problems.append(problem)
                    dropped.append((start, min(start + file.block, file.first + file.shard.samples)))
        if not dropped:
            return LocalRows(files, self.columns, check=False)
        self._skip(dropped, problems)
        here = sum(file.shard.samples for file in good)
        inner = [(_without(a, gone), _without(b, gone)) for a, b in dropped if (a, b) not in gone]
        return Kept.without(LocalRows(good, self.columns, check=False), here, inner)

    def _reachable(self, files: Sequence[File], rows: RemoteRows) -> RemoteRows:
        """The remote files that can be had; a damaged one is left out whole. Each is copied to the cache for it."""
        problems = [rows.problem(number) for number in range(len(files))]
        gone = [file for file, problem in zip(files, problems, strict=True) if problem]
        if not gone:
            return rows
        self._skip([(file.first, file.first + file.shard.samples) for file in gone], [p for p in problems if p])
        return rows.only([number for number, problem in enumerate(problems) if not problem])

    def _skip(self, dropped: Sequence[tuple[int, int]], problems: Sequence[str]) -> None:
        """Count what is left out, and say so."""
        self.skipped = sum(stop - start for start, stop in dropped)
        self.identity += f" without {dropped}"
        if self.skipped == self._length:
            raise DataError(f"no sample is left: {problems[0]}")
        warnings.warn(
            f"{self.skipped:,} of {self._length:,} samples are skipped in {len(problems)} damaged part{'s' * (len(problems) > 1)}, the first: {problems[0]}",
            stacklevel=5,
        )
        self._length -= self.skipped
        self.lanes = self.files = 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        if not -self._length <= number < self._length:
            raise IndexError(f"sample {number} of {self._length}")
        return self.__getitems__([number % self._length])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Samples by number, read together."""
        columns = self._rows.take(self._inside(numbers))
        samples = [
            sample_schema.built(self._structure, dict(zip(self._names, values, strict=True)), batch=False)
            for values in zip(*columns, strict=True)
        ]
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def batch(self, ids: np.ndarray, *, pin: bool = False) -> Any:
        """The samples `ids` as one batch, without `transform`: a tensor for each column, padded where `pad` says so."""
        return self.build(self.gathered(self._inside(ids), pin=pin))

    def expect(self, ids: np.ndarray) -> None:
        """These samples are needed soon: remote files begin to be copied."""
        self._rows.expect(ids)

    def _inside(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """The numbers, once it is sure that there are such samples: a gather by address would find something else."""
        ids = np.asarray(numbers, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._length:
            raise IndexError(f"samples {ids.min()} to {ids.max()} of {self._length}: they count from 0")
        return ids

    def gathered(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        """The columns of a batch; `ids` are known to lie in it."""
        if self.pad is not None:
            return self._rows.padded(ids, self.pad, pin=pin)
        for column in self.columns:
            if column.ragged and column.kind == "array":
                raise DataError(no_batch(column))
        return self._rows.take(ids, pin=pin)

    def identified(self, rows: np.ndarray | None) -> str:
        """What it holds as one short text, or what these samples of it are."""
        if rows is None:
            return self.identity
        return f"{self.identity}, {len(rows):,} samples of it ({hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()})"

    @property
    def remote(self) -> bool:
        """Whether its files come from a store."""
        return isinstance(self._rows, RemoteRows)

    @property
    def packed_collate(self) -> Callable[[list[Any]], Any] | None:
        """How single samples become a batch where `pad` says that they are padded; None: as torch does."""
        return None if self.pad is None else partial(_padded, value=self.pad)

    def column(self, name: str, ids: np.ndarray) -> Any:
        """One column of the samples `ids`, not padded."""
        return self._rows.column(self._names.index(name), self._inside(ids))

    def lengths(self, name: str) -> np.ndarray:
        """The number of items of each sample in a column that differs in length."""
        if name not in self._names or not self.columns[self._names.index(name)].ragged:
            raise DataError(
                f"{name!r} is no column of rows that differ in length; the columns are {describe(self.manifests[0])}"
            )
        return self._rows.lengths(self._names.index(name))

    def bucketed(self) -> np.ndarray | None:
        """The lengths by which batches are put together, if any."""
        return None if self.bucket is None else self.lengths(self.bucket)

    def filled(self, length: int, column: str | None = None) -> Filled:
        """Rows of `length` tokens, filled with samples of a column that differs in length (filled.py); other columns are left out."""
        from echelon.data.packed.sequence_packing import Filled

        ragged = [each.name for each in self.columns if each.ragged and each.kind == "array"]
        if column is None and len(ragged) > 1:
            raise DataError(
                f"filled({length}) lays out one of {', '.join(ragged)}: say which, as filled({length}, {ragged[0]!r})"
            )
        return Filled(self, column or (ragged[0] if ragged else ""), length)

    def __getstate__(self) -> Any:
        # The maps are of this process: a worker opens its own.
        return self._given, self.transform, self.pad, self.window, self.bucket, self.identity

    def __setstate__(self, state: Any) -> None:
        self._given, self.transform, self.pad, self.window, self.bucket, before = state
        self._open()
        if self.identity != before:
            raise DataError(
                f"{shown(self._given.folders[0])} holds other samples than when it was opened: {self.identity}, before {before}; open it again"
            )


class PackedSource(Source):
    """Batches of a packed data set, each one gather per column."""

    gathers = True

    def __init__(self, data: Packed, rows: np.ndarray | None = None) -> None:
        """`rows`: which of its samples (None: all)."""
        self._data, self._rows = data, rows
        if rows is None:
            self.lanes, self.files, self.window = data.lanes, data.files, data.window
        self.ahead = _EXPECTED if data.remote else 0
        self.identity = data.identified(rows)
        found = data.bucketed()
        self.lengths = found if found is None or rows is None else found[rows]
        if not data.remote and not any(column.ragged for column in data.columns):
            self.sample_bytes = float(sum(column.item for column in data.columns))

    def __len__(self) -> int:
        return len(self._data) if self._rows is None else len(self._rows)

    def expect(self, ids: np.ndarray) -> None:
        self._data.expect(ids if self._rows is None else self._rows[ids])

    def parts(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        data = self._data
        if self._rows is not None:
            ids = self._rows[ids]
        columns = data.gathered(ids, pin=pin)
        if len(sizes) == 1:
            return [data.build(columns)]
        cuts = [_cut(column, sizes) for column in columns]
        return [data.build(list(part)) for part in zip(*cuts, strict=True)]


def gathers(data: Packed) -> bool:
    """Whether whole batches can be gathered: nothing has to run for each sample."""
    ready = all(
        column.kind != "image" and (not column.ragged or column.kind != "array" or data.pad is not None)
        for column in data.columns
    )
    return data.transform is None and ready


def no_batch(column: Column) -> str:
    """Why rows of this column make no batch as they are."""
    return f"{column.name!r} differs in length from sample to sample: give Packed(..., pad=0), a transform=, or the job's collate="


def describe(manifest: Manifest) -> str:
    """The columns in words."""
    return ", ".join(f"{column.name}: {column}" for column in manifest.columns)


def _padded(samples: list[Any], value: float) -> Any:
    return collated(_even(samples, value))


def _even(samples: list[Any], value: float) -> list[Any]:
    """The samples with tensors in the same place of equal length."""
    first = samples[0]
    if isinstance(first, Tensor):
        lengths = {len(sample) if sample.ndim else 0 for sample in samples}
        return samples if len(lengths) == 1 else list(pad_sequence(samples, batch_first=True, padding_value=value))
    if isinstance(first, dict):
        columns = {key: _even([sample[key] for sample in samples], value) for key in first}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(first, list | tuple):
        parts = [_even(list(part), value) for part in zip(*samples, strict=True)]
        return [type(first)(row) for row in zip(*parts, strict=True)]
    return samples


def _cut(column: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if isinstance(column, Tensor):
        return torch.split(column, list(sizes))
    ends = np.cumsum(sizes).tolist()
    return [column[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _equal(files: Sequence[File]) -> bool:
    """Whether files are equal parts, rounded as the order rounds them."""
    total, count = files[-1].first + files[-1].shard.samples, len(files)
    return all(file.first == place * total // count for place, file in enumerate(files))


def _without(place: int, gone: Sequence[tuple[int, int]]) -> int:
    """The number of a row once whole spans before it are gone."""
    return place - sum(stop - start for start, stop in gone if stop <= place)
