"""What each worker has had applied, per shard: its last push (each counts once) and its clock (who may run how far ahead)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from echelon.server.protocol.shard_sets import some

#: The clock of a worker that a shard does not count yet.
ABSENT = -1
FAR = np.iinfo(np.int64).max


class Windows:
    """Rows by (worker, incarnation), columns by shard. Kept for workers that left too, for a while: a late resend is told from a new push."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.slots: dict[tuple[str, int], int] = {}
        self._free: list[int] = []
        #: The furthest clock of workers of which nothing else is known any more.
        self.reached = np.zeros(shards, np.int64)
        self.last = np.zeros((4, shards), np.int64)
        self.clock = np.full((4, shards), ABSENT, np.int64)
        #: The last push that was counted and not applied.
        self.void = np.zeros((4, shards), np.int64)
        #: Shards that went back to a checkpoint while workers went on: of these a worker's first push `since` may leave a gap, and
        #: its clock does not count before.
        self.restored = np.zeros(shards, bool)
        self.since = np.zeros((4, shards), bool)

    def slot(self, worker: str, incarnation: int) -> int:
        """The row of a worker, made if it is new."""
        key = (worker, incarnation)
        found = self.slots.get(key)
        if found is None:
            found = self.slots[key] = self._free.pop() if self._free else len(self.slots)
            if found == len(self.last):
                self.last = np.concatenate([self.last, np.zeros_like(self.last)])
                self.clock = np.concatenate([self.clock, np.full_like(self.clock, ABSENT)])
                self.void = np.concatenate([self.void, np.zeros_like(self.void)])
                self.since = np.concatenate([self.since, np.zeros_like(self.since)])
        return found

    def floor(self, live: list[int]) -> np.ndarray:
        """Per shard the least clock of these rows; FAR where it counts none of them."""
        clocks = self.clock[live]
        if some(self.restored):
            clocks[self.restored & ~self.since[live]] = ABSENT
        # As an unsigned number ABSENT is beyond FAR.
        return clocks.view(np.uint64).min(axis=0, initial=FAR).view(np.int64)

    def furthest(self, shards: np.ndarray) -> np.ndarray:
        """Of these shards, the furthest clock that any worker ever had."""
        return np.maximum(self.clock[:, shards].max(axis=0), self.reached[shards])

    def of(self, over: Callable[[int], bool]) -> list[int]:
        """The rows of lives that are over."""
        return [slot for (_, life), slot in self.slots.items() if over(life)]

    def let_go(self, over: Callable[[int], bool], at: Any) -> None:
        """Know nothing any more of lives that are over, but how far they got, on these shards."""
        gone = self.of(over)
        if not gone:
            return
        self.reached[at] = np.maximum(self.reached[at], self.clock[gone][:, at].max(axis=0))
        for slot in gone:
            self.last[slot, at], self.clock[slot, at] = 0, ABSENT
            self.void[slot, at], self.since[slot, at] = 0, False
        empty = {slot for slot in gone if not self.last[slot].any() and (self.clock[slot] == ABSENT).all()}
        self.slots = {key: slot for key, slot in self.slots.items() if slot not in empty}
        for slot in sorted(empty):
            self.void[slot], self.since[slot] = 0, False
            self._free.append(slot)

    def column(self, shard: int) -> list[list[Any]]:
        """All that is known of one shard, as JSON, in one order everywhere."""
        return [
            [
                worker,
                incarnation,
                int(self.last[slot, shard]),
                int(self.clock[slot, shard]),
                int(self.void[slot, shard]),
                bool(self.since[slot, shard]),
            ]
            for (worker, incarnation), slot in sorted(self.slots.items())
            if self.last[slot, shard] or self.clock[slot, shard] != ABSENT
        ]

    def install(self, shard: int, column: list[list[Any]], *, restored: bool, reached: int) -> None:
        """Replace what is known of one shard."""
        self.forget(shard)
        self.restored[shard], self.reached[shard] = restored, reached
        for worker, incarnation, last, clock, void, since in column:
            slot = self.slot(str(worker), int(incarnation))
            self.last[slot, shard], self.clock[slot, shard] = last, clock
            self.void[slot, shard], self.since[slot, shard] = void, since

    def restore(self, shard: int) -> None:
        """A shard went back to a checkpoint while workers went on."""
        self.restored[shard] = True
        self.since[:, shard] = False

    def forget(self, shard: int) -> None:
        """Nothing is known of one shard."""
        self.last[:, shard], self.clock[:, shard] = 0, ABSENT
        self.void[:, shard], self.since[:, shard] = 0, False
        self.restored[shard], self.reached[shard] = False, 0
