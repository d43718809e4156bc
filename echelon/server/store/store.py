"""All that one server holds, by virtual shard: tables and dense parameters, read, updated, snapshot, moved, within its memory.

One thread at a time. What is absent reads as its initial value; a push creates it. `StoreFull` is raised before anything changes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.grouped_ids import group_by_route, make_hash_table
from echelon.server.protocol.hashing import shard_bits, shard_of
from echelon.server.protocol.specs import Dense, Init, Rule, StoreError, StoreFull, Table, check_learning_rate
from echelon.server.protocol.wire_dtypes import quantize
from echelon.server.store import shard_transfer
from echelon.server.store.dense_param import DenseParameter
from echelon.server.store.lazy_updates import LazySparseTable
from echelon.server.store.shard_transfer import SnapshotPart
from echelon.server.store.sparse_table import SparseTable, extract_weights
from echelon.server.store.validate import as_block_values, as_id_array, as_row_values, unique_ids


class _WithoutMemoryLimit:
    """See `Store.unbounded`: around each entry that a backup takes, so made once."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._store._is_limited = False

    def __exit__(self, *error: object) -> None:
        self._store._is_limited = True


class ParameterStore:
    """`memory`: bytes that rows, index and blocks may take (None: the machine's); `spill`: a folder for rows beyond memory; `alive`: called
    now and then during work that may take seconds."""

    def __init__(
        self,
        *,
        num_shards: int,
        memory: int | None = None,
        spill: Path | None = None,
        keep_alive: Callable[[], None] = lambda: None,
    ) -> None:
        shard_bits(num_shards)
        self._keep_alive = keep_alive
        self.num_shards = num_shards
        self.memory = memory
        self.spill = spill
        physical_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._memory_limit = physical_memory if memory is None else memory
        #: Addresses per table: a replica may have to go beyond its bound (see `without_memory_limit`).
        address_space = physical_memory if memory is None else min(4 * memory, max(2 * memory, physical_memory))
        self._address_space = address_space if spill is None else _free_disk_bytes(spill)
        self._is_limited = True
        self._without_memory_limit = _WithoutMemoryLimit(self)
        self._tables: dict[str, SparseTable] = {}
        self._lazy_tables: dict[str, LazySparseTable] = {}
        #: Ids that were pushed to, but not often enough yet: a table of counts each.
        self._admission_counts: dict[str, SparseTable] = {}
        self._dense_parameters: dict[str, DenseParameter] = {}
        #: New rows of a table for which there is room for certain, while nothing else takes memory.
        self._guaranteed_rows: dict[str, int] = {}

    def declare(self, spec: Table | Dense) -> None:
        """Makes a table or dense parameter known; again with the same spec: nothing happens."""
        known_spec = self.specs.get(spec.name)
        if known_spec is not None:
            if known_spec != spec:
                raise StoreError(
                    f"{spec.name}: declared as {known_spec}, now as {spec}; use another name, or the same spec in every worker"
                )
            return
        self._guaranteed_rows.clear()  # it takes memory, too
        if isinstance(spec, Dense):
            if spec.rule.kind == "rowwise_adagrad":
                raise StoreError(
                    f"{spec.name}: rowwise_adagrad keeps one number per row and a dense parameter has no rows; use adagrad"
                )
            self._dense_parameters[spec.name] = DenseParameter(spec, num_shards=self.num_shards)
            return
        if spec.rule.every:
            lazy_table = LazySparseTable(
                spec,
                num_shards=self.num_shards,
                address_space=self._address_space,
                spill=self.spill,
                keep_alive=self._keep_alive,
            )
            self._tables[spec.name] = self._lazy_tables[spec.name] = lazy_table
        else:
            self._tables[spec.name] = SparseTable(
                spec, num_shards=self.num_shards, address_space=self._address_space, spill=self.spill
            )
        if spec.admit > 1:
            count_spec = Table(
                name=spec.name, dim=1, rule=Rule(kind="sgd"), init=Init(kind="zeros"), dtype="f8", stored="f8"
            )
            self._admission_counts[spec.name] = SparseTable(
                count_spec,
                num_shards=self.num_shards,
                address_space=self._memory_limit // 2,
                spill=None,
                keep_write_log=False,
            )

    @property
    def specs(self) -> dict[str, Table | Dense]:
        """What is declared, by name."""
        specs: dict[str, Table | Dense] = {name: table.spec for name, table in self._tables.items()}
        return specs | {name: dense.spec for name, dense in self._dense_parameters.items()}

    def shards_of(self, name: str, ids: np.ndarray) -> np.ndarray:
        """The shard of each id, or of each block of a dense parameter."""
        if name not in self._dense_parameters:
            return shard_of(as_id_array(ids), self.num_shards)
        dense, blocks = self._dense_parameters[name], as_id_array(ids)
        for block in blocks.tolist():
            dense.spec.block_length(block)
        return dense.shard_of_block[blocks]

    def without_memory_limit(self) -> AbstractContextManager[None]:
        """Within it memory has no bound: a backup takes what its head took, and a commit what was acknowledged, or they part."""
        return self._without_memory_limit

    # Reading

    def read(self, name: str, ids: np.ndarray, wire_dtype: str = "f4") -> list[np.ndarray]:
        """Rows in the order of ids as `wire_dtype` (for i2 and i1: and their scales)."""
        table = self._table(name)
        ids = as_id_array(ids)
        if wire_dtype != table.spec.stored or wire_dtype[0] == "f":
            return quantize(table.read(ids), wire_dtype)
        # Integers as they are stored: rounded again they would have other scales.
        row_numbers, _, absent = table.find(ids)
        arrays = extract_weights(table.spec, table.export_rows(row_numbers))
        if absent:
            for stored, initial in zip(arrays, quantize(table.read(ids[row_numbers == 0]), wire_dtype), strict=True):
                stored[row_numbers == 0] = initial
        return arrays

    def read_blocks(self, name: str, blocks: np.ndarray) -> list[np.ndarray]:
        """Each block's values, read-only views that stay as they are while somebody holds them."""
        dense = self._dense_parameter(name)
        return [dense.read(block) for block in as_id_array(blocks).tolist()]

    def ids(self, name: str, shard: int) -> np.ndarray:
        """The ids that have rows in a shard, in no order."""
        table = self._table(name)
        return table.read_column(table.rows_of_shard(shard), 0)

    def changed_ids(
        self, name: str, shards: Sequence[int], since_lsns: np.ndarray, limit: int | None = None
    ) -> np.ndarray:
        """Ids (of a dense parameter: blocks) written after log number since[i] of shards[i]; see `changed_ids_until`."""
        return self.changed_ids_until(name, shards, since_lsns, limit)[0]

    def changed_ids_until(
        self, name: str, shards: Sequence[int], since_lsns: np.ndarray, limit: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """And up to which log number each shard's answer is whole: ask on from there.

        With a limit the oldest changes of a shard come first, and as many more than the limit as belong to one log number.
        """
        id_arrays: list[np.ndarray] = []
        until_lsns = np.array(since_lsns, np.int64)
        remaining = np.iinfo(np.int64).max if limit is None else limit
        for index, (ids, lsns) in enumerate(self._written_since(name, np.array(shards, np.int64), until_lsns.copy())):
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
        return np.concatenate(id_arrays) if id_arrays else np.empty(0, np.int64), until_lsns

    def _written_since(
        self, name: str, shards: np.ndarray, since_lsns: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if name not in self._dense_parameters:
            yield from self._table(name).written_since(shards, since_lsns)
            return
        dense = self._dense_parameters[name]
        for shard, after_lsn in zip(shards.tolist(), since_lsns.tolist(), strict=True):
            blocks = [block for block in dense.blocks_of_shard(shard) if dense.blocks[block].lsn > after_lsn]
            yield np.array(blocks, np.int64), np.array([dense.blocks[block].lsn for block in blocks], np.int64)

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
        """Updates rows by gradients (ids, dim), those of the same id added up first; of a dense parameter: blocks, one gradient each.

        `lsn`: of each of all shards, the log number of this entry; `step`: counted from 1, for rules that go by it. `ids_are_unique`: each id is there
        once, as workers send them, which need not be looked at; if one is not, its row is updated by one gradient after the other.
        """
        ids = as_id_array(ids)
        check_learning_rate(name, lr)
        if name in self._dense_parameters:
            self._apply_blocks(self._dense_parameters[name], ids, grads, lr=lr, lsn=lsn, step=step)
            return
        table = self._table(name)
        table.check_step(step)
        values = as_row_values(table, ids, grads)
        lsn = np.ascontiguousarray(lsn, np.int64)
        updates_in_place = table.is_native and name not in self._admission_counts
        if not (ids_are_unique and updates_in_place):
            ids, values = self._sum_duplicates(ids, values)
        if updates_in_place:
            if not self._has_guaranteed_room(name, table, len(ids)):
                _, missing, absent = table.find(ids)
                if absent:
                    self._reserve_room([(table, missing)], 0)
            # Nothing can be refused any more: rows that are here are updated in the pass that finds them, and new ones made after. The same
            # on every replica, however sure it is of its room: an id that is there twice, and should not be, must not part them.
            new_indices = table.update(ids, values, lsn, lr=lr, step=step)
            if not len(new_indices):
                return
            ids, values = self._sum_duplicates(ids[new_indices], values[new_indices])
        row_numbers, missing, absent = table.find(ids)
        if absent and name in self._admission_counts:
            ids, row_numbers, values = self._admit(table, ids, row_numbers, values, lsn)
        elif absent:
            self._reserve_room([(table, missing)], 0)
        table.write(ids, row_numbers, values, lsn, lr=lr, step=step, is_assignment=False)

    @property
    def lazy_tables(self) -> Mapping[str, LazySparseTable]:
        """The tables all of whose rows move with each push that names them."""
        return self._lazy_tables

    def advance_lazy_table(self, name: str, shards: np.ndarray, lr: float | None = None) -> None:
        """Ends an update of such a table on these shards, after `apply` of the gradients that it has there.

        Its rate was checked before anything of the entry was done: half an entry must not be.
        """
        lazy_table = self._lazy_tables[name]
        bytes_before = lazy_table.bytes
        lazy_table.advance(np.asarray(shards, np.int64), lr)
        if lazy_table.bytes != bytes_before:
            self._guaranteed_rows.clear()  # what is kept of its updates takes memory, too

    def assign(self, name: str, ids: np.ndarray, values: np.ndarray, *, lsn: np.ndarray) -> None:
        """Sets rows as they are, with the state of a fresh row; admission does not ask. Of an id that is there twice, the last counts."""
        table = self._table(name)
        ids = as_id_array(ids)
        values = as_row_values(table, ids, values)
        if not k.all_unique(ids, make_hash_table(len(ids))):
            _, last_indices = np.unique(ids[::-1], return_index=True)
            ids, values = ids[len(ids) - 1 - last_indices], values[len(ids) - 1 - last_indices]
        row_numbers, missing, _ = table.find(ids)
        self._reserve_room([(table, missing)], 0)
        table.write(
            ids, row_numbers, values, np.ascontiguousarray(lsn, np.int64), lr=None, step=None, is_assignment=True
        )
        if name in self._admission_counts:
            admission_counts = self._admission_counts[name]
            admission_counts.remove(ids[admission_counts.find(ids)[0] != 0])

    def initialize_blocks(
        self, name: str, blocks: np.ndarray, values: Sequence[np.ndarray], *, lsn: np.ndarray | None = None
    ) -> None:
        """First values of blocks; those that have values keep them."""
        dense = self._dense_parameter(name)
        blocks = as_id_array(blocks)
        block_values = as_block_values(dense, blocks, values)
        self._reserve_room([], dense.bytes_needed(blocks))
        for block, value in zip(blocks.tolist(), block_values, strict=True):
            if block not in dense.blocks:
                dense.set_block(block, value, 0 if lsn is None else int(lsn[dense.shard_of_block[block]]))

    def check_operations(
        self, operations: Iterable[tuple[Any, ...]], step: int | None = None, rates: Mapping[str, Any] | None = None
    ) -> None:
        """Raises what these operations, all of them together, would raise; changes nothing.

        Each is (name, ids or blocks, values), an update, or has a fourth item: "apply", "assign" (a table's rows) or "set" (blocks).
        """
        pushed: dict[str, list[np.ndarray]] = {}
        assigned: dict[str, list[np.ndarray]] = {}
        blocks: dict[str, list[np.ndarray]] = {}
        for name, keys, values, *optional_kind in operations:
            ids = as_id_array(keys)
            operation_kind = optional_kind[0] if optional_kind else "apply"
            check_learning_rate(name, (rates or {}).get(name))
            if operation_kind == "set" or (operation_kind == "apply" and name in self._dense_parameters):
                dense = self._dense_parameter(name)
                as_block_values(dense, ids, values)
                if operation_kind == "apply":
                    dense.check_push(sorted(set(ids.tolist())), step)
                blocks.setdefault(name, []).append(ids)
                continue
            table = self._table(name)
            as_row_values(table, ids, values)
            if operation_kind == "apply":
                table.check_step(step)
            (pushed if operation_kind == "apply" else assigned).setdefault(name, []).append(ids)
        missing_by_table: list[tuple[SparseTable, np.ndarray]] = []
        for name, id_arrays in assigned.items():
            missing_by_table.append((self._table(name), self._table(name).find(unique_ids(id_arrays))[1]))
        for name, id_arrays in pushed.items():
            ids = unique_ids(id_arrays)
            _, missing, absent = self._table(name).find(ids)
            if absent and name in self._admission_counts:
                missing_by_table += self._split_by_admission(self._table(name), ids)[3]
            elif absent:
                missing_by_table.append((self._table(name), missing))
        self._check_room(
            missing_by_table,
            sum(
                self._dense_parameters[name].bytes_needed(np.concatenate(id_arrays))
                for name, id_arrays in blocks.items()
            ),
        )

    def expire(self, name: str, shards: Sequence[int], before_lsn: int | np.ndarray) -> int:
        """Removes rows whose last write is before that log number (one for all, or one per shard named); how many rows."""
        limits = np.broadcast_to(np.asarray(before_lsn, np.int64), (len(shards),))
        removed = 0
        for table in (self._admission_counts.get(name), self._table(name)):
            removed = 0
            if table is None:
                continue
            for shard, limit in zip(shards, limits, strict=True):
                rows = table.rows_of_shard(int(shard))
                ids = table.read_column(rows, 0)[table.read_column(rows, 1) < limit]
                table.remove(ids)
                removed += len(ids)
        return removed

    # Shards

    def snapshot(self, shard: int) -> list[SnapshotPart]:
        """All of a shard, copied now, in parts of about 1 MiB: for `install` on any server that knows the same specs."""
        return shard_transfer.snapshot(shard, self._tables, self._admission_counts, self._dense_parameters)

    def install(self, shard: int, parts: Sequence[SnapshotPart]) -> None:
        """A shard as `snapshot` gave it, instead of what was here of it. Raises before anything changes."""
        tables, blocks, histories = shard_transfer.parse_parts(
            shard, parts, self._tables, self._admission_counts, self._dense_parameters
        )
        missing_by_table = []
        for table, chunks in tables:
            missing = np.zeros(self.num_shards, np.int64)
            # Of rows that are dropped first, as many are used again.
            missing[shard] = sum(len(chunk) for chunk in chunks) - table.rows_per_shard[shard]
            missing_by_table.append((table, missing))
        stored_bytes = sum(
            dense.block_bytes(block)
            for dense in self._dense_parameters.values()
            for block in dense.blocks_of_shard(shard)
        )
        self._check_room(missing_by_table, sum(dense.block_bytes(block) for dense, block, _ in blocks) - stored_bytes)
        for table, missing in missing_by_table:
            table.reserve_spill(missing)
        self._guaranteed_rows.clear()
        self.drop(shard)
        for (table, missing), (_, chunks) in zip(missing_by_table, tables, strict=True):
            missing[shard] = sum(len(chunk) for chunk in chunks)
            table.grow_index(missing)
            for chunk in chunks:
                table.insert(chunk)
        for dense, block, values in blocks:
            dense.blocks[block] = values
        for lazy_table, history in histories:
            lazy_table.set_history(shard, history)

    def drop(self, shard: int) -> None:
        """Forgets a shard."""
        for table in (*self._tables.values(), *self._admission_counts.values()):
            table.rows_of_shard(shard, clear=True)
        for dense in self._dense_parameters.values():
            for block in dense.blocks_of_shard(shard):
                del dense.blocks[block]

    def digest(self, shard: int) -> bytes:
        """SHA-256 of all of a shard, whatever the order in which it came to be."""
        return shard_transfer.digest(shard, self._tables, self._admission_counts, self._dense_parameters)

    def stats(self) -> dict[str, Any]:
        """Rows and bytes per name, rows per shard, bytes in sum and their bound."""
        per_shard = np.zeros(self.num_shards, np.int64)
        tables = {}
        for name, table in self._tables.items():
            admission_counts = self._admission_counts.get(name)
            per_shard += table.rows_per_shard
            tables[name] = {
                "rows": table.count,
                "bytes": table.bytes + (admission_counts.bytes if admission_counts else 0),
                "row_bytes": table.layout.stride,
                "waiting": admission_counts.count if admission_counts else 0,
                "spilled": table.spilled_bytes,
            }
        dense = {
            name: {"blocks": len(parameter.blocks), "bytes": parameter.bytes}
            for name, parameter in self._dense_parameters.items()
        }
        return {"tables": tables, "dense": dense, "rows": per_shard, "bytes": self.bytes, "memory": self._memory_limit}

    @property
    def bytes(self) -> int:
        """Memory in use."""
        table_bytes = sum(table.bytes for table in (*self._tables.values(), *self._admission_counts.values()))
        return table_bytes + sum(dense.bytes for dense in self._dense_parameters.values())

    def close(self) -> None:
        """Gives spill files back."""
        for table in self._tables.values():
            table.close()

    # Within

    def _table(self, name: str) -> SparseTable:
        try:
            return self._tables[name]
        except KeyError:
            raise StoreError(
                f"{name}: no table of that name here; declared: {', '.join(sorted(self.specs)) or 'none'}"
            ) from None

    def _dense_parameter(self, name: str) -> DenseParameter:
        try:
            return self._dense_parameters[name]
        except KeyError:
            raise StoreError(
                f"{name}: no dense parameter of that name here; declared: {', '.join(sorted(self.specs)) or 'none'}"
            ) from None

    def _sum_duplicates(self, ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if k.all_unique(ids, make_hash_table(len(ids))):
            return ids, values
        grouped = group_by_route(ids, np.zeros(self.num_shards, np.uint16), 1)
        return grouped.ids, grouped.sum_gradients(values)

    def _split_by_admission(
        self, table: SparseTable, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[SparseTable, np.ndarray]]]:
        """Of a table with admission: which ids wait on, their rows among the waiting, who comes in, and what both need."""
        row_numbers, _, _ = table.find(ids)
        admission_counts = self._admission_counts[table.spec.name]
        count_rows, _, _ = admission_counts.find(ids)
        counts = admission_counts.read_column(count_rows, 2).view(np.float64) * (count_rows != 0)
        is_absent = row_numbers == 0
        is_admitted = is_absent & (counts + 1 >= table.spec.admit)
        is_waiting = is_absent & ~is_admitted
        new_per_shard = np.bincount(shard_of(ids[is_admitted], self.num_shards), minlength=self.num_shards)
        waiting_per_shard = np.bincount(
            shard_of(ids[is_waiting & (count_rows == 0)], self.num_shards), minlength=self.num_shards
        )
        return is_waiting, count_rows, is_admitted, [(table, new_per_shard), (admission_counts, waiting_per_shard)]

    def _admit(
        self, table: SparseTable, ids: np.ndarray, row_numbers: np.ndarray, values: np.ndarray, lsn: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Counts a push to ids that are not admitted yet; what is left has rows or comes in now."""
        is_waiting, count_rows, is_admitted, missing_by_table = self._split_by_admission(table, ids)
        self._reserve_room(missing_by_table, 0)
        admission_counts = self._admission_counts[table.spec.name]
        lsn = np.ascontiguousarray(lsn, np.int64)
        admission_counts.remove(ids[is_admitted & (count_rows != 0)])
        waiting_ids = ids[is_waiting]
        admission_counts.write(
            waiting_ids,
            admission_counts.find(waiting_ids)[0],
            np.full((len(waiting_ids), 1), -1.0),
            lsn,
            lr=1.0,
            step=None,
            is_assignment=False,
        )
        has_row = ~is_waiting
        return ids[has_row], row_numbers[has_row], values[has_row]

    def _apply_blocks(
        self,
        dense: DenseParameter,
        blocks: np.ndarray,
        grads: Any,
        *,
        lr: float | None,
        lsn: np.ndarray,
        step: int | None,
    ) -> None:
        values = as_block_values(dense, blocks, grads)
        block_numbers = blocks.tolist()
        if len(set(block_numbers)) != len(block_numbers):
            sums: dict[int, np.ndarray] = {}
            for block, value in zip(block_numbers, values, strict=True):
                sums[block] = sums[block] + value if block in sums else value
            block_numbers, values = list(sums), list(sums.values())
        dense.check_push(block_numbers, step)
        self._reserve_room([], dense.bytes_needed(blocks))
        dense.apply(block_numbers, values, lr=lr, lsn=lsn, step=step)

    def _has_guaranteed_room(self, name: str, table: SparseTable, new_rows: int) -> bool:
        """Whether so many new rows cannot be refused. Asked of every push, so it is reckoned once for many."""
        if self._guaranteed_rows.get(name, 0) < new_rows:
            for rows in (new_rows + (1 << 20), new_rows):
                bytes_needed = table.max_bytes_needed(rows)
                if bytes_needed is not None and self.bytes + bytes_needed <= self._memory_limit:
                    self._guaranteed_rows[name] = rows
                    return True
            return False
        return True

    def _reserve_room(self, missing_by_table: Sequence[tuple[SparseTable, np.ndarray]], block_bytes: int) -> None:
        self._check_room(missing_by_table, block_bytes)
        self._guaranteed_rows.clear()
        for table, missing in missing_by_table:
            table.reserve_spill(missing)
        for table, missing in missing_by_table:
            table.grow_index(missing)

    def _check_room(self, missing_by_table: Sequence[tuple[SparseTable, np.ndarray]], block_bytes: int) -> None:
        """Whether that many new rows per shard, and bytes of blocks, fit."""
        bytes_needed = block_bytes + sum(table.bytes_needed(missing) for table, missing in missing_by_table)
        exceeds_limit = self._is_limited and bytes_needed > 0 and self.bytes + bytes_needed > self._memory_limit
        if exceeds_limit or not all(table.has_room_for(missing) for table, missing in missing_by_table):
            description = ", ".join(
                f"table {sparse_table.spec.name}: {int(row_counts.sum())} new rows of {sparse_table.layout.stride} bytes"
                for sparse_table, row_counts in missing_by_table
                if row_counts.any()
            )
            raise StoreFull(
                f"{description or 'dense blocks'} need {bytes_needed} bytes, and this server holds {self.bytes} of at most {self._memory_limit}; nothing was "
                f"applied; raise memory=, {'' if self.spill else 'give spill=, '}expire old rows, admit fewer (admit=), store them narrower (stored=) or add servers"
            )


def _free_disk_bytes(folder: Path) -> int:
    """Bytes free where a folder is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
