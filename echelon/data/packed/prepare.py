"""Preprocessing that is done once, stored, used again, and done anew when its function or its data change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.data.error_text import type_name
from echelon.data.packed.fingerprint import fingerprint
from echelon.data.packed.from_samples import SamplePackingSource, open_dataset
from echelon.data.packed.pack import choose_shard_count, pack
from echelon.data.packed.reader import Packed

#: Files at least: so many ranks can make them together.
_MIN_SHARDS = 16


def prepare_dataset(
    data: Any,
    folder: str | Path,
    transform: Callable[[Any], Any] | None = None,
    *,
    shards: int | None = None,
    processes: int = 1,
) -> Packed:
    """`data` with `transform` applied to each sample, packed in `folder`.

    Call it where a job makes its data: ranks that call it together share the work, each sample is made by one of them, and a later
    run with the same function and the same data finds it done. What counts as the same is fingerprint.py's; some samples are looked at
    as well. A data set in `folder` that this function did not make is left alone, with an error. `shards`: how many files (None: 16,
    more where they would be larger than 128 MB, for a rank holds the one that it makes in memory).
    """
    data = open_dataset(data)
    # Before anything is read of them, which may change what they hold.
    provenance = {
        "source": type_name(data),
        "kind": "prepared",
        "data": fingerprint(data),
        "transform": fingerprint(transform),
    }
    source = SamplePackingSource(_TransformedDataset(data, transform), provenance)
    pack(
        source,
        Path(folder),
        shards=min(shards or max(_MIN_SHARDS, choose_shard_count(source)), source.samples),
        processes=processes,
        overwrite="prepared",
    )
    return Packed(folder)


class _TransformedDataset:
    def __init__(self, data: Any, transform: Callable[[Any], Any] | None) -> None:
        self._data, self._transform = data, transform

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        sample = self._data[index]
        return sample if self._transform is None else self._transform(sample)
