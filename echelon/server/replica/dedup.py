"""What each worker has had applied, per shard: its last push, which counts once, and its clock, which bounds staleness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from echelon.server.protocol.shard_sets import any_set

#: The clock of a worker that a shard does not count yet. As an unsigned number it exceeds INFINITE_CLOCK.
NOT_COUNTED = -1
INFINITE_CLOCK = np.iinfo(np.int64).max


class DedupTable:
    """One row per (worker, incarnation), one column per shard. Rows of departed workers stay for a while, to recognize late resends."""

    def __init__(self, num_shards: int) -> None:
        self.slots: dict[tuple[str, int], int] = {}
        self._free_slots: list[int] = []
        self.departed_max_clock = np.zeros(num_shards, np.int64)  # the furthest clock of forgotten workers
        self.last_seq = np.zeros((4, num_shards), np.int64)
        self.clocks = np.full((4, num_shards), NOT_COUNTED, np.int64)
        self.last_noop_seq = np.zeros((4, num_shards), np.int64)  # the last push that was counted but not applied
        #: Shards that went back to a checkpoint while workers went on: a worker's first push there (until `pushed_since_rollback`) may
        #: leave a gap, and its clock does not count before.
        self.is_rolled_back = np.zeros(num_shards, bool)
        self.pushed_since_rollback = np.zeros((4, num_shards), bool)

    def get_slot(self, worker: str, incarnation: int) -> int:
        key = (worker, incarnation)
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots[key] = self._free_slots.pop() if self._free_slots else len(self.slots)
            if slot == len(self.last_seq):
                for name in ("last_seq", "clocks", "last_noop_seq", "pushed_since_rollback"):
                    setattr(self, name, np.concatenate([getattr(self, name)] * 2))
                self._clear(slice(slot, None), slice(None))
        return slot

    def min_clock(self, slots: list[int]) -> np.ndarray:
        """Per shard, the lowest clock of these rows; INFINITE_CLOCK where it counts none of them."""
        clocks = self.clocks[slots]
        if any_set(self.is_rolled_back):
            clocks[self.is_rolled_back & ~self.pushed_since_rollback[slots]] = NOT_COUNTED
        return clocks.view(np.uint64).min(axis=0, initial=INFINITE_CLOCK).view(np.int64)

    def max_clock(self, shards: np.ndarray) -> np.ndarray:
        """Per shard, the furthest clock that any worker ever had."""
        return np.maximum(self.clocks[:, shards].max(axis=0), self.departed_max_clock[shards])

    def expired_slots(self, is_expired: Callable[[int], bool]) -> list[int]:
        return [slot for (_, incarnation), slot in self.slots.items() if is_expired(incarnation)]

    def forget_expired(self, is_expired: Callable[[int], bool], shards: Any) -> None:
        """Clear the rows of expired incarnations on these shards, except for the furthest clock."""
        expired, furthest = self.expired_slots(is_expired), self.departed_max_clock
        for slot in expired:
            furthest[shards] = np.maximum(furthest[shards], self.clocks[slot, shards])
            self._clear(slot, shards)
        empty = {slot for slot in expired if not self.last_seq[slot].any() and (self.clocks[slot] == NOT_COUNTED).all()}
        self.slots = {key: slot for key, slot in self.slots.items() if slot not in empty}
        for slot in sorted(empty):
            self._clear(slot, slice(None))
            self._free_slots.append(slot)

    def _clear(self, slots: Any, shards: Any) -> None:
        self.last_seq[slots, shards], self.clocks[slots, shards] = 0, NOT_COUNTED
        self.last_noop_seq[slots, shards], self.pushed_since_rollback[slots, shards] = 0, False

    def export_shard(self, shard: int) -> list[list[Any]]:
        """The rows of one shard as JSON, in the same order on every replica."""
        columns = (self.last_seq, self.clocks, self.last_noop_seq, self.pushed_since_rollback)
        return [
            [*key, *(column[slot, shard].item() for column in columns)]
            for key, slot in sorted(self.slots.items())
            if self.last_seq[slot, shard] or self.clocks[slot, shard] != NOT_COUNTED
        ]

    def import_shard(self, shard: int, entries: list[list[Any]]) -> None:
        """Replace the rows of one shard by what `export_shard` returned."""
        self.clear_shard(shard)
        for worker, incarnation, last_seq, clock, last_noop_seq, has_pushed in entries:
            slot = self.get_slot(str(worker), int(incarnation))
            self.last_seq[slot, shard], self.clocks[slot, shard] = last_seq, clock
            self.last_noop_seq[slot, shard], self.pushed_since_rollback[slot, shard] = last_noop_seq, has_pushed

    def clear_shard(self, shard: int) -> None:
        self._clear(slice(None), shard)
        self.is_rolled_back[shard], self.departed_max_clock[shard] = False, 0
