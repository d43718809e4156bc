"""Shuffles a packing source: data sorted by class would give shards of one class each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.data.packed.packing_source import PackingSource
from echelon.data.shuffle import FeistelPermutation
from echelon.errors import DataError


class ShuffledPackingSource(PackingSource):
    """The rows of another source in the random order of `seed`, read one by one."""

    def __init__(self, source: PackingSource, seed: int) -> None:
        if not source.has_random_access:
            raise DataError(
                "--shuffle: rows of a table are read many at a time, one by one would take days; shuffle the file itself before packing"
            )
        self._source, self._seed = source, seed
        self.columns, self.sample = source.columns, source.sample
        self.provenance = {**source.provenance, "shuffled": f"seed {seed}"}

    def prepare(self) -> None:
        source = self._source
        source.prepare()
        self.samples, self.row_bytes, self.remarks = source.samples, source.row_bytes, source.remarks

    @property
    def identity(self) -> str:
        return self._digest_identity(self._source.identity)

    def read(self, start: int, stop: int) -> Sequence[Any]:
        order = FeistelPermutation(self.samples, self._seed).at(np.arange(start, stop)).tolist()
        rows = [self._source.read(index, index + 1) for index in order]
        return [
            [part for row_parts in parts for part in row_parts] if column.ragged else np.concatenate(parts)
            for column, parts in zip(self.columns, zip(*rows, strict=True), strict=True)
        ]
