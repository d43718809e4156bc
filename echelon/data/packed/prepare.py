"""Preprocessing that is done once, stored, used again, and done anew when its function or its data change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.data.error_text import kind_of
from echelon.data.packed.fingerprint import fingerprint
from echelon.data.packed.from_samples import Values, numbered
from echelon.data.packed.pack import count_of, pack
from echelon.data.packed.reader import Packed

#: Files at least: so many ranks can make them together.
_SHARDS = 16


def prepared(
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
    data = numbered(data)
    # Before anything is read of them, which may change what they hold.
    told = {"source": kind_of(data), "kind": "prepared", "data": fingerprint(data), "transform": fingerprint(transform)}
    origin = Values(_Mapped(data, transform), told)
    pack(
        origin,
        Path(folder),
        shards=min(shards or max(_SHARDS, count_of(origin)), origin.samples),
        processes=processes,
        overwrite="prepared",
    )
    return Packed(folder)


class _Mapped:
    def __init__(self, data: Any, transform: Callable[[Any], Any] | None) -> None:
        self._data, self._transform = data, transform

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> Any:
        sample = self._data[number]
        return sample if self._transform is None else self._transform(sample)
