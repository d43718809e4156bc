"""A shard on its way from one store to another: its parts, what is wrong with parts that came, and a digest to compare by."""

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
from echelon.server.store.dense_param import DenseBlock, DenseParameter
from echelon.server.store.lazy_updates import LazySparseTable, UpdateHistory, history_from_runs
from echelon.server.store.sparse_table import SparseTable, state_layout

#: About how many bytes one part of a snapshot has.
SNAPSHOT_PART_BYTES = 1 << 20
SnapshotPart = tuple[dict[str, Any], list[np.ndarray]]
Tables = Mapping[str, SparseTable]
ParsedParts = tuple[
    list[tuple[SparseTable, list[np.ndarray]]],
    list[tuple[DenseParameter, int, DenseBlock]],
    list[tuple[LazySparseTable, UpdateHistory]],
]


def snapshot(
    shard: int, rows: Tables, admission_counts: Tables, dense: Mapping[str, DenseParameter]
) -> list[SnapshotPart]:
    """Copies of all rows, of the counts of ids that wait for admission, and of blocks: values are kept by copy on write."""
    parts: list[SnapshotPart] = [
        ({"kind": "course", "name": table.spec.name}, list(history.to_rate_runs()))
        for table, history in _iterate_histories(shard, rows)
    ]
    for kind, tables in (("rows", rows), ("waiting", admission_counts)):
        for name in sorted(tables):
            parts += [
                ({"kind": kind, "name": name}, [chunk])
                for chunk in _iterate_row_chunks(tables[name], tables[name].rows_of_shard(shard))
            ]
    for parameter in _sorted_by_name(dense):
        for block in parameter.blocks_of_shard(shard):
            stored = parameter.blocks[block]
            meta = {"kind": "block", "name": parameter.spec.name, "block": block, "lsn": stored.lsn}
            parts.append((meta, [parameter.read(block), stored.state.copy()]))
    return parts


def digest(shard: int, rows: Tables, admission_counts: Tables, dense: Mapping[str, DenseParameter]) -> bytes:
    """SHA-256 of specs, rows in the order of ids, and blocks; what is declared and empty does not count."""
    hasher = hashlib.sha256()
    for lazy_table, history in _iterate_histories(shard, rows):
        ends, rates = history.to_rate_runs()
        hasher.update(json.dumps(["course", spec_to_plain(lazy_table.spec), len(ends)], sort_keys=True).encode())
        hasher.update(ends.data)
        hasher.update(rates.data)
    for kind, tables in (("rows", rows), ("waiting", admission_counts)):
        for name in sorted(tables):
            table = tables[name]
            row_numbers = table.rows_in_id_order(shard)
            if len(row_numbers):
                hasher.update(json.dumps([kind, spec_to_plain(table.spec), len(row_numbers)], sort_keys=True).encode())
            for chunk in _iterate_row_chunks(table, row_numbers):
                hasher.update(chunk.data)
    for parameter in _sorted_by_name(dense):
        for block in parameter.blocks_of_shard(shard):
            stored = parameter.blocks[block]
            hasher.update(
                json.dumps(["block", spec_to_plain(parameter.spec), block, stored.lsn], sort_keys=True).encode()
            )
            hasher.update(stored.values.data)
            hasher.update(stored.state.data)
    return hasher.digest()


def parse_parts(
    shard: int,
    parts: Sequence[SnapshotPart],
    rows: Tables,
    admission_counts: Tables,
    dense: Mapping[str, DenseParameter],
) -> ParsedParts:
    """What parts hold, if all of it is of this shard and of what is declared here."""
    tables: dict[tuple[str, str], tuple[SparseTable, list[np.ndarray]]] = {}
    blocks = []
    histories = []
    for meta, arrays in parts:
        kind, name = meta["kind"], meta["name"]
        if kind == "block":
            blocks.append(_parse_block(shard, meta, arrays, dense))
            continue
        if kind == "course":
            histories.append(_parse_history(shard, rows.get(name), name, arrays))
            continue
        table = (rows if kind == "rows" else admission_counts).get(name)
        if table is None:
            raise StoreError(
                f"{name}: {kind} of a table that is not declared here; declare it before installing shard {shard}"
            )
        tables.setdefault((kind, name), (table, []))[1].append(_parse_rows(shard, table, arrays[0]))
    for table, chunks in tables.values():
        ids = np.concatenate([chunk[:, 0] for chunk in chunks])
        if not k.all_unique(ids, make_hash_table(len(ids))):
            raise StoreError(
                f"{table.spec.name}: ids twice in a snapshot of shard {shard}; was a part of it sent twice?"
            )
    return list(tables.values()), blocks, histories


def _iterate_histories(shard: int, rows: Tables) -> Iterator[tuple[LazySparseTable, UpdateHistory]]:
    """Of the tables all of whose rows move: the updates that they have had in this shard, if any."""
    for name in sorted(rows):
        table = rows[name]
        if isinstance(table, LazySparseTable) and table.get_history(shard).count:
            yield table, table.get_history(shard)


def _parse_history(
    shard: int, table: SparseTable | None, name: str, arrays: Sequence[np.ndarray]
) -> tuple[LazySparseTable, UpdateHistory]:
    if not isinstance(table, LazySparseTable):
        raise StoreError(
            f"{name}: updates of a table that is not declared here with rule.every; declare it before installing shard {shard}"
        )
    ends, rates = arrays
    return table, history_from_runs(table.spec, ends, rates)


def _parse_rows(shard: int, table: SparseTable, rows: np.ndarray) -> np.ndarray:
    name = table.spec.name
    if rows.ndim != 2 or rows.dtype != np.int64 or rows.shape[1] != table.words:
        raise StoreError(f"{name}: rows of shape {rows.shape} {rows.dtype}; expected (n, {table.words}) int64")
    if (shard_of(rows[:, 0], table.num_shards) != shard).any():
        raise StoreError(f"{name}: rows of other shards than {shard} in a snapshot of it; was it mixed up on the way?")
    rows = np.ascontiguousarray(rows)
    return rows if rows.flags.writeable else rows.copy()


def _parse_block(
    shard: int, meta: Mapping[str, Any], arrays: Sequence[np.ndarray], dense: Mapping[str, DenseParameter]
) -> tuple[DenseParameter, int, DenseBlock]:
    name, block = meta["name"], int(meta["block"])
    parameter = dense.get(name)
    if parameter is None:
        raise StoreError(
            f"{name}: a block of a parameter that is not declared here; declare it before installing shard {shard}"
        )
    length = parameter.spec.block_length(block)
    state_size, dtype = state_layout(parameter.spec.rule, length)[0], np.dtype(parameter.spec.dtype)
    values, state = arrays
    if values.shape != (length,) or state.shape != (state_size,) or values.dtype != dtype or state.dtype != dtype:
        raise StoreError(
            f"{name}: block {block} of {values.shape} {values.dtype} with {state.shape}; expected {length} and {state_size} of {dtype}"
        )
    if parameter.shard_of_block[block] != shard:
        raise StoreError(
            f"{name}: block {block} is of shard {parameter.shard_of_block[block]}, not of {shard}; was it mixed up on the way?"
        )
    return parameter, block, DenseBlock(values.copy(), state.copy(), int(meta["lsn"]))


def _iterate_row_chunks(table: SparseTable, row_numbers: np.ndarray) -> Iterator[np.ndarray]:
    rows_per_chunk = max(1, SNAPSHOT_PART_BYTES // table.layout.stride)
    for first in range(0, len(row_numbers), rows_per_chunk):
        yield table.export_rows(row_numbers[first : first + rows_per_chunk])


def _sorted_by_name(dense: Mapping[str, DenseParameter]) -> list[DenseParameter]:
    return [dense[name] for name in sorted(dense)]
