"""An origin in random order: what is sorted by class would give batches and files of one class each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.data.packed.packing_source import Origin
from echelon.data.shuffle import Keyed
from echelon.errors import DataError


class Mixed(Origin):
    """The rows of another origin in the random order of `seed`, each read by itself."""

    def __init__(self, origin: Origin, seed: int) -> None:
        if not origin.by_row:
            raise DataError(
                f"--shuffle: rows of a {type(origin).__name__.lower().removesuffix('s')} are read many at a time, and one by one it would "
                "take days; shuffle the file itself before it is packed"
            )
        self._origin, self._seed = origin, seed
        self.columns, self.sample = origin.columns, origin.sample
        self.provenance = {**origin.provenance, "shuffled": f"seed {seed}"}

    def prepare(self) -> None:
        origin = self._origin
        origin.prepare()
        self.samples, self.row_bytes, self.remarks = origin.samples, origin.row_bytes, origin.remarks

    @property
    def identity(self) -> str:
        return self._identity(self._origin.identity)

    def read(self, start: int, stop: int) -> Sequence[Any]:
        order = Keyed(self.samples, self._seed).at(np.arange(start, stop)).tolist()
        rows = [self._origin.read(number, number + 1) for number in order]
        return [
            [part for each in parts for part in each] if column.ragged else np.concatenate(parts)
            for column, parts in zip(self.columns, zip(*rows, strict=True), strict=True)
        ]
