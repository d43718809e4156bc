"""A bounded log of the ids of the last writes, so that "what changed since" need not scan a table, unless the log is too short."""

from __future__ import annotations

from collections import deque

import numpy as np

MIN_CAPACITY = 65536  # numbers (of 8 bytes) that are kept at least; beyond, as many as a quarter of the table's rows
MAX_LOGGED_SHARDS = 4096  # with more shards than this a log number for each of them is more than the ids themselves
_ARRAY_OVERHEAD = 16  # what an array takes besides its numbers, in numbers


class WriteLog:
    """The ids of the last writes, with the log number that each shard had then."""

    def __init__(self, num_shards: int) -> None:
        #: Ids of one write, or of several small ones; the log numbers of the last of them.
        self._entries: deque[tuple[list[np.ndarray], np.ndarray]] = deque()
        self._newest_id_count = self._size = 0  # ids of the newest entry, and numbers in sum
        #: Writes of each shard after this log number are all here.
        self._complete_since = np.full(num_shards, np.iinfo(np.int64).min, np.int64)

    def add(self, ids: np.ndarray, lsn: np.ndarray, row_count: int) -> None:
        """Log a write to a table of `row_count` rows."""
        if not len(ids):
            return
        self._size += len(ids) + _ARRAY_OVERHEAD
        if self._entries and self._newest_id_count < len(lsn):
            # Log numbers of its own would be more than the ids of a small write, and most of its work.
            id_arrays, last_lsn = self._entries[-1]
            id_arrays.append(ids.copy())
            last_lsn[:] = lsn
            self._newest_id_count += len(ids)
            return
        self._entries.append(([ids.copy()], lsn.copy()))
        self._newest_id_count = len(ids)
        self._size += len(lsn)
        capacity = max(MIN_CAPACITY, row_count // 4)
        if self._size > capacity + capacity // 4:
            # Many at a time: dropping one with each write costs more than keeping it.
            while self._size > capacity:
                id_arrays, last_lsn = self._entries.popleft()
                self._size -= sum(len(some) + _ARRAY_OVERHEAD for some in id_arrays) + len(last_lsn)
                np.maximum(self._complete_since, last_lsn, out=self._complete_since)

    def reset_shard(self, shard: int, lsn: int) -> None:
        """Rows of a shard came from elsewhere, written up to this log number."""
        self._complete_since[shard] = max(self._complete_since[shard], lsn)

    def ids_since(self, shards: np.ndarray, lsns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether the log reaches back to each log number; ids among which are all that were written to those shards since."""
        is_complete = lsns >= self._complete_since[shards]
        shards, lsns = shards[is_complete], lsns[is_complete]
        id_arrays = [np.empty(0, np.int64)]
        for entry_ids, last_lsn in reversed(self._entries):
            if not (last_lsn[shards] > lsns).any():
                break
            id_arrays += entry_ids
        return is_complete, np.unique(np.concatenate(id_arrays))
