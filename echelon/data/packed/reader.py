"""A packed data set: a map-style Dataset, and sources that gather whole batches of it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from echelon.data.collate import collate as collate_as_torch
from echelon.data.packed import sample_schema
from echelon.data.packed.manifest import Column, Manifest, content_identity, load_manifest
from echelon.data.packed.remote_cache import FileCache, default_cache_folder
from echelon.data.packed.remote_files import RemoteRowReader, open_remote_rows
from echelon.data.packed.remote_store import RemoteStore, is_url, redact_credentials
from echelon.data.packed.row_reader import LocalRowReader, RowReader, RowSubset
from echelon.data.packed.sequence_packing import PackedSequences
from echelon.data.packed.shard_file import ShardFile, list_shard_files
from echelon.data.source import Collate, GatherSource, SampleSource, Source
from echelon.errors import DataError

#: Remote files start to be copied this many steps before they are read.
_PREFETCH_STEPS = 256


#: What `Packed` was created with: another process opens it in the same way.
_SETTINGS = (
    "transform", "pad", "window", "bucket", "_folders", "_damaged", "_check", "_lanes", "_cache", "_cache_bytes", "_timeout",
)  # fmt: skip


class Packed:
    """Packed data in one or more folders, concatenated. Give it to a job as data=, index it, or read batches of it.

    `transform(sample)` is applied to each sample as it is read (in workers, seeded per sample). `pad`: pad rows that differ in
    length to the longest of the batch with this value. `bucket`: the column by whose length samples are grouped into batches.
    `damaged`: "stop" at a damaged file or block with an error that names it, or "skip" them all, which reads everything once when the
    data set is opened. `check=False` does not compare checksums.

    Folders may be on remote stores (s3://...). Their files are copied to the folder `cache`, of at most `cache_bytes`, which the
    ranks of a machine share; a read that receives nothing for `timeout` seconds fails. `window`: shuffle this many files of a lane
    at a time instead of all, so that a cache smaller than the data suffices; `lanes`: this many instead of one per file.
    """

    def __init__(
        self, *folders: str | Path, transform: Callable[[Any], Any] | None = None, pad: float | None = None,
        damaged: Literal["stop", "skip"] = "stop", check: bool = True, window: int | None = None, lanes: int | None = None,
        bucket: str | None = None, cache: str | Path | None = None, cache_bytes: int = 64 * 2**30, timeout: float = 60.0,
    ) -> None:  # fmt: skip
        if not folders:
            raise DataError("Packed() needs the folder of a packed data set; `echelon pack SRC DST` makes one")
        if damaged not in ("stop", "skip"):
            raise DataError(f"damaged={damaged!r}: expected stop or skip")
        if window is not None and (type(window) is not int or window < 1):
            raise DataError(f"window={window!r}: expected an integer of at least 1 (files)")
        for name, value, unit in (("cache_bytes", cache_bytes, "bytes"), ("timeout", timeout, "seconds")):
            if not isinstance(value, int | float) or not value > 0:
                raise DataError(f"{name}={value!r}: expected a number of {unit} above 0")
        remote = [folder for folder in folders if is_url(folder)]
        if remote and len(remote) < len(folders):
            others = f"{len(folders) - len(remote)} others are not: give URLs for all (file:///...)"
            raise DataError(f"{redact_credentials(remote[0])} is remote and {others}")
        self.transform, self.pad, self.window, self.bucket = transform, pad, window, bucket
        self._folders, self._damaged, self._check, self._lanes = folders, damaged, check, lanes
        self._cache, self._cache_bytes, self._timeout = cache, cache_bytes, timeout
        self._open()

    def _open(self) -> None:
        folders = self._folders
        names = [redact_credentials(folder) for folder in folders]
        stores = [RemoteStore(str(folder), self._timeout) for folder in folders if is_url(folder)]
        local = [] if stores else [load_manifest(Path(folder)) for folder in folders]
        self.manifests = [*(store.read_manifest() for store in stores), *local]
        first_manifest = self.manifests[0]
        for name, manifest in zip(names, self.manifests, strict=True):
            if (manifest.columns, manifest.sample) != (first_manifest.columns, first_manifest.sample):
                layouts = f"{describe_columns(manifest)} and {names[0]} {describe_columns(first_manifest)}"
                raise DataError(f"{name} holds {layouts}: pack them with the same columns")
        self.columns: tuple[Column, ...] = first_manifest.columns
        self._structure, self._column_names = first_manifest.sample, [column.name for column in self.columns]
        self._ragged_names = [column.name for column in self.columns if column.ragged and column.kind == "array"]
        files = list_shard_files([Path(name) for name in names], self.manifests)
        self.identity = content_identity(self.manifests)
        self._length, self.skipped, self.files = files[-1].end_sample, 0, len(files)
        self.lanes = len(files) if self._lanes is None else self._lanes
        if type(self.lanes) is not int or self.lanes < 1 or len(files) % self.lanes:
            raise DataError(f"lanes={self._lanes!r}: expected a divisor of the number of files, {len(files)}")
        # Rounded as the order rounds them.
        is_equal = all(file.first_sample == i * self._length // len(files) for i, file in enumerate(files))
        if self.window is not None and (not is_equal or self._damaged == "skip"):
            problem = f"window={self.window} needs files of equally many samples"
            raise DataError(f"{problem}: pack the data in one go, and leave damaged= at stop")
        self._rows = self._open_remote(stores, files) if stores else self._open_local(files)
        self.build_batch = sample_schema.make_batch_builder(self._structure, self._column_names)

    def _open_local(self, files: list[ShardFile]) -> RowReader:
        if self._damaged == "stop":
            return LocalRowReader(files, check=self._check)
        kept, excluded = self._skip_damage(files, [part for file in files for part in file.find_damage()])
        rows = LocalRowReader([files[index] for index in kept], check=False)
        return RowSubset(rows, sum(files[index].shard.samples for index in kept), excluded) if excluded else rows

    def _open_remote(self, stores: list[RemoteStore], files: list[ShardFile]) -> RowReader:
        folder = default_cache_folder() if self._cache is None else Path(self._cache)
        rows = open_remote_rows(stores, self.manifests, FileCache(folder, self._cache_bytes), self._timeout)
        if self._damaged == "stop":
            return rows
        kept, _ = self._skip_damage(files, [damage for damage in rows.find_damage() if damage])
        return rows if len(kept) == len(files) else rows.select(kept)

    def _skip_damage(
        self, files: list[ShardFile], damage: list[tuple[int, int, str]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Count the samples in damaged parts, and warn of them; returns the files to keep and the spans to leave out of their samples."""
        if not damage:
            return list(range(len(files))), []
        spans, first_problem = [(start, stop) for start, stop, _ in damage], damage[0][2]
        self.skipped = sum(stop - start for start, stop in spans)
        self.identity += f" without {spans}"
        if self.skipped == self._length:
            raise DataError(f"no sample is left: {first_problem}")
        parts = f"{len(damage)} damaged part{'s' * (len(damage) > 1)}, the first: {first_problem}"
        warnings.warn(f"{self.skipped:,} of {self._length:,} samples are skipped in {parts}", stacklevel=5)
        self._length -= self.skipped
        self.lanes = self.files = 1
        kept, excluded, removed, whole_files = [], [], 0, set(spans)
        for index, file in enumerate(files):
            if (file.first_sample, file.end_sample) in whole_files:
                removed += file.shard.samples
                continue
            kept.append(index)
            inside = [span for span in spans if file.first_sample <= span[0] < file.end_sample]
            excluded += [(start - removed, stop - removed) for start, stop in inside]
        return kept, excluded

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not -self._length <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        return self.__getitems__([index % self._length])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples by number, read together."""
        columns = self._rows.take(self._check_ids(indices))
        rows = (dict(zip(self._column_names, values, strict=True)) for values in zip(*columns, strict=True))
        samples = [sample_schema.build_sample(self._structure, row, batch=False) for row in rows]
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def read_batch(self, ids: np.ndarray, *, pin: bool = False) -> Any:
        """Read the samples `ids` as one batch, without `transform`: a tensor per column, padded with `pad`."""
        return self.build_batch(self.gather_columns(self._check_ids(ids), pin))

    def prefetch(self, ids: np.ndarray) -> None:
        """Start to copy the remote files of samples that are needed soon."""
        self._rows.prefetch(ids)

    def _check_ids(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Refuse numbers out of range: a gather by address would read something else."""
        ids = np.asarray(indices, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._length:
            raise IndexError(f"samples {ids.min()} to {ids.max()} of {self._length}: they count from 0")
        return ids

    def gather_columns(self, ids: np.ndarray, pin: bool = False) -> list[Any]:
        if self.pad is not None:
            return self._rows.take_padded(ids, self.pad, pin=pin)
        if self._ragged_names:
            remedy = "give Packed(..., pad=0), a transform=, or the job's collate="
            raise DataError(f"{self._ragged_names[0]!r} differs in length from sample to sample: {remedy}")
        return self._rows.take(ids, pin=pin)

    @property
    def can_gather(self) -> bool:
        """Whether whole batches can be gathered: nothing has to run for each sample."""
        has_images = any(column.kind == "image" for column in self.columns)
        return self.transform is None and not has_images and (not self._ragged_names or self.pad is not None)

    @property
    def packed_collate(self) -> Callable[[list[Any]], Any] | None:
        """Collates single samples where `pad` is set; None: collate as torch does."""
        return None if self.pad is None else partial(_collate_padded, value=self.pad)

    @property
    def is_remote(self) -> bool:
        return isinstance(self._rows, RemoteRowReader)

    def read_column(self, name: str, ids: np.ndarray) -> Any:
        """Read one column of the samples `ids`, not padded."""
        return self._rows.take_column(self._column_names.index(name), self._check_ids(ids))

    def lengths(self, name: str) -> np.ndarray:
        """The number of items of each sample in a ragged column."""
        index = next((i for i, column in enumerate(self.columns) if column.name == name and column.ragged), None)
        if index is None:
            columns = describe_columns(self.manifests[0])
            raise DataError(f"{name!r} is not a column of rows that differ in length; the columns are {columns}")
        return self._rows.lengths(index)

    def pack_sequences(self, length: int, column: str | None = None) -> PackedSequences:
        """Fill rows of `length` tokens with whole samples of a ragged column; other columns are left out."""
        ragged = self._ragged_names
        if column is None and len(ragged) > 1:
            example = f"pack_sequences({length}, {ragged[0]!r})"
            raise DataError(f"pack_sequences({length}) takes one of {', '.join(ragged)}: choose one, as {example}")
        column = column or (ragged[0] if ragged else "")
        read = partial(self.read_column, column)
        return PackedSequences(self.lengths(column), read, length, f"{self.identity}, {column!r}")

    def __getstate__(self) -> Any:
        # A worker maps the files itself.
        return {name: getattr(self, name) for name in (*_SETTINGS, "identity")}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        self._open()
        if self.identity != state["identity"]:
            problem = f"{redact_credentials(self._folders[0])} holds other samples than when it was opened"
            raise DataError(f"{problem}: {self.identity}, before {state['identity']}; open it again")


def open_packed_source(packed: Packed, data: Any, ids: np.ndarray | None, collate: Collate | None, seed: int) -> Source:
    """Open `packed` as a source that gathers where it can. `data`: `packed` itself or torch's Subset of it, of the samples `ids`."""
    if collate is None and type(packed) is Packed and packed.can_gather:
        source: Source = _PackedSource(packed, ids)
    else:
        source = SampleSource(data, collate=collate, padding_collate=packed.packed_collate, seed=seed)
    source.identity, source.lengths = packed.identity, None if packed.bucket is None else packed.lengths(packed.bucket)
    if ids is None:
        source.lanes, source.files, source.window = packed.lanes, packed.files, packed.window
        return source
    digest = hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()
    source.identity += f", {len(ids):,} samples of it ({digest})"
    source.lengths = None if source.lengths is None else source.lengths[ids]
    return source


class _PackedSource(GatherSource):
    def __init__(self, data: Packed, rows: np.ndarray | None) -> None:
        super().__init__(data.gather_columns, data.build_batch, len(data), rows)
        self._data = data
        self.prefetch_steps = _PREFETCH_STEPS if data.is_remote else 0
        if not data.is_remote and not any(column.ragged for column in data.columns):
            self.sample_bytes = float(sum(column.item_bytes for column in data.columns))

    def prefetch(self, ids: np.ndarray) -> None:
        self._data.prefetch(self.map_ids(ids))


def describe_columns(manifest: Manifest) -> str:
    return ", ".join(f"{column.name}: {column}" for column in manifest.columns)


def _collate_padded(samples: list[Any], value: float) -> Any:
    return collate_as_torch(_pad_samples(samples, value))


def _pad_samples(samples: list[Any], value: float) -> list[Any]:
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
