"""Which ids were written lately, so that "what changed since" need not walk a table: a bounded log of the last writes.

It is never wrong, only short: where it does not reach back far enough it says so, and the table is walked.
"""

from __future__ import annotations

from collections import deque

import numpy as np

#: Numbers (of 8 bytes) that are kept at least; beyond, as many as a quarter of the table's rows.
LEAST = 65536
#: With more shards than this a log number for each of them and each write is more than the ids themselves.
MOST_SHARDS = 4096


class Recent:
    """The ids of the last writes, with the log number that each shard had then."""

    def __init__(self, shards: int) -> None:
        self._entries: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self._size = 0
        #: Writes of each shard after this log number are all here.
        self._whole = np.full(shards, np.iinfo(np.int64).min, np.int64)

    def add(self, ids: np.ndarray, lsn: np.ndarray, rows: int) -> None:
        """A write to ids of a table that has so many rows."""
        if not len(ids):
            return
        self._size += len(ids) + len(lsn)
        self._entries.append((ids.copy(), lsn.copy()))
        while self._size > max(LEAST, rows // 4):
            gone, last = self._entries.popleft()
            self._size -= len(gone) + len(last)
            np.maximum(self._whole, last, out=self._whole)

    def replaced(self, shard: int, lsn: int) -> None:
        """Rows of a shard came from elsewhere, written up to this log number."""
        self._whole[shard] = max(self._whole[shard], lsn)

    def since(self, shards: np.ndarray, lsns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether the log reaches back to each log number; ids among which are all that were written to those shards since."""
        whole = lsns >= self._whole[shards]
        shards, lsns = shards[whole], lsns[whole]
        found = []
        for ids, last in reversed(self._entries):
            if not (last[shards] > lsns).any():
                break
            found.append(ids)
        return whole, np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
