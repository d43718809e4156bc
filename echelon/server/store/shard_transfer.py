"""A shard on its way from one store to another: its parts, what is wrong with parts that came, and a digest to compare by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from echelon.server import kernels as k
from echelon.server.client.combine import table_for
from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.specs import StoreError, spec_to_plain
from echelon.server.store.dense_param import Block, Blocks
from echelon.server.store.lazy_updates import Course, Moving, course_of
from echelon.server.store.sparse_table import Rows, state_of

#: About how many bytes one part of a snapshot has.
PART = 1 << 20
Part = tuple[dict[str, Any], list[np.ndarray]]
Tables = Mapping[str, Rows]
Arrived = tuple[list[tuple[Rows, list[np.ndarray]]], list[tuple[Blocks, int, Block]], list[tuple[Moving, Course]]]


def snapshot(shard: int, rows: Tables, waiting: Tables, dense: Mapping[str, Blocks]) -> list[Part]:
    """Copies of all rows, of the counts of ids that wait for admission, and of blocks: values are kept by copy on write."""
    parts: list[Part] = [
        ({"kind": "course", "name": moving.spec.name}, list(course.runs())) for moving, course in _courses(shard, rows)
    ]
    for kind, tables in (("rows", rows), ("waiting", waiting)):
        for name in sorted(tables):
            parts += [
                ({"kind": kind, "name": name}, [chunk]) for chunk in _chunks(tables[name], tables[name].of(shard))
            ]
    for blocks in _sorted(dense):
        for block in blocks.of(shard):
            held = blocks.held[block]
            meta = {"kind": "block", "name": blocks.spec.name, "block": block, "lsn": held.lsn}
            parts.append((meta, [blocks.read(block), held.state.copy()]))
    return parts


def digest(shard: int, rows: Tables, waiting: Tables, dense: Mapping[str, Blocks]) -> bytes:
    """SHA-256 of specs, rows in the order of ids, and blocks; what is declared and empty does not count."""
    total = hashlib.sha256()
    for moving, course in _courses(shard, rows):
        ends, rates = course.runs()
        total.update(json.dumps(["course", spec_to_plain(moving.spec), len(ends)], sort_keys=True).encode())
        total.update(ends.data)
        total.update(rates.data)
    for kind, tables in (("rows", rows), ("waiting", waiting)):
        for name in sorted(tables):
            table = tables[name]
            numbers = table.sorted(shard)
            if len(numbers):
                total.update(json.dumps([kind, spec_to_plain(table.spec), len(numbers)], sort_keys=True).encode())
            for chunk in _chunks(table, numbers):
                total.update(chunk.data)
    for blocks in _sorted(dense):
        for block in blocks.of(shard):
            held = blocks.held[block]
            total.update(json.dumps(["block", spec_to_plain(blocks.spec), block, held.lsn], sort_keys=True).encode())
            total.update(held.values.data)
            total.update(held.state.data)
    return total.digest()


def arrived(shard: int, parts: Sequence[Part], rows: Tables, waiting: Tables, dense: Mapping[str, Blocks]) -> Arrived:
    """What parts hold, if all of it is of this shard and of what is declared here."""
    tables: dict[tuple[str, str], tuple[Rows, list[np.ndarray]]] = {}
    blocks = []
    courses = []
    for meta, arrays in parts:
        kind, name = meta["kind"], meta["name"]
        if kind == "block":
            blocks.append(_block(shard, meta, arrays, dense))
            continue
        if kind == "course":
            courses.append(_course(shard, rows.get(name), name, arrays))
            continue
        table = (rows if kind == "rows" else waiting).get(name)
        if table is None:
            raise StoreError(
                f"{name}: {kind} of a table that is not declared here; declare it before installing shard {shard}"
            )
        tables.setdefault((kind, name), (table, []))[1].append(_rows(shard, table, arrays[0]))
    for table, chunks in tables.values():
        ids = np.concatenate([chunk[:, 0] for chunk in chunks])
        if not k.unique(ids, table_for(len(ids))):
            raise StoreError(
                f"{table.spec.name}: ids twice in a snapshot of shard {shard}; was a part of it sent twice?"
            )
    return list(tables.values()), blocks, courses


def _courses(shard: int, rows: Tables) -> Iterator[tuple[Moving, Course]]:
    """Of the tables all of whose rows move: the updates that they have had in this shard, if any."""
    for name in sorted(rows):
        table = rows[name]
        if isinstance(table, Moving) and table.course(shard).now:
            yield table, table.course(shard)


def _course(shard: int, table: Rows | None, name: str, arrays: Sequence[np.ndarray]) -> tuple[Moving, Course]:
    if not isinstance(table, Moving):
        raise StoreError(
            f"{name}: updates of a table that is not declared here with rule.every; declare it before installing shard {shard}"
        )
    ends, rates = arrays
    return table, course_of(table.spec, ends, rates)


def _rows(shard: int, table: Rows, rows: np.ndarray) -> np.ndarray:
    name = table.spec.name
    if rows.ndim != 2 or rows.dtype != np.int64 or rows.shape[1] != table.words:
        raise StoreError(f"{name}: rows of shape {rows.shape} {rows.dtype}; expected (n, {table.words}) int64")
    if (shard_of(rows[:, 0], table.shards) != shard).any():
        raise StoreError(f"{name}: rows of other shards than {shard} in a snapshot of it; was it mixed up on the way?")
    rows = np.ascontiguousarray(rows)
    return rows if rows.flags.writeable else rows.copy()


def _block(
    shard: int, meta: Mapping[str, Any], arrays: Sequence[np.ndarray], dense: Mapping[str, Blocks]
) -> tuple[Blocks, int, Block]:
    name, block = meta["name"], int(meta["block"])
    blocks = dense.get(name)
    if blocks is None:
        raise StoreError(
            f"{name}: a block of a parameter that is not declared here; declare it before installing shard {shard}"
        )
    length = blocks.spec.length(block)
    states, kind = state_of(blocks.spec.rule, length)[0], np.dtype(blocks.spec.dtype)
    values, state = arrays
    if values.shape != (length,) or state.shape != (states,) or values.dtype != kind or state.dtype != kind:
        raise StoreError(
            f"{name}: block {block} of {values.shape} {values.dtype} with {state.shape}; expected {length} and {states} of {kind}"
        )
    if blocks.shard[block] != shard:
        raise StoreError(
            f"{name}: block {block} is of shard {blocks.shard[block]}, not of {shard}; was it mixed up on the way?"
        )
    return blocks, block, Block(values.copy(), state.copy(), int(meta["lsn"]))


def _chunks(table: Rows, numbers: np.ndarray) -> Iterator[np.ndarray]:
    size = max(1, PART // table.layout.stride)
    for first in range(0, len(numbers), size):
        yield table.whole(numbers[first : first + size])


def _sorted(dense: Mapping[str, Blocks]) -> list[Blocks]:
    return [dense[name] for name in sorted(dense)]
