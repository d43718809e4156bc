"""The index of a table: per shard a hash table from id to row, in one reserved range of addresses."""

from __future__ import annotations

import mmap

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.specs import StoreError

MAX_LOAD = 0.8  # the share of a shard's slots that may be in use before it doubles
_MIN_SLOTS = 16


def reserve_memory(nbytes: int, purpose: str) -> mmap.mmap:
    """Addresses for `nbytes` zero bytes; memory is taken page by page as they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        return mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, ValueError) as error:
        raise StoreError(f"{purpose}: cannot reserve {nbytes} bytes of addresses ({error}); lower memory=") from error


class ShardIndex:
    """The slots of all shards. `arrays` are what kernels take: slots, per shard the first slot and the mask."""

    def __init__(self, num_shards: int, max_rows: int, name: str) -> None:
        initial_slots = _MIN_SLOTS * num_shards
        self._max_slots = max(8 * initial_slots, 6 * max_rows)
        self.memory = reserve_memory(self._max_slots * 8, f"table {name}'s index")
        self._slots = np.frombuffer(self.memory, np.uint64)
        self._starts = np.arange(num_shards, dtype=np.int64) * _MIN_SLOTS
        self._masks = np.full(num_shards, _MIN_SLOTS - 1, np.int64)
        self.arrays = (self._slots, self._starts, self._masks)
        self.rows_per_shard = np.zeros(num_shards, np.int64)
        self._next_slot = self._allocated_slots = initial_slots
        self._free_regions: dict[int, list[int]] = {}

    @property
    def bytes(self) -> int:
        return self._allocated_slots * 8

    def shard_arrays(self, shard: int) -> tuple[np.ndarray, int, int]:
        """`arrays` of one shard."""
        return self._slots, int(self._starts[shard]), int(self._masks[shard])

    def _growth(self, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shards that must grow to take `missing` more rows per shard, and how many slots each then has."""
        target_rows = self.rows_per_shard + missing
        growing = np.flatnonzero(target_rows > MAX_LOAD * (self._masks + 1))
        slot_counts = np.exp2(np.ceil(np.log2(target_rows[growing] / MAX_LOAD + 1))).astype(np.int64)
        return growing, np.maximum(slot_counts, _MIN_SLOTS)

    def room_needed(self, missing: np.ndarray) -> tuple[int, bool]:
        """Memory that `missing` more rows per shard would take, and whether the reserved addresses suffice."""
        growing, slot_counts = self._growth(missing)
        slots = int(slot_counts.sum())
        return 8 * (slots - int((self._masks[growing] + 1).sum())), self._next_slot + slots <= self._max_slots

    def max_bytes_needed(self, new_rows: int) -> int | None:
        """An upper bound for this many new rows, whatever their shards; None: the reserved addresses may not suffice."""
        # A shard that grows has at most twice the slots that MAX_LOAD asks for, and one to round up.
        slots = int(2 * (int(self.rows_per_shard.sum()) + new_rows) / MAX_LOAD) + 2 * len(self._masks)
        return 8 * slots if self._next_slot + slots <= self._max_slots else None

    def grow(self, missing: np.ndarray) -> None:
        for shard, slot_count in zip(*(array.tolist() for array in self._growth(missing)), strict=True):
            slots, start, mask = self.shard_arrays(shard)
            self._allocated_slots += slot_count - (mask + 1)
            new_start = self._allocate(slot_count)
            k.rehash_slots(slots, start, mask, new_start, slot_count - 1)
            self._starts[shard], self._masks[shard] = new_start, slot_count - 1
            self._release(start, mask + 1)

    def clear(self, shard: int) -> None:
        _, start, mask = self.shard_arrays(shard)
        self.rows_per_shard[shard] = 0
        self._allocated_slots += _MIN_SLOTS - (mask + 1)
        self._release(start, mask + 1)
        self._starts[shard], self._masks[shard] = self._allocate(_MIN_SLOTS), _MIN_SLOTS - 1

    def _allocate(self, slots: int) -> int:
        if free_regions := self._free_regions.get(slots):
            return free_regions.pop()
        self._next_slot += slots
        return self._next_slot - slots

    def _release(self, start: int, slots: int) -> None:
        """Zero a region; whole pages go back to the system."""
        page, end = mmap.PAGESIZE // 8, start + slots
        first_page, last_page = -(-start // page) * page, end // page * page
        if last_page > first_page:
            self.memory.madvise(mmap.MADV_DONTNEED, first_page * 8, (last_page - first_page) * 8)
            self._slots[start:first_page] = self._slots[last_page:end] = 0
        else:
            self._slots[start:end] = 0
        self._free_regions.setdefault(slots, []).append(start)
