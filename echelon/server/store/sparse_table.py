"""A sparse table in memory: rows by id, created when first written, looked up in a compiled index per shard.

Rows lie in one reserved range of addresses (memory is taken as they are created), or in a file that the page cache pages in and out
(`spill`). One thread at a time.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.hashing import shard_bits, shard_of
from echelon.server.protocol.specs import StoreError, StoreFull, Table
from echelon.server.store import row_layout
from echelon.server.store.shard_index import ShardIndex, reserve_memory
from echelon.server.store.write_log import MAX_LOGGED_SHARDS, WriteLog

#: From here on a table uses huge pages: lookups miss the TLB too. A small table would take two of them.
_MIN_HUGE_PAGE_BYTES = 16 << 20
#: A spill file grows in allocated chunks of this size, so that a full disk is an error and not a signal.
_SPILL_CHUNK_BYTES = 64 << 20
#: Reads whose row numbers are cached for the pushes that follow: of as many workers, and steps ahead.
_MAX_CACHED_READS = 64
#: Ids of these reads in total (8 bytes each, not counted in `bytes`); a read of more than an eighth of that is not cached.
_MAX_CACHED_READ_IDS = 1 << 19
#: A rule's numbers in the table's arithmetic and in float64, and its switches.
RuleArrays = tuple[np.ndarray, np.ndarray, np.ndarray]


class SparseTable:
    """The rows of one table. Parameters `missing`: new rows per shard."""

    def __init__(
        self, spec: Table, *, num_shards: int, address_space: int, spill: Path | None, has_write_log: bool = True
    ) -> None:
        self.spec, self.num_shards, self.layout = spec, num_shards, row_layout.make_row_layout(spec)
        #: Weights are stored as they are computed with, and rows move only when they are pushed to.
        self.is_native = self.layout.stored_kind == k.NATIVE and not spec.rule.every
        self._kernel_layout = np.array(self.layout[:7], np.int64)
        self._shard_shift = np.uint64(64 - shard_bits(num_shards))
        self.words = self.layout.words
        self.max_rows = min(max(address_space // self.layout.stride, 1024), 2**32 - 2)
        self._spill_file: int | None = None
        self._spill_bytes = 0
        nbytes = (self.max_rows + 1) * self.layout.stride
        if spill is None:
            self._row_memory = reserve_memory(nbytes, f"table {spec.name}")
        else:
            self._spill_file, self._row_memory = _open_spill_file(spill, nbytes, spec.name)
        self.int64_view = np.frombuffer(self._row_memory, np.int64)
        self.float_view = self.int64_view.view(spec.dtype)
        narrow_views = (self.int64_view.view(dtype) for dtype in (np.float32, np.int16, np.int8))
        self._views = (self.int64_view, self.float_view, *narrow_views)
        #: The first row of the free list, the first row never used, the length of the free list. Row 0 is scratch.
        self.row_allocator = np.array([0, 1, 0], np.int64)
        self.index = ShardIndex(num_shards, self.max_rows, spec.name)
        self.rows_per_shard = self.index.rows_per_shard
        self.reserve_spill(np.zeros(num_shards, np.int64))
        self._uses_huge_pages = False
        self._init = row_layout.encode_init(spec)
        self._dtype = np.dtype(spec.dtype)
        self._write_count = 0
        self._write_log = WriteLog(num_shards) if has_write_log and num_shards <= MAX_LOGGED_SHARDS else None
        self._find_cache: tuple[int, np.ndarray, tuple[np.ndarray, np.ndarray, int]] | None = None
        #: Row numbers of the last reads, by number of ids, first and last id: mostly a push of the same ids follows. The kernel checks
        #: each row's id, so a push of other ids only loses the gain.
        self._read_cache: dict[tuple[int, int, int], np.ndarray] = {}
        self._rule_cache: tuple[object, RuleArrays] | None = None
        self._absent_buffer = np.empty(0, np.int64)
        self._batch_buffer = np.empty((2, 2 * k.LOOKUP_BATCH), np.int64)
        self._nearest_draws = np.full(spec.dim, 1 << 15, np.uint16)
        self._rounding_draws = np.zeros(spec.dim, np.uint16)
        self._scratch = np.zeros(2 * spec.dim + 2, self._dtype)

    # Room

    @property
    def count(self) -> int:
        return int(self.rows_per_shard.sum())

    @property
    def spilled_bytes(self) -> int:
        """Bytes of rows in a file."""
        return 0 if self._spill_file is None else int(self.row_allocator[1]) * self.layout.stride

    @property
    def bytes(self) -> int:
        """Memory in use: rows (free ones too) and index, without what is spilled."""
        return int(self.row_allocator[1]) * self.layout.stride - self.spilled_bytes + self.index.bytes

    def _last_row(self, missing: np.ndarray) -> int:
        """Rows in use or free, once `missing` were added; free rows are used first."""
        _, first_unused, free = self.row_allocator.tolist()
        return first_unused + max(0, int(missing.sum()) - free)

    def room_needed(self, missing: np.ndarray) -> tuple[int, bool]:
        """Memory that `missing` more rows would take, and whether the reserved addresses suffice."""
        last_row, (index_bytes, fits) = self._last_row(missing), self.index.room_needed(missing)
        new_rows = 0 if self._spill_file is not None else last_row - int(self.row_allocator[1])
        return index_bytes + new_rows * self.layout.stride, fits and last_row <= self.max_rows + 1

    def max_bytes_needed(self, new_rows: int) -> int | None:
        """An upper bound for this many new rows, whatever their shards; None: there may be no room for them."""
        rows, index_bytes = int(self.row_allocator[1]) + new_rows, self.index.max_bytes_needed(new_rows)
        is_spill_reserved = self._spill_file is None or rows * self.layout.stride <= self._spill_bytes
        if index_bytes is None or rows > self.max_rows + 1 or not is_spill_reserved:
            return None
        return new_rows * self.layout.stride + index_bytes

    def reserve_spill(self, missing: np.ndarray) -> None:
        """Grow the spill file, if there is one. Raises StoreFull before anything changes."""
        nbytes, stride = self._last_row(missing) * self.layout.stride, self.layout.stride
        if self._spill_file is None or nbytes <= self._spill_bytes:
            return
        nbytes = min(-(-nbytes // _SPILL_CHUNK_BYTES) * _SPILL_CHUNK_BYTES, (self.max_rows + 1) * stride)
        try:
            os.posix_fallocate(self._spill_file, 0, nbytes)
        except OSError as error:
            raise StoreFull(
                f"table {self.spec.name}: its spill file cannot grow to {nbytes} bytes ({error}); nothing was applied; make room on "
                "that disk, expire old rows, or add servers"
            ) from error
        self._spill_bytes = nbytes

    def grow_index(self, missing: np.ndarray) -> None:
        if not self._uses_huge_pages and self.bytes + self.room_needed(missing)[0] > _MIN_HUGE_PAGE_BYTES:
            self._uses_huge_pages = True
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self.index.memory.madvise(mmap.MADV_HUGEPAGE)
                if self._spill_file is None:
                    self._row_memory.madvise(mmap.MADV_HUGEPAGE)
        self.index.grow(missing)

    # Rows by id

    def as_values(self, ids: np.ndarray, values: Any) -> np.ndarray:
        """One row of the table's dtype for each id; StoreError if they do not fit."""
        array, expected = row_layout.as_kernel_array(values, self._dtype), (len(ids), self.spec.dim)
        if array.shape != expected:
            raise StoreError(f"{self.spec.name}: values of shape {array.shape} for {len(ids)} ids; expected {expected}")
        return array

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """The row of each id (0: none), how many ids per shard have none, and in total."""
        # An entry looks its ids up when it is checked, and again when it is applied.
        cache = self._find_cache
        if cache is not None and cache[0] == self._write_count and np.array_equal(cache[1], ids):
            return cache[2]
        row_numbers, missing = np.zeros(len(ids), np.int64), np.zeros(self.num_shards, np.int64)
        row_args = (self.int64_view, self.words, ids, row_numbers, self._batch_buffer)
        absent = k.find_rows(*self.index.arrays, self._shard_shift, *row_args, missing)
        self._find_cache = (self._write_count, ids.copy(), (row_numbers, missing, absent))
        return row_numbers, missing, absent

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Weights in the table's arithmetic."""
        weights, row_numbers = np.empty((len(ids), self.spec.dim), self._dtype), np.zeros(len(ids), np.int64)
        lookup_args = (*self.index.arrays, self._shard_shift, ids, row_numbers, self._batch_buffer)
        k.read_rows(*lookup_args, self._kernel_layout, *self._views, *self._init, self._nearest_draws, weights)
        if self.is_native and 0 < len(ids) <= _MAX_CACHED_READ_IDS // 8:
            cache, free_ids = self._read_cache, _MAX_CACHED_READ_IDS - len(ids)
            while cache and (len(cache) >= _MAX_CACHED_READS or sum(key[0] for key in cache) > free_ids):
                del cache[next(iter(cache))]
            cache[len(ids), ids.item(0), ids.item(-1)] = row_numbers
        return weights

    def update(
        self, ids: np.ndarray, values: np.ndarray, lsn: np.ndarray, *, lr: float | None, step: int | None
    ) -> np.ndarray:
        """Update the rows of distinct ids in a native table; the positions of ids that have no row."""
        self._write_count += 1
        id_count = len(ids)
        if id_count > len(self._absent_buffer):
            self._absent_buffer = np.empty(2 * id_count, np.int64)
        row_numbers = None
        if id_count and self._read_cache:
            row_numbers = self._read_cache.pop((id_count, ids.item(0), ids.item(-1)), None)
        if row_numbers is None:
            row_numbers = np.zeros(id_count, np.int64)
        rule_key = (lr, step if self.spec.rule.steps == "given" else None)
        if self._rule_cache is None or self._rule_cache[0] != rule_key:
            self._rule_cache = (rule_key, self._rule_arrays(*rule_key))
        lookup_args = (*self.index.arrays, self._shard_shift, ids, row_numbers, self._batch_buffer)
        row_args = (values, lsn, self._kernel_layout, self.int64_view, self.float_view)
        missing = k.update_rows(*lookup_args, *row_args, *self._rule_cache[1], self._scratch, self._absent_buffer)
        if self._write_log is not None:
            self._write_log.add(ids if not missing else ids[row_numbers != 0], lsn, int(self.row_allocator[1]))
        return self._absent_buffer[:missing]

    def _rule_arrays(self, lr: float | None, step: int | None, is_assignment: bool = False) -> RuleArrays:
        params, options = self.encode_rule(lr, step, is_assignment=is_assignment)
        return params.astype(self._dtype), params, options

    def write(
        self,
        ids: np.ndarray,
        row_numbers: np.ndarray,
        values: np.ndarray,
        lsn: np.ndarray,
        *,
        lr: float | None = None,
        step: int | None = None,
        is_assignment: bool = False,
    ) -> None:
        """Update or set the rows of distinct ids, whose `row_numbers` were just found; there is room for new ones."""
        self._write_count += 1
        if self._write_log is not None:
            self._write_log.add(ids, lsn, int(self.row_allocator[1]))
        index_args = (*self.index.arrays, self.rows_per_shard, self._shard_shift, self.row_allocator)
        row_args = (ids, row_numbers, values, lsn, self._kernel_layout, *self._views, *self._init)
        rule_args = (*self._rule_arrays(lr, step, is_assignment), self._scratch)
        k.write_rows(*index_args, *row_args, *rule_args, self._nearest_draws, self._rounding_draws, is_assignment)

    def encode_rule(self, lr: float | None, step: int | None, *, is_assignment: bool) -> tuple[np.ndarray, np.ndarray]:
        """The rule's numbers and switches, as the kernels read them."""
        rule, name, step = self.spec.rule, self.spec.name, 1 if is_assignment else step
        options = row_layout.encode_rule_options(rule, self.layout.count_index, is_sparse=True, step=step, name=name)
        return row_layout.encode_rule_params(rule, lr, self.spec.dim), options

    # Shards

    def rows_of_shard(self, shard: int, *, clear: bool = False) -> np.ndarray:
        """The row numbers of a shard; `clear` frees the rows."""
        row_numbers = np.empty(int(self.rows_per_shard[shard]), np.int64)
        row_args = (self.int64_view, self.words, self.row_allocator, clear, row_numbers)
        row_count = k.list_rows(*self.index.shard_arrays(shard), *row_args)
        assert row_count == len(row_numbers), (self.spec.name, shard, row_count, len(row_numbers))
        if clear:
            self._write_count += 1
            self._read_cache.clear()
            self.index.clear(shard)
        return row_numbers

    def written_since(self, shards: np.ndarray, since_lsns: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Per shard, ids and log numbers of the rows that were written after a log number."""
        is_logged, ids = np.zeros(len(shards), bool), np.empty(0, np.int64)
        if self._write_log is not None:
            is_logged, ids = self._write_log.ids_since(shards, since_lsns)
        row_numbers = self.find(ids)[0]
        ids, row_numbers = ids[row_numbers != 0], row_numbers[row_numbers != 0]
        lsns, id_shards = self.read_column(row_numbers, 1), shard_of(ids, self.num_shards)
        for shard, after_lsn, is_complete in zip(shards.tolist(), since_lsns.tolist(), is_logged, strict=True):
            if is_complete:
                selected = (id_shards == shard) & (lsns > after_lsn)
                yield ids[selected], lsns[selected]
            else:
                written = np.empty((2, int(self.rows_per_shard[shard])), np.int64)
                shard_args = (*self.index.shard_arrays(shard), self.int64_view, self.words)
                row_count = k.list_written_rows(*shard_args, after_lsn, *written)
                yield written[0, :row_count], written[1, :row_count]

    def read_column(self, row_numbers: np.ndarray, column: int) -> np.ndarray:
        """Ids (0) or log numbers (1) of rows."""
        values = np.empty(len(row_numbers), np.int64)
        k.read_column(self.int64_view, self.words, row_numbers, column, values)
        return values

    def export_rows(self, row_numbers: np.ndarray) -> np.ndarray:
        """Copies of whole rows, (rows, words) int64."""
        words = np.empty(len(row_numbers) * self.words, np.int64)
        k.copy_rows(self.int64_view, self.words, row_numbers, words)
        return words.reshape(len(row_numbers), self.words)

    def insert(self, rows: np.ndarray) -> None:
        """Add exported rows of one shard, whose ids are not here; there is room."""
        self._write_count += 1
        if self._write_log is not None and len(rows):
            self._write_log.reset_shard(int(shard_of(rows[:1, 0], self.num_shards)[0]), int(rows[:, 1].max()))
        row_args = (self.int64_view, self.words, self.row_allocator, rows.reshape(-1))
        k.insert_rows(*self.index.arrays, self.rows_per_shard, self._shard_shift, *row_args)

    def remove(self, ids: np.ndarray) -> None:
        """Remove the rows of these ids, where there are any."""
        self._write_count += 1
        self._read_cache.clear()
        row_args = (self.int64_view, self.words, self.row_allocator, ids)
        k.remove_rows(*self.index.arrays, self.rows_per_shard, self._shard_shift, *row_args)

    def close(self) -> None:
        if self._spill_file is not None:
            os.close(self._spill_file)
            self._spill_file = None


def _open_spill_file(folder: Path, nbytes: int, name: str) -> tuple[int, mmap.mmap]:
    """An unnamed file in `folder`, mapped; it is gone when it is closed, however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, path = tempfile.mkstemp(prefix="rows-", dir=folder)
        os.unlink(path)
        os.ftruncate(file, nbytes)
        return file, mmap.mmap(file, nbytes)
    except OSError as error:
        problem = f"cannot create a spill file of {nbytes} bytes in {folder} ({error})"
        raise StoreError(f"table {name}: {problem}; give another spill= or none") from error
