"""The interface of what can be packed: rows by number, in columns. The from_*.py files implement it for each kind of data."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from echelon.data.packed.manifest import Column

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
        """Remove temporary files once everything is packed."""
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
    """Digest the names, sizes and modification times of files."""
    hasher = hashlib.blake2b(digest_size=16)
    for path in paths:
        stat = path.stat()
        hasher.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return hasher.hexdigest()
