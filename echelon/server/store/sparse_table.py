"""A sparse table in memory: rows by id, made when first written, found by a compiled index per shard.

Rows lie in one reserved range of addresses (memory is taken as they are made), or in a file that the system's page cache
pages in and out (`spill`). One thread at a time.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.hashing import hash_name, shard_bits, shard_of
from echelon.server.protocol.specs import DTYPE_BYTES, INIT_KINDS, RULE_KINDS, Init, Rule, StoreError, StoreFull, Table
from echelon.server.store.write_log import MAX_LOGGED_SHARDS, WriteLog

#: Most of a shard's slots that may be in use before it doubles.
MAX_LOAD = 0.8
_MIN_SLOTS = 16
#: Bytes from which on a table has large pages: a lookup in it misses the cache of page addresses too. A small one would take two of them.
_MIN_HUGE_PAGE_BYTES = 16 << 20
#: How much of a spill file is claimed at a time, so that a full disk is an error and not a signal.
_SPILL_CHUNK_BYTES = 64 << 20
_UINT64_MASK = (1 << 64) - 1
#: Reads whose rows are remembered for the pushes that follow them: of as many workers, and of steps ahead.
_MAX_CACHED_READS = 64
#: Ids of these reads in sum (8 bytes each, which are not in `bytes`); a read of more than an eighth of that is not remembered.
_MAX_CACHED_READ_IDS = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseRowLayout:
    """Where things lie in a row, in elements of their own size; `stride` in bytes."""

    stride: int
    stored_kind: int
    dim: int
    weights_offset: int
    scale_offset: int
    state_offset: int
    state_size: int
    count_index: int

    def to_array(self) -> np.ndarray:
        """As the kernels read it."""
        return np.array(
            [
                self.stride // 8,
                self.stored_kind,
                self.dim,
                self.weights_offset,
                self.scale_offset,
                self.state_offset,
                self.state_size,
            ],
            np.int64,
        )


def state_layout(rule: Rule, dim: int) -> tuple[int, int]:
    """How many numbers of state `dim` weights have under a rule, and which of them counts updates (-1: none does)."""
    count_size = 0 if rule.every else {"momentum": 1 if rule.dampening else 0, "adam": 1, "lamb": 1}.get(rule.kind, 0)
    state_size = {"sgd": 0, "rowwise_adagrad": 1, "momentum": dim, "adagrad": dim}.get(rule.kind, 2 * dim)
    return state_size + count_size, state_size if count_size else -1


def make_row_layout(spec: Table) -> SparseRowLayout:
    """id and lsn, the weights, their scale if they are integers, the state; last the mark of rows that all move (`replay`)."""
    dtype_bytes, stored_bytes = DTYPE_BYTES[spec.dtype], DTYPE_BYTES[spec.stored]
    state_size, count_index = state_layout(spec.rule, spec.dim)
    weights_end = 16 + spec.dim * stored_bytes
    scale_offset = 0
    if spec.stored in ("i2", "i1"):
        scale_offset = -(-weights_end // 4)
        weights_end = scale_offset * 4 + 4
    state_offset = -(-weights_end // dtype_bytes)
    stride = -(-(state_offset + state_size) * dtype_bytes // 8) * 8 + 8 * spec.rule.every
    stored_kind = (
        k.NATIVE if spec.stored == spec.dtype else {"f4": k.F4, "f2": k.F2, "i2": k.I2, "i1": k.I1}[spec.stored]
    )
    return SparseRowLayout(
        stride=stride,
        stored_kind=stored_kind,
        dim=spec.dim,
        weights_offset=16 // stored_bytes,
        scale_offset=scale_offset,
        state_offset=state_offset,
        state_size=state_size,
        count_index=count_index,
    )


def extract_weights(spec: Table, rows: np.ndarray) -> list[np.ndarray]:
    """The weights of whole rows (n, words) as they are stored: copies, and the scales of integers."""
    layout = make_row_layout(spec)
    row_bytes = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), layout.stride)
    values = np.ascontiguousarray(row_bytes[:, 16 : 16 + spec.dim * DTYPE_BYTES[spec.stored]]).view(spec.stored)
    if layout.stored_kind not in (k.I2, k.I1):
        return [values]
    scales = np.ascontiguousarray(row_bytes[:, layout.scale_offset * 4 : layout.scale_offset * 4 + 4]).view(np.float32)
    return [values, scales.reshape(-1)]


def encode_rule_params(rule: Rule, lr: float | None, width: int) -> np.ndarray:
    """A rule's numbers, float64, as the kernels read them."""
    rate = rule.lr if lr is None else float(lr)
    is_decoupled = rule.decoupled
    initial = rule.initial if rule.kind in ("adagrad", "rowwise_adagrad") else 0.0
    return np.array(
        [
            rate,
            0.0 if is_decoupled else rule.weight_decay,
            1.0 - rate * rule.weight_decay if is_decoupled else 1.0,
            rule.momentum,
            1.0 - rule.dampening,
            rule.beta1,
            1.0 - rule.beta1,
            rule.beta2,
            1.0 - rule.beta2,
            rule.epsilon,
            initial,
            float(width),
        ]
    )


def required_step(rule: Rule, step: int | None, name: str) -> int:
    """The step that a rule goes by; 0 where each row counts its own."""
    if rule.steps != "given" or rule.kind not in ("adam", "lamb"):
        return 0
    if step is None or step < 1:
        raise StoreError(
            f"{name}: step={step}: its rule corrects bias by the push's step, counted from 1; push with it, or use steps='row'"
        )
    return step


def encode_rule_options(rule: Rule, count_index: int, *, is_sparse: bool, step: int | None, name: str) -> np.ndarray:
    """A rule's choices as the kernels read them."""
    given_step = required_step(rule, step, name)
    return np.array([RULE_KINDS.index(rule.kind), rule.nesterov, is_sparse, count_index, given_step], np.int64)


def derive_seed(name: str, init: Init) -> np.uint64:
    """What a table's first values are drawn from."""
    return np.uint64((hash_name(name) + init.seed * 0x9E3779B97F4A7C15) & _UINT64_MASK)


def encode_init(init: Init) -> tuple[int, np.ndarray]:
    """An initialiser as the kernels read it."""
    return INIT_KINDS.index(init.kind), np.array([0.0 if init.kind == "zeros" else init.value, init.scale])


def reserve_memory(nbytes: int, purpose: str) -> mmap.mmap:
    """Addresses for `nbytes` bytes, zeros; memory is taken page by page as they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{purpose}: {nbytes} bytes of addresses cannot be reserved ({error}); give a smaller memory="
        ) from error
    return memory


class SparseTable:
    """The rows of one table."""

    def __init__(
        self, spec: Table, *, num_shards: int, address_space: int, spill: Path | None, keep_write_log: bool = True
    ) -> None:
        self.spec = spec
        self.num_shards = num_shards
        self.layout = make_row_layout(spec)
        #: Whether weights are stored as they are computed with, and rows move when they are pushed to only.
        self.is_native = self.layout.stored_kind == k.NATIVE and not spec.rule.every
        self._kernel_layout = self.layout.to_array()
        self._shard_shift = np.uint64(64 - shard_bits(num_shards))
        self.words = self.layout.stride // 8
        self.max_rows = min(max(address_space // self.layout.stride, 1024), 2**32 - 2)
        self._spill_file: int | None = None
        nbytes = (self.max_rows + 1) * self.layout.stride
        if spill is None:
            self._row_memory = reserve_memory(nbytes, f"table {spec.name}")
        else:
            self._spill_file, self._row_memory = _open_spill_file(spill, nbytes, spec.name)
        self._spill_bytes = 0
        self._create_views()
        #: The first row of the chain of rows given back, the first never used, the chain's length; row 0 is scratch.
        self.row_allocator = np.array([0, 1, 0], np.int64)
        self._reserve_spill(1)
        initial_slots = _MIN_SLOTS * num_shards
        self._max_slots = max(8 * initial_slots, 6 * self.max_rows)
        self._index_memory = reserve_memory(self._max_slots * 8, f"table {spec.name}'s index")
        self.index = np.frombuffer(self._index_memory, np.uint64)
        self.index_starts = np.arange(num_shards, dtype=np.int64) * _MIN_SLOTS
        self.index_masks = np.full(num_shards, _MIN_SLOTS - 1, np.int64)
        self.rows_per_shard = np.zeros(num_shards, np.int64)
        self._next_slot = initial_slots
        #: Slots that shards have, in sum: asked for at every push of every table.
        self._allocated_slots = initial_slots
        self._uses_huge_pages = False
        self._free_regions: dict[int, list[int]] = {}
        self._init_kind, self._init_params = encode_init(spec.init)
        self._init_seed = derive_seed(spec.name, spec.init)
        self._dtype = np.dtype(spec.dtype)
        self._write_count = 0
        self._write_log = WriteLog(num_shards) if keep_write_log and num_shards <= MAX_LOGGED_SHARDS else None
        self._find_cache: tuple[int, np.ndarray, tuple[np.ndarray, np.ndarray, int]] | None = None
        #: Where the rows of the last reads are, by how many ids, the first and the last: a push of the same ids mostly follows, and need
        #: not look for them. Where others lie between, nothing is lost: of each row that is known it is seen whether it is the id's.
        self._read_cache: dict[tuple[int, int, int], np.ndarray] = {}
        self._rule_cache: tuple[tuple[float | None, int | None], tuple[np.ndarray, np.ndarray, np.ndarray]] | None = (
            None
        )
        self._absent_buffer = np.empty(0, np.int64)
        self._batch_buffer = np.empty((2, 2 * k.LOOKUP_BATCH), np.int64)
        self._nearest_draws = np.full(spec.dim, 1 << 15, np.uint16)
        self._rounding_draws = np.zeros(spec.dim, np.uint16)
        self._scratch = np.zeros(2 * spec.dim + 2, self._dtype)

    def _create_views(self) -> None:
        self.int64_view = np.frombuffer(self._row_memory, np.int64)
        self.float_view = self.int64_view.view(self.spec.dtype)
        self.float32_view = self.int64_view.view(np.float32)
        self.int16_view = self.int64_view.view(np.int16)
        self.int8_view = self.int64_view.view(np.int8)

    # Room

    @property
    def count(self) -> int:
        """How many rows there are."""
        return int(self.rows_per_shard.sum())

    @property
    def spilled_bytes(self) -> int:
        """Bytes of rows in a file."""
        return 0 if self._spill_file is None else int(self.row_allocator[1]) * self.layout.stride

    @property
    def bytes(self) -> int:
        """Memory in use: rows (also those given back, which are used again) and index; what is spilled is not in memory."""
        rows = 0 if self._spill_file is not None else int(self.row_allocator[1]) * self.layout.stride
        return rows + self._allocated_slots * 8

    def bytes_needed(self, missing: np.ndarray) -> int:
        """Bytes that rows not yet there would take, `missing` of them per shard."""
        new_rows = self._rows_to_add(missing)
        growth = self._index_growth(missing)
        index_bytes = int((growth[1] - (self.index_masks[growth[0]] + 1)).sum()) * 8
        return index_bytes + (0 if self._spill_file is not None else new_rows * self.layout.stride)

    def _rows_to_add(self, missing: np.ndarray) -> int:
        """Rows that are not made of ones given back."""
        return max(0, int(missing.sum()) - int(self.row_allocator[2]))

    def _index_growth(self, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shards that must grow to take that many more, and how many slots each then has."""
        target_rows = self.rows_per_shard + missing
        growing_shards = np.flatnonzero(target_rows > MAX_LOAD * (self.index_masks + 1))
        slot_counts = np.exp2(np.ceil(np.log2(target_rows[growing_shards] / MAX_LOAD + 1))).astype(np.int64)
        return growing_shards, np.maximum(slot_counts, _MIN_SLOTS)

    def max_bytes_needed(self, new_rows: int) -> int | None:
        """Bytes that so many new rows take at most, whatever their shards; None: there may be no room for them here."""
        # A shard that grows has at most twice the slots that LOAD asks for, and one to round up.
        slots = int(2 * (self.count + new_rows) / MAX_LOAD) + 2 * self.num_shards
        rows = int(self.row_allocator[1]) + new_rows
        has_room = rows <= self.max_rows + 1 and self._next_slot + slots <= self._max_slots
        is_spill_reserved = self._spill_file is None or rows * self.layout.stride <= self._spill_bytes
        return new_rows * self.layout.stride + 8 * slots if has_room and is_spill_reserved else None

    def has_room_for(self, missing: np.ndarray) -> bool:
        """Whether the reserved addresses take that many more."""
        new_rows = self._rows_to_add(missing)
        return (
            int(self.row_allocator[1]) + new_rows <= self.max_rows + 1
            and self._next_slot + int(self._index_growth(missing)[1].sum()) <= self._max_slots
        )

    def reserve_spill(self, missing: np.ndarray) -> None:
        """Takes what rows not yet there need of the spill file, if that is where they go. Raises StoreFull before anything changes."""
        self._reserve_spill(int(self.row_allocator[1]) + self._rows_to_add(missing))

    def grow_index(self, missing: np.ndarray) -> None:
        """Makes the index large enough; afterwards that many more rows can be made."""
        if not self._uses_huge_pages and self.bytes + self.bytes_needed(missing) > _MIN_HUGE_PAGE_BYTES:
            self._uses_huge_pages = True
            for memory in (self._row_memory, self._index_memory) if self._spill_file is None else (self._index_memory,):
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    memory.madvise(mmap.MADV_HUGEPAGE)
        growing_shards, slot_counts = self._index_growth(missing)
        for shard, slot_count in zip(growing_shards.tolist(), slot_counts.tolist(), strict=True):
            start, mask = int(self.index_starts[shard]), int(self.index_masks[shard])
            self._allocated_slots += slot_count - (mask + 1)
            new_start = self._allocate_slots(slot_count)
            k.rehash_slots(self.index, start, mask, new_start, slot_count - 1)
            self.index_starts[shard], self.index_masks[shard] = new_start, slot_count - 1
            self._release_slots(start, mask + 1)

    def _allocate_slots(self, slots: int) -> int:
        free_regions = self._free_regions.get(slots)
        if free_regions:
            return free_regions.pop()
        start = self._next_slot
        self._next_slot += slots
        return start

    def _release_slots(self, start: int, slots: int) -> None:
        first_byte, last_byte = start * 8, (start + slots) * 8
        first_page, last_page = (
            -(-first_byte // mmap.PAGESIZE) * mmap.PAGESIZE,
            last_byte // mmap.PAGESIZE * mmap.PAGESIZE,
        )
        if last_page > first_page:
            self._index_memory.madvise(mmap.MADV_DONTNEED, first_page, last_page - first_page)
            self.index[start : first_page // 8] = 0
            self.index[last_page // 8 : start + slots] = 0
        else:
            self.index[start : start + slots] = 0
        self._free_regions.setdefault(slots, []).append(start)

    def _reserve_spill(self, rows: int) -> None:
        """Blocks of the spill file for that many rows: writing to a mapped hole of a full disk would be a signal."""
        nbytes = rows * self.layout.stride
        if self._spill_file is None or nbytes <= self._spill_bytes:
            return
        nbytes = min(-(-nbytes // _SPILL_CHUNK_BYTES) * _SPILL_CHUNK_BYTES, (self.max_rows + 1) * self.layout.stride)
        try:
            os.posix_fallocate(self._spill_file, 0, nbytes)
        except OSError as error:
            raise StoreFull(
                f"table {self.spec.name}: its spill file cannot grow to {nbytes} bytes ({error}); nothing was applied; make room on "
                "that disk, expire old rows, or add servers"
            ) from error
        self._spill_bytes = nbytes

    # Finding, reading, writing

    def check_step(self, step: int | None) -> None:
        """Whether the rule can go by that step."""
        required_step(self.spec.rule, step, self.spec.name)

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """The row of each id (0: none), how many there are none of per shard, and in sum."""
        # An entry is found when it is prepared and again when it is applied: the second time it is known.
        if (
            self._find_cache is not None
            and self._find_cache[0] == self._write_count
            and np.array_equal(self._find_cache[1], ids)
        ):
            return self._find_cache[2]
        row_numbers = np.zeros(len(ids), np.int64)
        missing = np.zeros(self.num_shards, np.int64)
        absent = k.find_rows(
            self.index,
            self.index_starts,
            self.index_masks,
            self._shard_shift,
            self.int64_view,
            self.words,
            ids,
            row_numbers,
            self._batch_buffer,
            missing,
        )
        self._find_cache = (self._write_count, ids.copy(), (row_numbers, missing, absent))
        return row_numbers, missing, absent

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Weights in the table's arithmetic."""
        weights = np.empty((len(ids), self.spec.dim), self._dtype)
        row_numbers = np.zeros(len(ids), np.int64)
        k.read_rows(
            self.index, self.index_starts, self.index_masks, self._shard_shift, ids, row_numbers, self._batch_buffer, self._kernel_layout, self.int64_view, self.float_view, self.float32_view, self.int16_view, self.int8_view,
            self._init_kind, self._init_params, self._init_seed, self._nearest_draws, weights,
        )  # fmt: skip
        if self.is_native and 0 < len(ids) <= _MAX_CACHED_READ_IDS // 8:
            while self._read_cache and (
                len(self._read_cache) >= _MAX_CACHED_READS
                or len(ids) + sum(key[0] for key in self._read_cache) > _MAX_CACHED_READ_IDS
            ):
                del self._read_cache[next(iter(self._read_cache))]
            self._read_cache[len(ids), ids.item(0), ids.item(-1)] = row_numbers
        return weights

    def update(
        self, ids: np.ndarray, values: np.ndarray, lsn: np.ndarray, *, lr: float | None, step: int | None
    ) -> np.ndarray:
        """Updates the rows that are here, of a table that stores them as it computes; which of the ids (unique) have none."""
        self._write_count += 1
        id_count = len(ids)
        if id_count > len(self._absent_buffer):
            self._absent_buffer = np.empty(2 * id_count, np.int64)
        row_numbers = (
            self._read_cache.pop((id_count, ids.item(0), ids.item(-1)), None) if id_count and self._read_cache else None
        )
        if row_numbers is None:
            row_numbers = np.zeros(id_count, np.int64)
        rule_params, rule_params_f64, rule_options = self._encode_cached_rule(lr, step)
        missing = k.update_rows(
            self.index, self.index_starts, self.index_masks, self._shard_shift, ids, row_numbers, self._batch_buffer, values, lsn, self._kernel_layout, self.int64_view, self.float_view,
            rule_params, rule_params_f64, rule_options, self._scratch, self._absent_buffer,
        )  # fmt: skip
        if self._write_log is not None:
            self._write_log.add(ids if not missing else ids[row_numbers != 0], lsn, int(self.row_allocator[1]))
        return self._absent_buffer[:missing]

    def _encode_cached_rule(self, lr: float | None, step: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rule's numbers, in the arithmetic's float and in float64, and its choices; the last ones are kept."""
        step = step if self.spec.rule.steps == "given" else None
        if self._rule_cache is None or self._rule_cache[0] != (lr, step):
            rule_params_f64, rule_options = self.encode_rule(lr, step, is_assignment=False)
            self._rule_cache = ((lr, step), (rule_params_f64.astype(self._dtype), rule_params_f64, rule_options))
        return self._rule_cache[1]

    def write(
        self,
        ids: np.ndarray,
        row_numbers: np.ndarray,
        values: np.ndarray,
        lsn: np.ndarray,
        *,
        lr: float | None,
        step: int | None,
        is_assignment: bool,
    ) -> None:
        """Updates or sets rows; ids are unique, `row_numbers` is fresh and there is room."""
        self._write_count += 1
        if self._write_log is not None:
            self._write_log.add(ids, lsn, int(self.row_allocator[1]))
        rule_params_f64, rule_options = self.encode_rule(lr, step, is_assignment=is_assignment)
        k.write_rows(
            self.index, self.index_starts, self.index_masks, self.rows_per_shard, self._shard_shift, self.row_allocator, ids, row_numbers, values, lsn,
            self._kernel_layout, self.int64_view, self.float_view, self.float32_view, self.int16_view, self.int8_view, self._init_kind, self._init_params, self._init_seed,
            rule_params_f64.astype(self._dtype), rule_params_f64, rule_options, self._scratch, self._nearest_draws, self._rounding_draws, is_assignment,
        )  # fmt: skip

    def encode_rule(self, lr: float | None, step: int | None, *, is_assignment: bool) -> tuple[np.ndarray, np.ndarray]:
        """The rule's scalars and switches, as the kernels read them."""
        rule, step = self.spec.rule, 1 if is_assignment else step
        rule_options = encode_rule_options(
            rule, self.layout.count_index, is_sparse=True, step=step, name=self.spec.name
        )
        return encode_rule_params(rule, lr, self.spec.dim), rule_options

    # Shards

    def rows_of_shard(self, shard: int, *, clear: bool = False) -> np.ndarray:
        """The numbers of a shard's rows; with `clear` they are given back."""
        if clear:
            self._write_count += 1
            self._read_cache.clear()
        row_numbers = np.empty(int(self.rows_per_shard[shard]), np.int64)
        row_count = k.list_rows(
            self.index,
            int(self.index_starts[shard]),
            int(self.index_masks[shard]),
            self.int64_view,
            self.words,
            self.row_allocator,
            clear,
            row_numbers,
        )
        assert row_count == len(row_numbers), (self.spec.name, shard, row_count, len(row_numbers))
        if clear:
            self.rows_per_shard[shard] = 0
            self._allocated_slots += _MIN_SLOTS - (int(self.index_masks[shard]) + 1)
            self._release_slots(int(self.index_starts[shard]), int(self.index_masks[shard]) + 1)
            self.index_starts[shard], self.index_masks[shard] = self._allocate_slots(_MIN_SLOTS), _MIN_SLOTS - 1
        return row_numbers

    def written_since(self, shards: np.ndarray, since_lsns: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each shard: ids and log numbers of the rows that were written after a log number."""
        is_logged, logged_ids = np.zeros(len(shards), bool), np.empty(0, np.int64)
        if self._write_log is not None:
            is_logged, logged_ids = self._write_log.ids_since(shards, since_lsns)
        row_numbers = self.find(logged_ids)[0]
        logged_ids, row_numbers = logged_ids[row_numbers != 0], row_numbers[row_numbers != 0]
        lsns, id_shards = self.read_column(row_numbers, 1), shard_of(logged_ids, self.num_shards)
        for shard, after_lsn, is_complete in zip(shards.tolist(), since_lsns.tolist(), is_logged, strict=True):
            if is_complete:
                selected = (id_shards == shard) & (lsns > after_lsn)
                yield logged_ids[selected], lsns[selected]
            else:
                yield self._scan_written_since(shard, after_lsn)

    def _scan_written_since(self, shard: int, since_lsn: int) -> tuple[np.ndarray, np.ndarray]:
        ids, lsns = np.empty((2, int(self.rows_per_shard[shard])), np.int64)
        row_count = k.list_written_rows(
            self.index,
            int(self.index_starts[shard]),
            int(self.index_masks[shard]),
            self.int64_view,
            self.words,
            since_lsn,
            ids,
            lsns,
        )
        return ids[:row_count], lsns[:row_count]

    def read_column(self, row_numbers: np.ndarray, column: int) -> np.ndarray:
        """Ids (0) or log numbers (1) of rows."""
        values = np.empty(len(row_numbers), np.int64)
        k.read_column(self.int64_view, self.words, row_numbers, column, values)
        return values

    def export_rows(self, row_numbers: np.ndarray) -> np.ndarray:
        """Copies of rows as they lie, (rows, words) int64."""
        words = np.empty(len(row_numbers) * self.words, np.int64)
        k.copy_rows(self.int64_view, self.words, row_numbers, words)
        return words.reshape(len(row_numbers), self.words)

    def insert(self, rows: np.ndarray) -> None:
        """Rows of one shard that `export_rows` gave, whose ids are not here; there is room."""
        self._write_count += 1
        if self._write_log is not None and len(rows):
            self._write_log.reset_shard(int(shard_of(rows[:1, 0], self.num_shards)[0]), int(rows[:, 1].max()))
        k.insert_rows(
            self.index,
            self.index_starts,
            self.index_masks,
            self.rows_per_shard,
            self._shard_shift,
            self.int64_view,
            self.words,
            self.row_allocator,
            rows.reshape(-1),
        )

    def remove(self, ids: np.ndarray) -> None:
        """Takes rows out, those that are here."""
        self._write_count += 1
        self._read_cache.clear()
        k.remove_rows(
            self.index,
            self.index_starts,
            self.index_masks,
            self.rows_per_shard,
            self._shard_shift,
            self.int64_view,
            self.words,
            self.row_allocator,
            ids,
        )

    def rows_in_id_order(self, shard: int) -> np.ndarray:
        """The numbers of a shard's rows in the order of their ids."""
        row_numbers = self.rows_of_shard(shard)
        return row_numbers[np.argsort(self.read_column(row_numbers, 0))]

    def close(self) -> None:
        """Gives the spill file back; memory goes with the last view."""
        if self._spill_file is not None:
            os.close(self._spill_file)
            self._spill_file = None


def _open_spill_file(folder: Path, nbytes: int, name: str) -> tuple[int, mmap.mmap]:
    """A file without a name in `folder`, mapped; it is gone when it is closed, however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, path = tempfile.mkstemp(prefix="rows-", dir=folder)
        os.unlink(path)
        os.ftruncate(file, nbytes)
        return file, mmap.mmap(file, nbytes)
    except OSError as error:
        raise StoreError(
            f"table {name}: no spill file of {nbytes} bytes in {folder} ({error}); give another spill= or none"
        ) from error
