"""A shard as parts that travel: copied from a store, checked on arrival, and a digest to compare shards by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.grouped_ids import make_hash_table
from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.specs import Dense, StoreError, Table, spec_to_plain
from echelon.server.store import SnapshotPart
from echelon.server.store.dense_param import DenseBlock, DenseParameter
from echelon.server.store.lazy_updates import LazySparseTable, UpdateHistory, history_from_runs
from echelon.server.store.row_layout import as_kernel_array, state_layout
from echelon.server.store.sparse_table import SparseTable

SNAPSHOT_PART_BYTES = 1 << 20  # about how many bytes one part of a snapshot has
#: Tables with their rows, dense parameters with a block, lazy tables with their history.
ParsedParts = tuple[
    list[tuple[SparseTable, list[np.ndarray]]],
    list[tuple[DenseParameter, int, DenseBlock]],
    list[tuple[LazySparseTable, UpdateHistory]],
]


class Contents(NamedTuple):
    """What a store holds, by name: tables, counts of the ids that wait for admission to them, dense parameters."""

    rows: Mapping[str, SparseTable]
    waiting: Mapping[str, SparseTable]
    dense: Mapping[str, DenseParameter]

    def tables(self) -> list[SparseTable]:
        return [*self.rows.values(), *self.waiting.values()]


def _iterate_parts(shard: int, contents: Contents, sort: bool = False) -> Iterator[tuple[SnapshotPart, Table | Dense]]:
    """Update histories, rows (by id if `sort`), admission counts, and blocks (whose values are copied on write)."""
    for name, table in sorted(contents.rows.items()):
        if isinstance(table, LazySparseTable) and table.get_history(shard).count:
            yield ({"kind": "course", "name": name}, list(table.get_history(shard).to_rate_runs())), table.spec
    for kind, tables in (("rows", contents.rows), ("waiting", contents.waiting)):
        for name, table in sorted(tables.items()):
            row_numbers = table.rows_of_shard(shard)
            if sort:
                row_numbers = row_numbers[np.argsort(table.read_column(row_numbers, 0))]
            rows_per_part = max(1, SNAPSHOT_PART_BYTES // table.layout.stride)
            for first in range(0, len(row_numbers), rows_per_part):
                rows = table.export_rows(row_numbers[first : first + rows_per_part])
                yield ({"kind": kind, "name": name}, [rows]), table.spec
    for name, dense in sorted(contents.dense.items()):
        for block in dense.blocks_of_shard(shard):
            stored = dense.blocks[block]
            meta = {"kind": "block", "name": name, "block": block, "lsn": stored.lsn}
            yield (meta, [dense.read(block), stored.state.copy()]), dense.spec


def snapshot(shard: int, contents: Contents) -> list[SnapshotPart]:
    """A copy of a shard, in parts."""
    return [part for part, _ in _iterate_parts(shard, contents)]


def digest(shard: int, contents: Contents) -> bytes:
    """SHA-256 of specs and contents, with rows in the order of ids; empty tables do not count."""
    hasher = hashlib.sha256()
    for (meta, arrays), spec in _iterate_parts(shard, contents, sort=True):
        header = [meta, spec_to_plain(spec), [len(array) for array in arrays]]
        hasher.update(json.dumps(header, sort_keys=True).encode())
        for array in arrays:
            hasher.update(array.data)
    return hasher.digest()


def parse_parts(shard: int, parts: Sequence[SnapshotPart], contents: Contents) -> ParsedParts:
    """The contents of parts; StoreError unless all of it belongs to this shard and to what is declared here."""
    tables: dict[tuple[str, str], tuple[SparseTable, list[np.ndarray]]] = {}
    blocks, histories = [], []
    for meta, arrays in parts:
        kind, name = meta["kind"], meta["name"]
        if kind == "block":
            blocks.append(_parse_block(shard, meta, arrays, contents.dense.get(name)))
        elif kind == "course":
            lazy_table, (ends, rates) = contents.rows.get(name), arrays
            if not isinstance(lazy_table, LazySparseTable):
                raise _undeclared(f"{name}: a lazy table", shard)
            histories.append((lazy_table, history_from_runs(lazy_table.spec, ends, rates)))
        else:
            table = (contents.rows if kind == "rows" else contents.waiting).get(name)
            if table is None:
                raise _undeclared(f"{name}: {kind} of a table", shard)
            tables.setdefault((kind, name), (table, []))[1].append(_parse_rows(shard, table, arrays[0]))
    for table, chunks in tables.values():
        ids = np.concatenate([chunk[:, 0] for chunk in chunks])
        if not k.all_unique(ids, make_hash_table(len(ids))):
            raise StoreError(f"{table.spec.name}: duplicate ids in a snapshot of shard {shard}; was a part sent twice?")
    return list(tables.values()), blocks, histories


def _undeclared(what: str, shard: int) -> StoreError:
    return StoreError(f"{what} that is not declared here; declare it before installing shard {shard}")


def _parse_rows(shard: int, table: SparseTable, rows: np.ndarray) -> np.ndarray:
    name = table.spec.name
    if rows.ndim != 2 or rows.dtype != np.int64 or rows.shape[1] != table.words:
        raise StoreError(f"{name}: rows of shape {rows.shape} {rows.dtype}; expected (n, {table.words}) int64")
    if (shard_of(rows[:, 0], table.num_shards) != shard).any():
        raise StoreError(f"{name}: rows of other shards in a snapshot of shard {shard}; was the data mixed up?")
    return as_kernel_array(rows, np.int64)


def _parse_block(
    shard: int, meta: Mapping[str, Any], arrays: Sequence[np.ndarray], dense: DenseParameter | None
) -> tuple[DenseParameter, int, DenseBlock]:
    name, block = meta["name"], int(meta["block"])
    if dense is None:
        raise _undeclared(f"{name}: a block of a parameter", shard)
    length, (values, state) = dense.spec.block_length(block), arrays
    dtype, state_size = np.dtype(dense.spec.dtype), state_layout(dense.spec.rule, length)[0]
    actual = [(array.shape, array.dtype) for array in (values, state)]
    if actual != [((length,), dtype), ((state_size,), dtype)]:
        expected = f"{length} values and {state_size} of state, {dtype}"
        raise StoreError(f"{name}: block {block} is {actual}; expected {expected}")
    home = dense.shard_of_block[block]
    if home != shard:
        raise StoreError(f"{name}: block {block} belongs to shard {home}, not {shard}; was the data mixed up?")
    return dense, block, DenseBlock(values.copy(), state.copy(), int(meta["lsn"]))
