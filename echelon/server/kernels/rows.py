"""Many rows at once: read, updated, made."""

from __future__ import annotations

import numpy as np

from echelon.server.kernels.first import initial
from echelon.server.kernels.index import AHEAD, BATCH, LOW, aim, insert, seek, sure, take_row
from echelon.server.kernels.jit_cache import compiling
from echelon.server.kernels.machine import GOLDEN, bare, copy, fetch, mix64
from echelon.server.kernels.narrow import decode, encode, noise
from echelon.server.kernels.places import COUNT_AT, DIM, FIRST, NATIVE, S_AT, STATE, STORED, W_AT, WORDS
from echelon.server.kernels.rules import take_step

_compiled = compiling()


@_compiled
def read(index, starts, masks, shift, ids, known, ring, layout, ri, rc, r4, r2, r1, init, scalars, seed, nearest, out):
    """The weights of each id into `out`; of a row that is not there, those it would be created with.

    known: the row of each id or 0, as far as known; filled in. ring: room for those under way (2, 2 * BATCH).
    """
    index, starts, masks, ids, layout = bare(index), bare(starts), bare(masks), bare(ids), bare(layout)
    ri, rc, r4, r2, r1, out = bare(ri), bare(rc), bare(r4), bare(r2), bare(r1), bare(out)
    nearest, known = bare(nearest), bare(known)
    n = ids.shape[0]
    dim, words, stored = layout[DIM], layout[WORDS], layout[STORED]
    per = 8 // rc.itemsize
    lines = layout[S_AT] // per
    flat = out.reshape(-1)
    shard, low = bare(ring[0]), bare(ring[1])
    aim(index, starts, masks, shift, ids, 0, shard, low, known)
    for first in range(0, n, BATCH):
        size = min(BATCH, n - first)
        aim(index, starts, masks, shift, ids, first + BATCH, shard, low, known)
        seek(index, starts, masks, ri, words, lines, first, size, shard, low, known)
        for i in range(first, first + size):
            row = sure(index, starts, masks, ri, words, ids, i, shard, low, known)
            if row == 0:
                initial(init, scalars[0], scalars[1], seed, ids[i], out[i])
                if stored != NATIVE:
                    encode(out[i], nearest, layout, 0, r4, r2, r1)
                    decode(layout, 0, rc, r4, r2, r1, out[i])
            elif stored == NATIVE:
                copy(flat, i * dim, rc, row * words * per + layout[W_AT], dim)
            else:
                decode(layout, row, rc, r4, r2, r1, out[i])


@_compiled
def update(
    index, starts, masks, shift, ids, known, ring, values, lsns, layout, ri, rc, c, p, switches, scratch, absent
):
    """Rows that are there (and hold weights as the arithmetic's float) updated by their gradients. Ids are unique.

    known, ring: as in `read`. The places of ids that have no row go into `absent`; how many.
    """
    index, starts, masks, ri, ids, known = (
        bare(index),
        bare(starts),
        bare(masks),
        bare(ri),
        bare(ids),
        bare(known),
    )
    rc, values, lsns, scratch = bare(rc), bare(values), bare(lsns), bare(scratch)
    c, p, switches, layout = bare(c), bare(p), bare(switches), bare(layout)
    n = ids.shape[0]
    dim, words = layout[DIM], layout[WORDS]
    per = 8 // rc.itemsize
    shard, low = bare(ring[0]), bare(ring[1])
    missing = 0
    aim(index, starts, masks, shift, ids, 0, shard, low, known)
    for first in range(0, n, BATCH):
        size = min(BATCH, n - first)
        aim(index, starts, masks, shift, ids, first + BATCH, shard, low, known)
        seek(index, starts, masks, ri, words, words, first, size, shard, low, known)
        for i in range(first, first + size):
            row = sure(index, starts, masks, ri, words, ids, i, shard, low, known)
            if row == 0:
                absent[missing] = i
                missing += 1
                continue
            ri[row * words + 1] = lsns[shard[i & (2 * BATCH - 1)]]
            at = row * words * per
            w = rc[at + layout[W_AT] : at + layout[W_AT] + dim]
            state = rc[at + layout[S_AT] : at + layout[S_AT] + layout[STATE]]
            take_step(c, p, switches, w, values[i], state, scratch)
    return missing


@_compiled
def apply(
    index, starts, masks, used, shift, free, ids, where, values, lsns, layout, ri, rc, r4, r2, r1, init, scalars, seed,
    c, p, switches, scratch, nearest, draws, setting,
):  # fmt: skip
    """Each row updated by its gradient, or set to its value (`setting`: 1); those that are not there are made. Ids are unique."""
    rc, r4, r2, r1, values, scratch = bare(rc), bare(r4), bare(r2), bare(r1), bare(values), bare(scratch)
    c, p, switches, layout = bare(c), bare(p), bare(switches), bare(layout)
    index, starts, masks, ri, free = bare(index), bare(starts), bare(masks), bare(ri), bare(free)
    nearest, draws = bare(nearest), bare(draws)
    n = ids.shape[0]
    dim, words, stored = layout[DIM], layout[WORDS], layout[STORED]
    per = 8 // rc.itemsize
    first = c[FIRST]
    own = scratch[:dim]
    more = scratch[dim:]
    for i in range(n):
        if i + AHEAD < n:
            row = where[i + AHEAD]
            for k in range(0, words, 8):
                fetch(ri, row * words + k)
        row = where[i]
        own_id = ids[i]
        h = mix64(np.uint64(own_id))
        s = np.int64(h >> shift) if shift < 64 else 0
        made = row == 0
        if made:
            row = take_row(ri, words, free)
            insert(index, starts[s], masks[s], h & LOW, np.uint64(row))
            used[s] += 1
            ri[row * words] = own_id
        ri[row * words + 1] = lsns[s]
        at = row * words * per + layout[S_AT]
        state = rc[at : at + layout[STATE]]
        if made or setting:
            for j in range(layout[STATE]):
                state[j] = first
            if switches[COUNT_AT] >= 0:
                state[switches[COUNT_AT]] = 0
        w = own
        if stored == NATIVE:
            at = row * words * per + layout[W_AT]
            w = rc[at : at + dim]
        if setting:
            for j in range(dim):
                w[j] = values[i, j]
        elif made:
            initial(init, scalars[0], scalars[1], seed, own_id, w)
        if stored != NATIVE:
            if made or setting:
                encode(w, nearest, layout, row, r4, r2, r1)
            decode(layout, row, rc, r4, r2, r1, w)
        if not setting:
            take_step(c, p, switches, w, values[i], state, more)
            if stored != NATIVE:
                noise(mix64(mix64(np.uint64(own_id) ^ GOLDEN) + np.uint64(lsns[s])), draws)
                encode(w, draws, layout, row, r4, r2, r1)
