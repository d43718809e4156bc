"""Deduplicate ids and group them by route."""

from __future__ import annotations

import numpy as np

from echelon.server.kernels.intrinsics import borrow, copy_elements, mix64
from echelon.server.kernels.jit_cache import compiled


@compiled
def all_unique(ids, table):
    """Whether no id occurs twice. `table`: int32 zeros, a power of two of at least twice the ids; left dirty."""
    mask = table.shape[0] - 1
    for i in range(ids.shape[0]):
        slot = np.int64(mix64(np.uint64(ids[i])) & np.uint64(mask))
        while table[slot] != 0:
            if ids[table[slot] - 1] == ids[i]:
                return False
            slot = (slot + 1) & mask
        table[slot] = i + 1
    return True


@compiled
def group_ids(ids, table, shift, route_of_shard, distinct, route_offsets, inverse):
    """Distinct ids by the route of their shard, in each route in order of first occurrence; `inverse`: the place of each id among them.

    `route_offsets`: routes + 2 zeros, filled with where each route starts; shards without a route (65535) come last.
    """
    n = ids.shape[0]
    mask = table.shape[0] - 1
    num_distinct = 0
    num_groups = route_offsets.shape[0] - 1
    group_of = np.empty(n, np.int32)
    for i in range(n):
        row_id = ids[i]
        hashed = mix64(np.uint64(row_id))
        slot = np.int64(hashed & np.uint64(mask))
        while True:
            u = table[slot]
            if u == 0:
                shard = np.int64(hashed >> shift) if shift < 64 else 0
                route = min(np.int64(route_of_shard[shard]), num_groups - 1)
                group_of[num_distinct] = route
                route_offsets[route + 1] += 1
                distinct[num_distinct] = row_id
                num_distinct += 1
                table[slot] = num_distinct
                inverse[i] = num_distinct - 1
                break
            if distinct[u - 1] == row_id:
                inverse[i] = u - 1
                break
            slot = (slot + 1) & mask
    for r in range(num_groups):
        route_offsets[r + 1] += route_offsets[r]
    if route_offsets[1] == num_distinct:
        return num_distinct
    next_positions = route_offsets[:num_groups].copy()
    first_seen = distinct[:num_distinct].copy()
    for u in range(num_distinct):
        r = group_of[u]
        position = next_positions[r]
        next_positions[r] += 1
        distinct[position] = first_seen[u]
        group_of[u] = position
    for i in range(n):
        inverse[i] = group_of[inverse[i]]
    return num_distinct


@compiled
def segment_sum(values, segments, out):
    """Add up the values of each segment, in their order."""
    values, out = borrow(values), borrow(out)
    is_empty = np.ones(out.shape[0], np.uint8)
    for i in range(values.shape[0]):
        segment = segments[i]
        v, o = values[i], out[segment]
        if is_empty[segment]:
            is_empty[segment] = 0
            copy_elements(o, 0, v, 0, v.shape[0])
        else:
            for j in range(v.shape[0]):
                o[j] += v[j]


@compiled
def gather_rows(rows, positions, out):
    """rows[positions].

    Element by element, so that `out` is written from front to end: memcpy, as numpy's take, writes each row's end out of order, and the
    cache then loads lines that are about to be overwritten (4096 rows of 64 floats in a worker's loop: 240 us, this way 70, Neoverse N1).
    """
    rows, out = borrow(rows), borrow(out)
    for i in range(positions.shape[0]):
        row, target = rows[positions[i]], out[i]
        for j in range(row.shape[0]):
            target[j] = row[j]
