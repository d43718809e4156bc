"""The contents of one server, by shard: tables and dense parameters, read, updated, copied and moved, within its memory limit.

One thread at a time. An absent row reads as its initial value; a push creates it. `StoreFull` is raised before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.grouped_ids import group_by_route, make_hash_table
from echelon.server.protocol.hashing import shard_bits, shard_of
from echelon.server.protocol.specs import Dense, StoreError, Table, check_learning_rate
from echelon.server.protocol.wire_dtypes import quantize
from echelon.server.store import SnapshotPart, shard_transfer
from echelon.server.store.admission import AdmissionCounts
from echelon.server.store.dense_param import DenseParameter
from echelon.server.store.lazy_updates import LazySparseTable
from echelon.server.store.memory_limit import MemoryLimit
from echelon.server.store.row_layout import as_kernel_array, extract_weights, required_step
from echelon.server.store.sparse_table import SparseTable

T = TypeVar("T")
_INT64 = np.dtype(np.int64)
#: Of a push or read: a table's name, or a parameter's, with its ids or blocks, its values, and "apply", "assign" (rows) or "set" (blocks).
Operation = tuple[str, np.ndarray, Any, str]


def _as_ids(ids: np.ndarray) -> np.ndarray:
    """Ids or blocks as a flat array of int64."""
    array = np.asarray(ids)
    if array.dtype == _INT64 and array.ndim == 1 and array.flags.carray:
        return array  # as frames bring them
    if array.size and array.dtype.kind not in "iu":
        raise StoreError(f"ids: {array.dtype}; expected 64-bit integers")
    return as_kernel_array(array, np.int64).reshape(-1)


class _Declared(dict[str, T]):
    """Tables or dense parameters by name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __missing__(self, name: str) -> T:
        raise StoreError(f"{name}: no {self._kind} of that name; declared: {', '.join(sorted(self)) or 'none'}")


class ParameterStore:
    """`memory`: bytes for rows, index and blocks (None: the machine's); `spill`: a folder for rows beyond memory; `keep_alive` is called now
    and then during work that may take seconds."""

    def __init__(
        self,
        *,
        num_shards: int,
        memory: int | None = None,
        spill: Path | None = None,
        keep_alive: Callable[[], None] = lambda: None,
    ) -> None:
        shard_bits(num_shards)
        self.num_shards, self._spill, self._keep_alive = num_shards, spill, keep_alive
        self._limit = MemoryLimit(memory, spill, lambda: self.bytes)
        self._tables = _Declared[SparseTable]("table")
        #: Those of the tables all of whose rows move with each push that gives their rate.
        self.lazy_tables: dict[str, LazySparseTable] = {}
        self._admission_counts: dict[str, AdmissionCounts] = {}
        self._dense_parameters = _Declared[DenseParameter]("dense parameter")
        self._contents = shard_transfer.Contents(self._tables, self._admission_counts, self._dense_parameters)

    def declare(self, spec: Table | Dense) -> None:
        """Create a table or dense parameter, unless it exists with the same spec."""
        name, known = spec.name, self.specs.get(spec.name)
        if known is not None:
            if known != spec:
                raise StoreError(f"{name}: declared as {known}, now as {spec}; use another name, or the same spec")
            return
        self._limit.on_memory_taken()  # it takes memory, too
        if isinstance(spec, Dense):
            if spec.rule.kind == "rowwise_adagrad":
                raise StoreError(f"{name}: rowwise_adagrad needs rows, which a dense parameter lacks; use adagrad")
            self._dense_parameters[name] = DenseParameter(spec, num_shards=self.num_shards)
            return
        options: dict[str, Any] = {"num_shards": self.num_shards, "address_space": self._limit.address_space}
        if spec.rule.every:
            lazy_table = LazySparseTable(spec, **options, spill=self._spill, keep_alive=self._keep_alive)
            self._tables[name] = self.lazy_tables[name] = lazy_table
        else:
            self._tables[name] = SparseTable(spec, **options, spill=self._spill)
        if spec.admit > 1:
            options["address_space"] = self._limit.bytes // 2
            self._admission_counts[name] = AdmissionCounts(spec, **options)

    @property
    def specs(self) -> dict[str, Table | Dense]:
        return {name: declared.spec for name, declared in (self._tables | self._dense_parameters).items()}

    def shards_of(self, name: str, ids: np.ndarray) -> np.ndarray:
        """The shard of each id, or of each block of a dense parameter."""
        dense = self._dense_parameters.get(name)
        return shard_of(_as_ids(ids), self.num_shards) if dense is None else dense.shards_of(_as_ids(ids))

    def without_memory_limit(self) -> AbstractContextManager[None]:
        """A context without the limit: a backup takes what its head took, and a commit applies what was acknowledged."""
        return self._limit

    # Reading

    def read(self, name: str, ids: np.ndarray, wire_dtype: str = "f4") -> list[np.ndarray]:
        """Rows in the order of ids, and their scales for i2 and i1."""
        table = self._tables[name]
        ids = _as_ids(ids)
        if wire_dtype != table.spec.stored or wire_dtype[0] == "f":
            return quantize(table.read(ids), wire_dtype)
        # Integers as they are stored: rounding them again would change their scales.
        row_numbers, _, absent = table.find(ids)
        arrays = extract_weights(table.spec, table.export_rows(row_numbers))
        if absent:
            is_absent = row_numbers == 0
            for stored, initial in zip(arrays, quantize(table.read(ids[is_absent]), wire_dtype), strict=True):
                stored[is_absent] = initial
        return arrays

    def read_blocks(self, name: str, blocks: np.ndarray) -> list[np.ndarray]:
        """The values of blocks: read-only views that do not change while a reader holds them."""
        dense = self._dense_parameters[name]
        return [dense.read(block) for block in _as_ids(blocks).tolist()]

    def changed_ids_until(
        self, name: str, shards: Sequence[int] | np.ndarray, since_lsns: np.ndarray, limit: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids (or blocks) written after a log number of each shard, and up to which log number each shard's answer is complete.

        A limit takes the oldest changes of a shard first, and exceeds itself by those with the same log number.
        """
        id_arrays, until_lsns = [np.empty(0, np.int64)], np.array(since_lsns, np.int64)
        remaining = np.iinfo(np.int64).max if limit is None else limit
        source = self._dense_parameters.get(name) or self._tables[name]
        for index, (ids, lsns) in enumerate(source.written_since(np.array(shards, np.int64), until_lsns.copy())):
            if remaining <= 0:
                break
            if not len(ids):
                continue
            order = np.argsort(lsns, kind="stable")
            ids, lsns = ids[order], lsns[order]
            end = len(ids) if len(ids) <= remaining else int(np.searchsorted(lsns, lsns[remaining - 1], side="right"))
            id_arrays.append(ids[:end])
            until_lsns[index] = lsns[end - 1]
            remaining -= end
        return np.concatenate(id_arrays), until_lsns

    # Writing

    def apply(
        self,
        name: str,
        ids: np.ndarray,
        grads: Any,
        *,
        lr: float | None = None,
        lsn: np.ndarray,
        step: int | None = None,
        ids_are_unique: bool = False,
    ) -> None:
        """Update rows by gradients (ids, dim), after summing those of the same id; or blocks, by one gradient each.

        `lsn`: per shard, the log number of this entry; `step`: counted from 1, for rules that need it. `ids_are_unique` skips the search for
        duplicates: workers send distinct ids. A duplicate would then be updated twice.
        """
        ids = _as_ids(ids)
        check_learning_rate(name, lr)
        if name in self._dense_parameters:
            dense = self._dense_parameters[name]
            sums = dense.sum_gradients(ids, grads)
            dense.check_push(list(sums), step)
            self._limit.reserve([], dense.bytes_needed(ids))
            dense.apply(sums, lr=lr, lsn=lsn, step=step)
            return
        table = self._tables[name]
        required_step(table.spec.rule, step, name)
        values = table.as_values(ids, grads)
        lsn = np.ascontiguousarray(lsn, np.int64)
        updates_in_place = table.is_native and name not in self._admission_counts
        if not (ids_are_unique and updates_in_place):
            ids, values = self._sum_duplicates(ids, values)
        if updates_in_place:
            if not self._limit.guarantees(table, len(ids)):
                _, missing, absent = table.find(ids)
                if absent:
                    self._limit.reserve([(table, missing)])
            # Nothing can be refused any more: rows that exist are updated in the pass that finds them, new ones are created after it.
            # All replicas do the same, however certain their room: a duplicate id must not make them differ.
            new_indices = table.update(ids, values, lsn, lr=lr, step=step)
            if not len(new_indices):
                return
            ids, values = self._sum_duplicates(ids[new_indices], values[new_indices])
        row_numbers, missing, absent = table.find(ids)
        counts = self._admission_counts.get(name)
        if absent and counts is not None:
            split = counts.split(ids, row_numbers != 0)
            self._limit.reserve(list(zip((table, counts), split.missing, strict=True)))
            counts.add(ids, split, lsn)
            ids, row_numbers, values = (array[~split.is_waiting] for array in (ids, row_numbers, values))
        elif absent:
            self._limit.reserve([(table, missing)])
        table.write(ids, row_numbers, values, lsn, lr=lr, step=step)

    def advance_lazy_table(self, name: str, shards: np.ndarray, lr: float | None = None) -> None:
        """End an update of a lazy table on these shards, after `apply` of its gradients there.

        The rate was checked before any part of the entry was applied.
        """
        lazy_table = self.lazy_tables[name]
        bytes_before = lazy_table.bytes
        lazy_table.advance(np.asarray(shards, np.int64), lr)
        if lazy_table.bytes != bytes_before:
            self._limit.on_memory_taken()  # histories take memory, too

    def assign(self, name: str, ids: np.ndarray, values: np.ndarray, *, lsn: np.ndarray) -> None:
        """Set rows, with fresh state and regardless of admission. Of duplicate ids the last counts."""
        table = self._tables[name]
        ids = _as_ids(ids)
        values = table.as_values(ids, values)
        if not k.all_unique(ids, make_hash_table(len(ids))):
            last = len(ids) - 1 - np.unique(ids[::-1], return_index=True)[1]
            ids, values = ids[last], values[last]
        row_numbers, missing, _ = table.find(ids)
        self._limit.reserve([(table, missing)])
        table.write(ids, row_numbers, values, np.ascontiguousarray(lsn, np.int64), is_assignment=True)
        if name in self._admission_counts:
            counts = self._admission_counts[name]
            counts.remove(ids[counts.find(ids)[0] != 0])

    def initialize_blocks(self, name: str, blocks: np.ndarray, values: Any, *, lsn: np.ndarray) -> None:
        """Set the first values of blocks; blocks that have values keep them."""
        dense, blocks = self._dense_parameters[name], _as_ids(blocks)
        block_values = dense.as_values(blocks, values)
        self._limit.reserve([], dense.bytes_needed(blocks))
        for block, value in zip(blocks.tolist(), block_values, strict=True):
            if block not in dense.blocks:
                dense.set_block(block, value, int(lsn[dense.shard_of_block[block]]))

    def check_operations(
        self, operations: Iterable[Operation], step: int | None = None, rates: Mapping[str, Any] | None = None
    ) -> None:
        """Raise what these operations together would raise; change nothing."""
        id_arrays: dict[tuple[str, str], list[np.ndarray]] = {}
        for name, keys, values, kind in operations:
            ids = _as_ids(keys)
            check_learning_rate(name, (rates or {}).get(name))
            if kind == "set" or (kind == "apply" and name in self._dense_parameters):
                dense = self._dense_parameters[name]
                dense.as_values(ids, values)
                if kind == "apply":
                    dense.check_push(sorted(set(ids.tolist())), step)
                id_arrays.setdefault((name, "set"), []).append(ids)
                continue
            table = self._tables[name]
            table.as_values(ids, values)
            if kind == "apply":
                required_step(table.spec.rule, step, name)
            id_arrays.setdefault((name, kind), []).append(ids)
        missing_rows: list[tuple[SparseTable, np.ndarray]] = []
        block_bytes = 0
        for (name, kind), arrays in id_arrays.items():
            ids = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            if kind == "set":
                block_bytes += self._dense_parameters[name].bytes_needed(ids)
                continue
            if not k.all_unique(ids, make_hash_table(len(ids))):
                ids = np.unique(ids)
            table, counts = self._tables[name], self._admission_counts.get(name)
            row_numbers, missing, absent = table.find(ids)
            if absent and kind == "apply" and counts is not None:
                missing_rows += zip((table, counts), counts.split(ids, row_numbers != 0).missing, strict=True)
            elif absent:
                missing_rows.append((table, missing))
        self._limit.check(missing_rows, block_bytes)

    def expire(self, name: str, shards: Sequence[int] | np.ndarray, before_lsn: int | np.ndarray) -> int:
        """Remove rows last written before a log number (one for all, or one per shard); how many."""
        limits = np.broadcast_to(np.asarray(before_lsn, np.int64), (len(shards),))
        counts, table = self._admission_counts.get(name), self._tables[name]
        rows_before = table.count
        for target in (table,) if counts is None else (counts, table):
            for shard, limit in zip(shards, limits, strict=True):
                rows = target.rows_of_shard(int(shard))
                target.remove(target.read_column(rows, 0)[target.read_column(rows, 1) < limit])
        return rows_before - table.count

    # Shards

    def snapshot(self, shard: int) -> list[SnapshotPart]:
        """A copy of a shard in parts of about 1 MiB: for `install` on any server with the same specs."""
        return shard_transfer.snapshot(shard, self._contents)

    def install(self, shard: int, parts: Sequence[SnapshotPart]) -> None:
        """Replace a shard by a snapshot. Raises before anything changes."""
        tables, blocks, histories = shard_transfer.parse_parts(shard, parts, self._contents)
        missing_rows = []
        for table, chunks in tables:
            missing = np.zeros(self.num_shards, np.int64)
            # The rows that are dropped first are used again.
            missing[shard] = sum(map(len, chunks)) - table.rows_per_shard[shard]
            missing_rows.append((table, missing))
        all_dense = self._dense_parameters.values()
        freed_bytes = sum(dense.block_bytes(block) for dense in all_dense for block in dense.blocks_of_shard(shard))
        self._limit.check(missing_rows, sum(dense.block_bytes(block) for dense, block, _ in blocks) - freed_bytes)
        for table, missing in missing_rows:
            table.reserve_spill(missing)
        self._limit.on_memory_taken()
        self.drop(shard)
        for (table, missing), (_, chunks) in zip(missing_rows, tables, strict=True):
            missing[shard] = sum(map(len, chunks))
            table.grow_index(missing)
            for chunk in chunks:
                table.insert(chunk)
        for dense, block, values in blocks:
            dense.blocks[block] = values
        for lazy_table, history in histories:
            lazy_table.set_history(shard, history)

    def drop(self, shard: int) -> None:
        for table in self._contents.tables():
            table.rows_of_shard(shard, clear=True)
        for dense in self._dense_parameters.values():
            for block in dense.blocks_of_shard(shard):
                del dense.blocks[block]

    def digest(self, shard: int) -> bytes:
        """SHA-256 of a shard's contents, whatever the order in which they came."""
        return shard_transfer.digest(shard, self._contents)

    def stats(self) -> dict[str, Any]:
        """Rows and bytes per name, rows per shard, bytes in total and their limit."""
        tables = {}
        for name, table in self._tables.items():
            counts = self._admission_counts.get(name)
            waiting, count_bytes = (counts.count, counts.bytes) if counts else (0, 0)
            sizes = {"bytes": table.bytes + count_bytes, "spilled": table.spilled_bytes}
            tables[name] = {"rows": table.count, "waiting": waiting, **sizes}
        dense = {name: {"blocks": len(one.blocks), "bytes": one.bytes} for name, one in self._dense_parameters.items()}
        rows = sum((table.rows_per_shard for table in self._tables.values()), np.zeros(self.num_shards, np.int64))
        return {"tables": tables, "dense": dense, "rows": rows, "bytes": self.bytes, "memory": self._limit.bytes}

    @property
    def bytes(self) -> int:
        dense_bytes = sum(dense.bytes for dense in self._dense_parameters.values())
        return dense_bytes + sum(table.bytes for table in self._contents.tables())

    def close(self) -> None:
        for table in self._tables.values():
            table.close()

    def _sum_duplicates(self, ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if k.all_unique(ids, make_hash_table(len(ids))):
            return ids, values
        grouped = group_by_route(ids, np.zeros(self.num_shards, np.uint16), 1)
        return grouped.ids, grouped.sum_gradients(values)
