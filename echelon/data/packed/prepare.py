"""Preprocesses a data set once and stores the result, again when its function or its data change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.data.error_text import type_name
from echelon.data.packed.fingerprint import fingerprint
from echelon.data.packed.from_samples import SamplePackingSource, open_dataset
from echelon.data.packed.pack import choose_shard_count, pack
from echelon.data.packed.reader import Packed

#: At least this many files, so that as many ranks can make them together.
_MIN_SHARDS = 16


def prepare_dataset(
    data: Any, folder: str | Path, transform: Callable[[Any], Any] | None = None, *, shards: int | None = None, processes: int = 1
) -> Packed:  # fmt: skip
    """Pack `data` into `folder` with `transform` applied to each sample, unless that is done already.

    Call it where a job makes its data: ranks that call it together share the work, and a later run with the same function and data uses
    the result. fingerprint.py decides what counts as the same; a few samples are compared as well. A data set in `folder` that this
    function did not make is an error. `shards`: number of files (None: 16, or more to stay below 128 MB each; a rank holds the one that it
    makes in memory).
    """
    data = open_dataset(data)
    # Before anything is read, which may change what the objects hold.
    provenance = {"source": type_name(data), "kind": "prepared"}
    provenance |= {"data": fingerprint(data), "transform": fingerprint(transform)}
    source = SamplePackingSource(_TransformedDataset(data, transform), provenance)
    shard_count = min(shards or max(_MIN_SHARDS, choose_shard_count(source)), source.samples)
    pack(source, Path(folder), shards=shard_count, processes=processes, overwrite="prepared")
    return Packed(folder)


class _TransformedDataset:
    def __init__(self, data: Any, transform: Callable[[Any], Any] | None) -> None:
        self._data, self._transform = data, transform

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        sample = self._data[index]
        return sample if self._transform is None else self._transform(sample)
