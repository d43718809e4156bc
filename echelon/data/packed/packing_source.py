"""The interface of what can be packed: rows by number, in columns. The from_*.py files implement it for each kind of data."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from echelon.data.packed.manifest import Column
from echelon.data.shuffle import FeistelPermutation
from echelon.errors import DataError

#: Called now and then with how much is done, and how much there is to do.
ProgressCallback = Callable[[int, int], None]


class PackingSource(ABC):
    """A source of `samples` rows. Several processes get it, and each reads other rows."""

    samples: int
    columns: tuple[Column, ...]
    #: How the columns make up a sample (sample_schema.py).
    sample: Any
    #: Where the data comes from, for the manifest. A packing is continued only where this is equal.
    provenance: Mapping[str, str]
    #: Facts for the manifest that are known only after reading.
    remarks: Mapping[str, str] = MappingProxyType({})
    #: Approximate bytes of a row, which decide how many rows make a shard.
    row_bytes: float
    #: Whether one row can be read without reading many others.
    has_random_access: bool = True

    def prepare(self) -> None:
        """Do what is needed before rows can be counted and read. Not called where everything is packed already."""
        return

    def finish(self) -> None:
        return

    @abstractmethod
    def read(self, start: int, stop: int) -> Sequence[Any]:
        """Read rows `start` to `stop`: for each column an array, or a list of arrays where the column is ragged."""

    @property
    def identity(self) -> str:
        """A digest that changes when the source does."""
        return self._digest_identity(self.samples, self.columns, json.dumps(self.sample))

    def _digest_identity(self, *parts: object) -> str:
        texts = [*map(str, parts), json.dumps(dict(self.provenance))]
        return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


def digest_file_stats(paths: Iterable[Path]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for path in paths:
        stat = path.stat()
        hasher.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return hasher.hexdigest()


class ShuffledPackingSource(PackingSource):
    """The rows of another source in the random order of `seed`, read one by one: data sorted by class would give shards of one class."""

    def __init__(self, source: PackingSource, seed: int) -> None:
        if not source.has_random_access:
            problem = "rows of a table are read many at a time, and one by one would take days"
            raise DataError(f"--shuffle: {problem}; shuffle the file itself before packing")
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
