"""Ids that come more than once, and in the order of their routes."""

from __future__ import annotations

import numpy as np

from echelon.server.kernels.jit_cache import compiling
from echelon.server.kernels.machine import bare, copy, mix64

_compiled = compiling()


@_compiled
def unique(ids, table):
    """Whether no id is there twice. table: int32 zeros, a power of two of at least twice as many; left dirty."""
    mask = table.shape[0] - 1
    for i in range(ids.shape[0]):
        at = np.int64(mix64(np.uint64(ids[i])) & np.uint64(mask))
        while table[at] != 0:
            if ids[table[at] - 1] == ids[i]:
                return False
            at = (at + 1) & mask
        table[at] = i + 1
    return True


@_compiled
def group(ids, table, shift, routes, distinct, bounds, place):
    """The distinct ids in the order of their shard's route (in a route: as they first come), and where each id went.

    bounds: zeros, routes + 2, filled with where each route starts; shards of no route (65535) are the last one.
    """
    n = ids.shape[0]
    mask = table.shape[0] - 1
    found = 0
    parts = bounds.shape[0] - 1
    chosen = np.empty(n, np.int32)
    for i in range(n):
        own_id = ids[i]
        h = mix64(np.uint64(own_id))
        at = np.int64(h & np.uint64(mask))
        while True:
            u = table[at]
            if u == 0:
                s = np.int64(h >> shift) if shift < 64 else 0
                route = min(np.int64(routes[s]), parts - 1)
                chosen[found] = route
                bounds[route + 1] += 1
                distinct[found] = own_id
                found += 1
                table[at] = found
                place[i] = found - 1
                break
            if distinct[u - 1] == own_id:
                place[i] = u - 1
                break
            at = (at + 1) & mask
    for r in range(parts):
        bounds[r + 1] += bounds[r]
    if bounds[1] == found:
        return found
    nexts = bounds[:parts].copy()
    old = distinct[:found].copy()
    for u in range(found):
        r = chosen[u]
        to = nexts[r]
        nexts[r] += 1
        distinct[to] = old[u]
        chosen[u] = to
    for i in range(n):
        place[i] = chosen[place[i]]
    return found


@_compiled
def add_up(values, place, out):
    """The sum of the values of each place, in the order in which they come."""
    values, out = bare(values), bare(out)
    fresh = np.ones(out.shape[0], np.uint8)
    for i in range(values.shape[0]):
        at = place[i]
        v, o = values[i], out[at]
        if fresh[at]:
            fresh[at] = 0
            copy(o, 0, v, 0, v.shape[0])
        else:
            for j in range(v.shape[0]):
                o[j] += v[j]


@_compiled
def take(rows, place, out):
    """The row of each place, in the order of the places.

    Element by element, so that all of `out` is written from its front to its end: `copy`, as numpy's own take, writes each row's end out
    of turn, and the cache then reads first what is written over (4096 rows of 64 floats in a worker's loop: 240 us, so 70, Neoverse N1).
    """
    rows, out = bare(rows), bare(out)
    for i in range(place.shape[0]):
        row, to = rows[place[i]], out[i]
        for j in range(row.shape[0]):
            to[j] = row[j]
