"""What can be packed: rows by number, in columns. One file beside this one for each kind of source."""

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
    """A source of `samples` rows. It is handed to several processes, each of which reads other rows."""

    samples: int
    columns: tuple[Column, ...]
    #: How the columns make up a sample (tree.py).
    sample: Any
    #: Where it comes from, in words, for the manifest. Two packings go on from each other only if this is equal.
    provenance: Mapping[str, str]
    #: What else there is to say of it once it was read.
    remarks: Mapping[str, str] = MappingProxyType({})
    #: Bytes of one row, about: decides how many make a shard.
    row_bytes: float
    #: Whether one row can be read without many others.
    has_random_access: bool = True

    def prepare(self) -> None:
        """What has to be done before the number of samples is known or a row is read. Not called where all is packed already."""
        return

    def finish(self) -> None:
        """Called when all is packed: what was kept for that may go."""
        return

    @abstractmethod
    def read(self, start: int, stop: int) -> Sequence[Any]:
        """For each column the rows `start` to `stop`: one array, or a list of arrays where the column is ragged."""

    @property
    def identity(self) -> str:
        """A short text that changes when the source does."""
        return self._digest_identity(self.samples, self.columns, json.dumps(self.sample))

    def _digest_identity(self, *parts: object) -> str:
        texts = [*map(str, parts), json.dumps(dict(self.provenance))]
        return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


def digest_file_stats(paths: Iterable[Path]) -> str:
    """Files by name, size and time of change, as one short text."""
    hasher = hashlib.blake2b(digest_size=16)
    for path in paths:
        stat = path.stat()
        hasher.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return hasher.hexdigest()
