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
from echelon.data.packed.remote_cache import FileCache, default_cache_folder
from echelon.data.packed.remote_files import RemoteRowReader, open_remote_rows
from echelon.data.packed.remote_store import RemoteStore, is_url, redact_credentials
from echelon.data.packed.row_reader import (
    LocalRowReader,
    RowReader,
    RowSubset,
    ShardFile,
    find_block_damage,
    find_file_problem,
    list_shard_files,
)
from echelon.data.source import Source
from echelon.errors import DataError

if TYPE_CHECKING:
    from echelon.data.packed.sequence_packing import PackedSequences


#: Steps ahead of which remote files begin to be copied.
_PREFETCH_STEPS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenOptions:
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
                f"{redact_credentials(remote[0])} is remote and {len(folders) - len(remote)} others are not: give URLs for all (file:///...)"
            )
        self.transform, self.pad, self.window, self.bucket = transform, pad, window, bucket
        self._options = _OpenOptions(
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
        options = self._options
        folders = options.folders
        stores = [RemoteStore(str(folder), options.timeout) for folder in folders if is_url(folder)]
        self.manifests = [store.read_manifest() for store in stores] or [
            documents.load_manifest(Path(folder)) for folder in folders
        ]
        first_manifest = self.manifests[0]
        for folder, manifest in zip(folders, self.manifests, strict=True):
            if (manifest.columns, manifest.sample) != (first_manifest.columns, first_manifest.sample):
                raise DataError(
                    f"{redact_credentials(folder)} holds {describe_columns(manifest)} and {redact_credentials(folders[0])} {describe_columns(first_manifest)}: pack them alike"
                )
        self.columns: tuple[Column, ...] = first_manifest.columns
        self._structure, self._column_names = first_manifest.sample, [column.name for column in first_manifest.columns]
        files = list_shard_files(
            [Path(redact_credentials(folder)) if stores else Path(folder) for folder in folders], self.manifests
        )
        self.identity = documents.content_identity(self.manifests)
        self._length, self.skipped, self.files = files[-1].first_sample + files[-1].shard.samples, 0, len(files)
        self.lanes = len(files) if options.lanes is None else options.lanes
        if type(self.lanes) is not int or self.lanes < 1 or len(files) % self.lanes:
            raise DataError(f"lanes={options.lanes!r}: lanes are equal numbers of the {len(files)} files")
        if self.window is not None and (not _are_equal_parts(files) or options.damaged == "skip"):
            raise DataError(
                f"window={self.window} needs files that hold equally many samples each: pack the data in one go, and let damaged= stop"
            )
        if stores:
            folder = default_cache_folder() if options.cache is None else Path(options.cache)
            self._rows: RowReader = open_remote_rows(
                stores, self.manifests, FileCache(folder, options.cache_bytes), options.timeout
            )
            if options.damaged == "skip":
                self._rows = self._select_undamaged(files, self._rows)
        elif options.damaged == "stop":
            self._rows = LocalRowReader(files, self.columns, check=options.check)
        else:
            self._rows = self._open_undamaged(files)
        self.build_batch = sample_schema.make_batch_builder(self._structure, self._column_names)

    def _open_undamaged(self, files: list[ShardFile]) -> RowReader:
        """The rows that can be read; what cannot is counted and told."""
        problems: list[str] = []
        damaged_spans: list[tuple[int, int]] = []
        damaged_files: list[tuple[int, int]] = []  # of those, whole files
        undamaged_files: list[ShardFile] = []
        for file in files:
            problem = find_file_problem(file)
            if problem:
                problems.append(problem)
                damaged_files.append((file.first_sample, file.first_sample + file.shard.samples))
                damaged_spans.append(damaged_files[-1])
                continue
            undamaged_files.append(file)
            content = np.memmap(file.path, np.uint8, "r")
            for block in range(len(file.shard.checksums)):
                problem = find_block_damage(content, self.columns, file, block)
                if problem:
                    start = file.first_sample + block * file.block
                    problems.append(problem)
                    damaged_spans.append((start, min(start + file.block, file.first_sample + file.shard.samples)))
        if not damaged_spans:
            return LocalRowReader(files, self.columns, check=False)
        self._skip_damaged(damaged_spans, problems)
        remaining = sum(file.shard.samples for file in undamaged_files)
        remaining_spans = [
            (_shift_past_removed(start_row, damaged_files), _shift_past_removed(stop_row, damaged_files))
            for start_row, stop_row in damaged_spans
            if (start_row, stop_row) not in damaged_files
        ]
        return RowSubset.excluding(
            LocalRowReader(undamaged_files, self.columns, check=False), remaining, remaining_spans
        )

    def _select_undamaged(self, files: Sequence[ShardFile], rows: RemoteRowReader) -> RemoteRowReader:
        """The remote files that can be had; a damaged one is left out whole. Each is copied to the cache for it."""
        problems = [rows.find_problem(file_index) for file_index in range(len(files))]
        damaged_files = [file for file, problem in zip(files, problems, strict=True) if problem]
        if not damaged_files:
            return rows
        self._skip_damaged(
            [(file.first_sample, file.first_sample + file.shard.samples) for file in damaged_files],
            [p for p in problems if p],
        )
        return rows.select([file_index for file_index, problem in enumerate(problems) if not problem])

    def _skip_damaged(self, damaged_spans: Sequence[tuple[int, int]], problems: Sequence[str]) -> None:
        """Count what is left out, and say so."""
        self.skipped = sum(stop - start for start, stop in damaged_spans)
        self.identity += f" without {damaged_spans}"
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

    def __getitem__(self, index: int) -> Any:
        if not -self._length <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        return self.__getitems__([index % self._length])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples by number, read together."""
        columns = self._rows.take(self._check_ids(indices))
        samples = [
            sample_schema.build_sample(self._structure, dict(zip(self._column_names, values, strict=True)), batch=False)
            for values in zip(*columns, strict=True)
        ]
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def read_batch(self, ids: np.ndarray, *, pin: bool = False) -> Any:
        """The samples `ids` as one batch, without `transform`: a tensor for each column, padded where `pad` says so."""
        return self.build_batch(self.gather_columns(self._check_ids(ids), pin=pin))

    def prefetch(self, ids: np.ndarray) -> None:
        """These samples are needed soon: remote files begin to be copied."""
        self._rows.prefetch(ids)

    def _check_ids(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The numbers, once it is sure that there are such samples: a gather by address would find something else."""
        ids = np.asarray(indices, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._length:
            raise IndexError(f"samples {ids.min()} to {ids.max()} of {self._length}: they count from 0")
        return ids

    def gather_columns(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        """The columns of a batch; `ids` are known to lie in it."""
        if self.pad is not None:
            return self._rows.take_padded(ids, self.pad, pin=pin)
        for column in self.columns:
            if column.ragged and column.kind == "array":
                raise DataError(explain_ragged(column))
        return self._rows.take(ids, pin=pin)

    def subset_identity(self, rows: np.ndarray | None) -> str:
        """What it holds as one short text, or what these samples of it are."""
        if rows is None:
            return self.identity
        return f"{self.identity}, {len(rows):,} samples of it ({hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()})"

    @property
    def is_remote(self) -> bool:
        """Whether its files come from a store."""
        return isinstance(self._rows, RemoteRowReader)

    @property
    def packed_collate(self) -> Callable[[list[Any]], Any] | None:
        """How single samples become a batch where `pad` says that they are padded; None: as torch does."""
        return None if self.pad is None else partial(_collate_padded, value=self.pad)

    def read_column(self, name: str, ids: np.ndarray) -> Any:
        """One column of the samples `ids`, not padded."""
        return self._rows.take_column(self._column_names.index(name), self._check_ids(ids))

    def lengths(self, name: str) -> np.ndarray:
        """The number of items of each sample in a column that differs in length."""
        if name not in self._column_names or not self.columns[self._column_names.index(name)].ragged:
            raise DataError(
                f"{name!r} is no column of rows that differ in length; the columns are {describe_columns(self.manifests[0])}"
            )
        return self._rows.lengths(self._column_names.index(name))

    def bucket_lengths(self) -> np.ndarray | None:
        """The lengths by which batches are put together, if any."""
        return None if self.bucket is None else self.lengths(self.bucket)

    def pack_sequences(self, length: int, column: str | None = None) -> PackedSequences:
        """Rows of `length` tokens, filled with samples of a column that differs in length (filled.py); other columns are left out."""
        from echelon.data.packed.sequence_packing import PackedSequences

        ragged = [candidate.name for candidate in self.columns if candidate.ragged and candidate.kind == "array"]
        if column is None and len(ragged) > 1:
            raise DataError(
                f"filled({length}) lays out one of {', '.join(ragged)}: say which, as filled({length}, {ragged[0]!r})"
            )
        return PackedSequences(self, column or (ragged[0] if ragged else ""), length)

    def __getstate__(self) -> Any:
        # The maps are of this process: a worker opens its own.
        return self._options, self.transform, self.pad, self.window, self.bucket, self.identity

    def __setstate__(self, state: Any) -> None:
        self._options, self.transform, self.pad, self.window, self.bucket, saved_identity = state
        self._open()
        if self.identity != saved_identity:
            raise DataError(
                f"{redact_credentials(self._options.folders[0])} holds other samples than when it was opened: {self.identity}, before {saved_identity}; open it again"
            )


class PackedSource(Source):
    """Batches of a packed data set, each one gather per column."""

    supports_gather = True

    def __init__(self, data: Packed, rows: np.ndarray | None = None) -> None:
        """`rows`: which of its samples (None: all)."""
        self._data, self._rows = data, rows
        if rows is None:
            self.lanes, self.files, self.window = data.lanes, data.files, data.window
        self.prefetch_steps = _PREFETCH_STEPS if data.is_remote else 0
        self.identity = data.subset_identity(rows)
        bucket_lengths = data.bucket_lengths()
        self.lengths = bucket_lengths if bucket_lengths is None or rows is None else bucket_lengths[rows]
        if not data.is_remote and not any(column.ragged for column in data.columns):
            self.sample_bytes = float(sum(column.item_bytes for column in data.columns))

    def __len__(self) -> int:
        return len(self._data) if self._rows is None else len(self._rows)

    def prefetch(self, ids: np.ndarray) -> None:
        self._data.prefetch(ids if self._rows is None else self._rows[ids])

    def read_micro_batches(self, ids: np.ndarray, sizes: Sequence[int], epoch: int, *, pin: bool = False) -> list[Any]:
        data = self._data
        if self._rows is not None:
            ids = self._rows[ids]
        columns = data.gather_columns(ids, pin=pin)
        if len(sizes) == 1:
            return [data.build_batch(columns)]
        split_columns = [_split_column(column, sizes) for column in columns]
        return [data.build_batch(list(part)) for part in zip(*split_columns, strict=True)]


def can_gather(data: Packed) -> bool:
    """Whether whole batches can be gathered: nothing has to run for each sample."""
    has_gatherable_columns = all(
        column.kind != "image" and (not column.ragged or column.kind != "array" or data.pad is not None)
        for column in data.columns
    )
    return data.transform is None and has_gatherable_columns


def explain_ragged(column: Column) -> str:
    """Why rows of this column make no batch as they are."""
    return f"{column.name!r} differs in length from sample to sample: give Packed(..., pad=0), a transform=, or the job's collate="


def describe_columns(manifest: Manifest) -> str:
    """The columns in words."""
    return ", ".join(f"{column.name}: {column}" for column in manifest.columns)


def _collate_padded(samples: list[Any], value: float) -> Any:
    return collated(_pad_samples(samples, value))


def _pad_samples(samples: list[Any], value: float) -> list[Any]:
    """The samples with tensors in the same place of equal length."""
    first = samples[0]
    if isinstance(first, Tensor):
        lengths = {len(sample) if sample.ndim else 0 for sample in samples}
        return samples if len(lengths) == 1 else list(pad_sequence(samples, batch_first=True, padding_value=value))
    if isinstance(first, dict):
        columns = {key: _pad_samples([sample[key] for sample in samples], value) for key in first}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(first, list | tuple):
        parts = [_pad_samples(list(part), value) for part in zip(*samples, strict=True)]
        return [type(first)(row) for row in zip(*parts, strict=True)]
    return samples


def _split_column(column: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if isinstance(column, Tensor):
        return torch.split(column, list(sizes))
    ends = np.cumsum(sizes).tolist()
    return [column[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _are_equal_parts(files: Sequence[ShardFile]) -> bool:
    """Whether files are equal parts, rounded as the order rounds them."""
    total, count = files[-1].first_sample + files[-1].shard.samples, len(files)
    return all(file.first_sample == position * total // count for position, file in enumerate(files))


def _shift_past_removed(row: int, removed_spans: Sequence[tuple[int, int]]) -> int:
    """The number of a row once whole spans before it are gone."""
    return row - sum(stop - start for start, stop in removed_spans if stop <= row)
