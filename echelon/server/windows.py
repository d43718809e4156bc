"""What each worker has had applied, per shard: its last push (each counts once) and its clock (who may run how far ahead)."""

from __future__ import annotations

from typing import Any

import numpy as np

#: The clock of a worker that a shard does not count yet.
ABSENT = -1
FAR = np.iinfo(np.int64).max


class Windows:
    """Rows by (worker, incarnation), columns by shard. Kept for workers that left too: a late resend is still told from a new push."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.slots: dict[tuple[str, int], int] = {}
        self.last = np.zeros((4, shards), np.int64)
        self.clock = np.full((4, shards), ABSENT, np.int64)
        #: Where a checkpoint put the last push back: the next one may leave a gap, once.
        self.loose = np.zeros((4, shards), bool)

    def slot(self, worker: str, incarnation: int) -> int:
        """The row of a worker, made if it is new."""
        key = (worker, incarnation)
        found = self.slots.get(key)
        if found is None:
            found = self.slots[key] = len(self.slots)
            if found == len(self.last):
                self.last = np.concatenate([self.last, np.zeros_like(self.last)])
                self.clock = np.concatenate([self.clock, np.full_like(self.clock, ABSENT)])
                self.loose = np.concatenate([self.loose, np.zeros_like(self.loose)])
        return found

    def floor(self, live: list[int]) -> np.ndarray:
        """Per shard the least clock of these rows; FAR where it counts none of them."""
        clocks = self.clock[live]
        return np.where(clocks == ABSENT, FAR, clocks).min(axis=0, initial=FAR)

    def column(self, shard: int) -> list[list[Any]]:
        """All that is known of one shard, as JSON, in one order everywhere."""
        return [
            [
                worker,
                incarnation,
                int(self.last[slot, shard]),
                int(self.clock[slot, shard]),
                bool(self.loose[slot, shard]),
            ]
            for (worker, incarnation), slot in sorted(self.slots.items())
            if self.last[slot, shard] or self.clock[slot, shard] != ABSENT
        ]

    def install(self, shard: int, column: list[list[Any]]) -> None:
        """Replace what is known of one shard."""
        self.forget(shard)
        for worker, incarnation, last, clock, loose in column:
            slot = self.slot(str(worker), int(incarnation))
            self.last[slot, shard], self.clock[slot, shard], self.loose[slot, shard] = last, clock, loose

    def forget(self, shard: int) -> None:
        """Nothing is known of one shard."""
        self.last[:, shard], self.clock[:, shard], self.loose[:, shard] = 0, ABSENT, False
