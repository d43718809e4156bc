"""Which row an id has. The index of a shard is a power of two of uint64 slots: the hash's low 32 bits above the row's number; 0 is empty; linear probing."""

from __future__ import annotations

import numpy as np

from echelon.server.kernels.jit_cache import compiling
from echelon.server.kernels.machine import bare, copy, fetch, mix64

LOW = np.uint64(0xFFFFFFFF)
#: How many rows ahead a loop over rows fetches.
AHEAD = 6
#: Ids whose slots and rows are fetched ahead of their use: tight loops over so many, because a wrong guess in one stage of a loop over
#: all stages would throw away the work of the others.
BATCH = 32

_compiled = compiling()
_inlined = compiling(forceinline=True)


@_inlined
def aim(index, starts, masks, shift, ids, first, shard, low, known):
    """Hashes a batch of ids and asks for the slots of those whose row is not known; `shard` and `low` hold two batches, in turns."""
    for i in range(first, min(first + BATCH, ids.shape[0])):
        h = mix64(np.uint64(ids[i]))
        s = np.int64(h >> shift) if shift < 64 else 0
        tag = np.int64(h & LOW)
        shard[i & (2 * BATCH - 1)] = s
        low[i & (2 * BATCH - 1)] = tag
        if known[i] == 0:
            fetch(index, starts[s] + (tag & masks[s]))


@_inlined
def seek(index, starts, masks, ri, words, lines, first, size, shard, low, known):
    """Of a batch that was aimed at: the row that is likely each id's own (0: none), whose lines are asked for."""
    for i in range(first, first + size):
        k = i & (2 * BATCH - 1)
        row = known[i]
        if row == 0:
            start, mask = starts[shard[k]], masks[shard[k]]
            tag = np.uint64(low[k])
            at = low[k] & mask
            while True:
                slot = index[start + at]
                if slot == 0:
                    break
                if slot >> np.uint64(32) == tag:
                    row = np.int64(slot & LOW)
                    break
                at = (at + 1) & mask
            known[i] = row
        for j in range(0, lines, 8):
            fetch(ri, row * words + j)


@_inlined
def sure(index, starts, masks, ri, words, ids, i, shard, low, known):
    """The row that is an id's own: the one found, or one behind it where another id has the same 32 bits, which is rare."""
    row = known[i]
    if row != 0 and ri[row * words] != ids[i]:
        s, tag = shard[i & (2 * BATCH - 1)], low[i & (2 * BATCH - 1)]
        row = _probe(index, starts[s], masks[s], tag & masks[s], np.uint64(tag), ri, words, ids[i])
        known[i] = row
    return row


@_compiled
def find(index, starts, masks, shift, ri, words, ids, where, ring, missing):
    """The row of each id into `where` (zeros), 0 if there is none; how many there are none of, and per shard in `missing`."""
    index, starts, masks, ri, ids, where = (
        bare(index),
        bare(starts),
        bare(masks),
        bare(ri),
        bare(ids),
        bare(where),
    )
    n = ids.shape[0]
    shard, low = bare(ring[0]), bare(ring[1])
    absent = 0
    aim(index, starts, masks, shift, ids, 0, shard, low, where)
    for first in range(0, n, BATCH):
        size = min(BATCH, n - first)
        aim(index, starts, masks, shift, ids, first + BATCH, shard, low, where)
        seek(index, starts, masks, ri, words, 1, first, size, shard, low, where)
        for i in range(first, first + size):
            if sure(index, starts, masks, ri, words, ids, i, shard, low, where) == 0:
                absent += 1
                missing[shard[i & (2 * BATCH - 1)]] += 1
    return absent


@_compiled
def _probe(index, start, mask, at, tag, ri, words, wanted):
    while True:
        at &= mask
        slot = index[start + at]
        if slot == 0:
            return 0
        if slot >> np.uint64(32) == tag:
            row = np.int64(slot & LOW)
            if ri[row * words] == wanted:
                return row
        at += 1


@_inlined
def insert(index, start, mask, tag, row):
    at = np.int64(tag) & mask
    while index[start + at] != 0:
        at = (at + 1) & mask
    index[start + at] = (tag << np.uint64(32)) | np.uint64(row)


@_compiled
def move(index, start, mask, to, to_mask):
    """A shard's slots into a larger region, which is empty; the old one is left as it was."""
    for at in range(start, start + mask + 1):
        slot = index[at]
        if slot != 0:
            insert(index, to, to_mask, slot >> np.uint64(32), slot & LOW)


@_inlined
def take_row(ri, words, free):
    """A row that is not in use. free: the first of the chain of rows given back, the first never used, the chain's length."""
    row = free[0]
    if row != 0:
        free[0] = ri[row * words]
        free[2] -= 1
    else:
        row = free[1]
        free[1] += 1
    return row


@_compiled
def remove(index, starts, masks, used, shift, ri, words, free, ids):
    """Takes ids out of the index and their rows back, those that are here; what follows in a probe's way moves up: no tombs."""
    for wanted in ids:
        h = mix64(np.uint64(wanted))
        s = np.int64(h >> shift) if shift < 64 else 0
        start, mask, tag = starts[s], masks[s], h & LOW
        at = np.int64(tag) & mask
        while True:
            slot = index[start + at]
            if slot == 0 or (slot >> np.uint64(32) == tag and ri[np.int64(slot & LOW) * words] == wanted):
                break
            at = (at + 1) & mask
        if slot == 0:
            continue
        row = np.int64(slot & LOW)
        for k in range(row * words, row * words + words):
            ri[k] = 0
        ri[row * words] = free[0]
        free[0] = row
        free[2] += 1
        used[s] -= 1
        hole = at
        while True:
            at = (at + 1) & mask
            slot = index[start + at]
            if slot == 0:
                break
            home = np.int64(slot >> np.uint64(32)) & mask
            if ((at - home) & mask) >= ((at - hole) & mask):
                index[start + hole] = slot
                hole = at
        index[start + hole] = 0


@_compiled
def walk(index, start, mask, ri, words, free, clear, rows):
    """The rows of a shard into `rows`; with `clear` they are given back and the shard is left empty."""
    n = 0
    for at in range(start, start + mask + 1):
        slot = index[at]
        if slot != 0:
            rows[n] = np.int64(slot & LOW)
            n += 1
            if clear:
                index[at] = 0
    if clear:
        for i in range(n):
            row = rows[i]
            if i + AHEAD < n:
                fetch(ri, rows[i + AHEAD] * words)
            for k in range(row * words, row * words + words):
                ri[k] = 0
            ri[row * words] = free[0]
            free[0] = row
        free[2] += n
    return n


@_compiled
def written(index, start, mask, ri, words, since, ids, lsns):
    """Ids and log numbers of a shard's rows that were written after `since`; how many."""
    index, ri = bare(index), bare(ri)
    n = 0
    for at in range(start, start + mask + 1):
        if at + 32 <= start + mask:
            fetch(ri, np.int64(index[at + 32] & LOW) * words)
        slot = index[at]
        if slot != 0:
            row = np.int64(slot & LOW) * words
            if ri[row + 1] > since:
                ids[n] = ri[row]
                lsns[n] = ri[row + 1]
                n += 1
    return n


@_compiled
def column(ri, words, rows, at, out):
    """The word `at` of each row: 0 its id, 1 its lsn."""
    n = rows.shape[0]
    for i in range(n):
        if i + 16 < n:
            fetch(ri, rows[i + 16] * words + at)
        out[i] = ri[rows[i] * words + at]


@_compiled
def copy_out(ri, words, rows, out):
    """Whole rows as they lie."""
    n = rows.shape[0]
    for i in range(n):
        if i + AHEAD < n:
            for k in range(0, words, 8):
                fetch(ri, rows[i + AHEAD] * words + k)
        copy(out, i * words, ri, rows[i] * words, words)


@_compiled
def copy_in(index, starts, masks, used, shift, ri, words, free, source):
    """Rows that `copy_out` gave, whose ids are not here yet, into the table; the index must have room."""
    for i in range(source.shape[0] // words):
        h = mix64(np.uint64(source[i * words]))
        s = np.int64(h >> shift) if shift < 64 else 0
        row = take_row(ri, words, free)
        copy(ri, row * words, source, i * words, words)
        insert(index, starts[s], masks[s], h & LOW, np.uint64(row))
        used[s] += 1
