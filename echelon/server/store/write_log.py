"""Which ids were written lately, so that "what changed since" need not walk a table: a bounded log of the last writes.

It is never wrong, only short: where it does not reach back far enough it says so, and the table is walked.
"""

from __future__ import annotations

from collections import deque

import numpy as np

#: Numbers (of 8 bytes) that are kept at least; beyond, as many as a quarter of the table's rows.
LEAST = 65536
#: With more shards than this a log number for each of them is more than the ids themselves.
MOST_SHARDS = 4096
#: What an array takes besides its numbers, in numbers.
_OBJECT = 16


class Recent:
    """The ids of the last writes, with the log number that each shard had then."""

    def __init__(self, shards: int) -> None:
        #: Ids of one write, or of several small ones; log numbers at the last of them, which are as many as they need to be for all.
        self._entries: deque[tuple[list[np.ndarray], np.ndarray]] = deque()
        #: Ids of the newest entry, and numbers in sum.
        self._newest = self._size = 0
        #: Writes of each shard after this log number are all here.
        self._whole = np.full(shards, np.iinfo(np.int64).min, np.int64)

    def add(self, ids: np.ndarray, lsn: np.ndarray, rows: int) -> None:
        """A write to ids of a table that has so many rows."""
        if not len(ids):
            return
        self._size += len(ids) + _OBJECT
        if self._entries and self._newest < len(lsn):
            # Log numbers of their own would be more than the ids of a small write, and most of its work.
            parts, last = self._entries[-1]
            parts.append(ids.copy())
            last[:] = lsn
            self._newest += len(ids)
            return
        self._entries.append(([ids.copy()], lsn.copy()))
        self._newest = len(ids)
        self._size += len(lsn)
        most = max(LEAST, rows // 4)
        if self._size > most + most // 4:
            # Many at a time: one with each write costs more than to keep what it wrote.
            while self._size > most:
                parts, last = self._entries.popleft()
                self._size -= sum(len(part) + _OBJECT for part in parts) + len(last)
                np.maximum(self._whole, last, out=self._whole)

    def replaced(self, shard: int, lsn: int) -> None:
        """Rows of a shard came from elsewhere, written up to this log number."""
        self._whole[shard] = max(self._whole[shard], lsn)

    def since(self, shards: np.ndarray, lsns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether the log reaches back to each log number; ids among which are all that were written to those shards since."""
        whole = lsns >= self._whole[shards]
        shards, lsns = shards[whole], lsns[whole]
        found = []
        for parts, last in reversed(self._entries):
            if not (last[shards] > lsns).any():
                break
            found += parts
        return whole, np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
