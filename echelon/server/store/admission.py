"""Ids that were pushed to, but not often enough for a row (`Table.admit`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.specs import Init, Rule, Table
from echelon.server.store.sparse_table import SparseTable


class AdmissionSplit(NamedTuple):
    """A push split by admission. `missing`: the new rows per shard, of the table and of the counts."""

    is_waiting: np.ndarray
    is_admitted: np.ndarray
    has_count: np.ndarray
    missing: tuple[np.ndarray, np.ndarray]


class AdmissionCounts(SparseTable):
    """How often each waiting id was pushed to: a table of one number per id."""

    def __init__(self, spec: Table, *, num_shards: int, address_space: int) -> None:
        self._admit = spec.admit
        rule, init = Rule(kind="sgd"), Init(kind="zeros")
        counts = Table(name=spec.name, dim=1, rule=rule, init=init, dtype="f8", stored="f8")
        super().__init__(counts, num_shards=num_shards, address_space=address_space, spill=None, has_write_log=False)

    def split(self, ids: np.ndarray, has_row: np.ndarray) -> AdmissionSplit:
        """Which of the ids without a row go on waiting, and which get one."""
        count_rows = self.find(ids)[0]
        has_count = count_rows != 0
        counts = self.read_column(count_rows, 2).view(np.float64) * has_count
        is_admitted = ~has_row & (counts + 1 >= self._admit)
        is_waiting = ~has_row & ~is_admitted
        shards = shard_of(ids, self.num_shards)
        new_rows = np.bincount(shards[is_admitted], minlength=self.num_shards)
        new_counts = np.bincount(shards[is_waiting & ~has_count], minlength=self.num_shards)
        return AdmissionSplit(is_waiting, is_admitted, has_count, (new_rows, new_counts))

    def add(self, ids: np.ndarray, split: AdmissionSplit, lsn: np.ndarray) -> None:
        """Count a push; there is room."""
        self.remove(ids[split.is_admitted & split.has_count])
        waiting_ids = ids[split.is_waiting]
        # A gradient of -1 at a rate of 1 adds one.
        self.write(waiting_ids, self.find(waiting_ids)[0], np.full((len(waiting_ids), 1), -1.0), lsn, lr=1.0)
