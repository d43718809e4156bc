"""Room for new rows and blocks: the memory limit, reserved addresses, spill files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from echelon.server.protocol.specs import StoreFull
from echelon.server.store.sparse_table import SparseTable

MissingRows = Sequence[tuple[SparseTable, np.ndarray]]  # new rows per shard, of each table


class MemoryLimit:
    """The limit of a store that uses `used_bytes()`. As a context it is suspended."""

    def __init__(self, memory: int | None, spill: Path | None, used_bytes: Callable[[], int]) -> None:
        physical_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.bytes = physical_memory if memory is None else memory
        #: Addresses per table: a replica may have to exceed the limit.
        self.address_space = physical_memory if memory is None else min(4 * memory, max(2 * memory, physical_memory))
        if spill is not None:
            existing = next(folder for folder in (spill, *spill.absolute().parents) if folder.exists())
            self.address_space = shutil.disk_usage(existing).free
        self._spill, self._used_bytes = spill, used_bytes
        self._is_suspended = False
        #: New rows of a table that certainly fit as long as nothing else takes memory.
        self._guaranteed_rows: dict[str, int] = {}

    def __enter__(self) -> None:
        self._is_suspended = True

    def __exit__(self, *error: object) -> None:
        self._is_suspended = False

    def on_memory_taken(self) -> None:
        """Something other than the guaranteed rows takes memory."""
        self._guaranteed_rows.clear()

    def guarantees(self, table: SparseTable, new_rows: int) -> bool:
        """Whether this many new rows certainly fit. Asked for every push, so it is computed for many rows at once."""
        if self._guaranteed_rows.get(table.spec.name, 0) >= new_rows:
            return True
        for rows in (new_rows + (1 << 20), new_rows):
            bytes_needed = table.max_bytes_needed(rows)
            if bytes_needed is not None and self._used_bytes() + bytes_needed <= self.bytes:
                self._guaranteed_rows[table.spec.name] = rows
                return True
        return False

    def reserve(self, missing_rows: MissingRows, block_bytes: int = 0) -> None:
        """Make room for new rows and blocks, or raise StoreFull before anything changes."""
        self.check(missing_rows, block_bytes)
        self.on_memory_taken()
        for table, missing in missing_rows:
            table.reserve_spill(missing)
        for table, missing in missing_rows:
            table.grow_index(missing)

    def check(self, missing_rows: MissingRows, block_bytes: int = 0) -> None:
        """StoreFull if new rows and blocks do not fit."""
        rooms, used = [table.room_needed(missing) for table, missing in missing_rows], self._used_bytes()
        needed = block_bytes + sum(table_bytes for table_bytes, _ in rooms)
        exceeds_limit = not self._is_suspended and needed > 0 and used + needed > self.bytes
        if exceeds_limit or not all(fits for _, fits in rooms):
            rows = ((f"{int(missing.sum())} new rows", table) for table, missing in missing_rows if missing.any())
            needs = ", ".join(f"table {table.spec.name}: {new} of {table.layout.stride} bytes" for new, table in rows)
            spill = "" if self._spill else "give spill=, "
            raise StoreFull(
                f"{needs or 'dense blocks'} need {needed} bytes, and this server holds {used} of at most {self.bytes}; nothing was applied; "
                f"raise memory=, {spill}expire old rows, admit fewer (admit=), store them narrower (stored=) or add servers"
            )
