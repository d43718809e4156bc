"""A shard as parts that travel: copied from a store, checked on arrival, and a digest to compare shards by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.grouped_ids import make_hash_table
from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.specs import StoreError, spec_to_plain
from echelon.server.store import SnapshotPart
from echelon.server.store.dense_param import DenseBlock, DenseParameter
from echelon.server.store.lazy_updates import LazySparseTable, UpdateHistory, history_from_runs
from echelon.server.store.row_layout import state_layout
from echelon.server.store.sparse_table import SparseTable

#: About how many bytes one part of a snapshot has.
SNAPSHOT_PART_BYTES = 1 << 20
Tables = Mapping[str, SparseTable]
DenseParameters = Mapping[str, DenseParameter]
#: Tables with their rows, dense parameters with a block, lazy tables with their history.
ParsedParts = tuple[
    list[tuple[SparseTable, list[np.ndarray]]],
    list[tuple[DenseParameter, int, DenseBlock]],
    list[tuple[LazySparseTable, UpdateHistory]],
]


def snapshot(shard: int, rows: Tables, admission_counts: Tables, dense: DenseParameters) -> list[SnapshotPart]:
    """Copies of update histories, rows, admission counts, and blocks (whose values are copied on write)."""
    parts: list[SnapshotPart] = [
        ({"kind": "course", "name": table.spec.name}, list(history.to_rate_runs()))
        for table, history in _iterate_histories(shard, rows)
    ]
    for kind, tables in (("rows", rows), ("waiting", admission_counts)):
        for name, table in sorted(tables.items()):
            chunks = _iterate_row_chunks(table, table.rows_of_shard(shard))
            parts += [({"kind": kind, "name": name}, [chunk]) for chunk in chunks]
    for name, parameter in sorted(dense.items()):
        for block in parameter.blocks_of_shard(shard):
            stored = parameter.blocks[block]
            meta = {"kind": "block", "name": name, "block": block, "lsn": stored.lsn}
            parts.append((meta, [parameter.read(block), stored.state.copy()]))
    return parts


def digest(shard: int, rows: Tables, admission_counts: Tables, dense: DenseParameters) -> bytes:
    """SHA-256 of specs, histories, rows in the order of ids, and blocks; empty tables do not count."""
    hasher = hashlib.sha256()

    def update(kind: str, table: SparseTable | DenseParameter, *details: int) -> None:
        hasher.update(json.dumps([kind, spec_to_plain(table.spec), *details], sort_keys=True).encode())

    for lazy_table, history in _iterate_histories(shard, rows):
        ends, rates = history.to_rate_runs()
        update("course", lazy_table, len(ends))
        hasher.update(ends.data)
        hasher.update(rates.data)
    for kind, tables in (("rows", rows), ("waiting", admission_counts)):
        for _, table in sorted(tables.items()):
            row_numbers = table.rows_in_id_order(shard)
            if len(row_numbers):
                update(kind, table, len(row_numbers))
            for chunk in _iterate_row_chunks(table, row_numbers):
                hasher.update(chunk.data)
    for _, parameter in sorted(dense.items()):
        for block in parameter.blocks_of_shard(shard):
            stored = parameter.blocks[block]
            update("block", parameter, block, stored.lsn)
            hasher.update(stored.values.data)
            hasher.update(stored.state.data)
    return hasher.digest()


def parse_parts(
    shard: int, parts: Sequence[SnapshotPart], rows: Tables, admission_counts: Tables, dense: DenseParameters
) -> ParsedParts:
    """The contents of parts; StoreError unless all of it belongs to this shard and to what is declared here."""
    tables: dict[tuple[str, str], tuple[SparseTable, list[np.ndarray]]] = {}
    blocks, histories = [], []
    for meta, arrays in parts:
        kind, name = meta["kind"], meta["name"]
        if kind == "block":
            blocks.append(_parse_block(shard, meta, arrays, dense.get(name)))
        elif kind == "course":
            lazy_table, (ends, rates) = rows.get(name), arrays
            if not isinstance(lazy_table, LazySparseTable):
                raise _undeclared(f"{name}: a lazy table", shard)
            histories.append((lazy_table, history_from_runs(lazy_table.spec, ends, rates)))
        else:
            table = (rows if kind == "rows" else admission_counts).get(name)
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


def _iterate_histories(shard: int, rows: Tables) -> Iterator[tuple[LazySparseTable, UpdateHistory]]:
    """The lazy tables that have had updates in this shard."""
    for _, table in sorted(rows.items()):
        if isinstance(table, LazySparseTable) and table.get_history(shard).count:
            yield table, table.get_history(shard)


def _parse_rows(shard: int, table: SparseTable, rows: np.ndarray) -> np.ndarray:
    name = table.spec.name
    if rows.ndim != 2 or rows.dtype != np.int64 or rows.shape[1] != table.words:
        raise StoreError(f"{name}: rows of shape {rows.shape} {rows.dtype}; expected (n, {table.words}) int64")
    if (shard_of(rows[:, 0], table.num_shards) != shard).any():
        raise StoreError(f"{name}: rows of other shards in a snapshot of shard {shard}; was the data mixed up?")
    rows = np.ascontiguousarray(rows)
    return rows if rows.flags.writeable else rows.copy()


def _parse_block(
    shard: int, meta: Mapping[str, Any], arrays: Sequence[np.ndarray], parameter: DenseParameter | None
) -> tuple[DenseParameter, int, DenseBlock]:
    name, block = meta["name"], int(meta["block"])
    if parameter is None:
        raise _undeclared(f"{name}: a block of a parameter", shard)
    length = parameter.spec.block_length(block)
    state_size, dtype = state_layout(parameter.spec.rule, length)[0], np.dtype(parameter.spec.dtype)
    values, state = arrays
    if values.shape != (length,) or state.shape != (state_size,) or values.dtype != dtype or state.dtype != dtype:
        raise StoreError(
            f"{name}: block {block} of {values.shape} {values.dtype} with {state.shape}; expected {length} and {state_size} of {dtype}"
        )
    if parameter.shard_of_block[block] != shard:
        home = parameter.shard_of_block[block]
        raise StoreError(f"{name}: block {block} belongs to shard {home}, not {shard}; was the data mixed up?")
    return parameter, block, DenseBlock(values.copy(), state.copy(), int(meta["lsn"]))


def _iterate_row_chunks(table: SparseTable, row_numbers: np.ndarray) -> Iterator[np.ndarray]:
    rows_per_chunk = max(1, SNAPSHOT_PART_BYTES // table.layout.stride)
    for first in range(0, len(row_numbers), rows_per_chunk):
        yield table.export_rows(row_numbers[first : first + rows_per_chunk])
