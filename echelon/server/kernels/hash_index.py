"""Which row an id has. The index of a shard is a power of two of uint64 slots: the hash's low 32 bits above the row's number; 0 is empty; linear probing."""

from __future__ import annotations

import numpy as np

from echelon.server.kernels.intrinsics import borrow, copy_elements, mix64, prefetch_line
from echelon.server.kernels.jit_cache import cached_njit

LOW_32_BITS = np.uint64(0xFFFFFFFF)
#: How many rows ahead a loop over rows fetches.
PREFETCH_DISTANCE = 6
#: Ids whose slots and rows are fetched ahead of their use: tight loops over so many, because a wrong guess in one stage of a loop over
#: all stages would throw away the work of the others.
LOOKUP_BATCH = 32

_compiled = cached_njit()
_inlined = cached_njit(forceinline=True)


@_inlined
def prefetch_slots(index, starts, masks, shift, ids, first, batch_shards, batch_tags, row_numbers):
    """Hashes a batch of ids and asks for the slots of those whose row is not known; `batch_shards` and `batch_tags` hold two batches, in turns."""
    for i in range(first, min(first + LOOKUP_BATCH, ids.shape[0])):
        hashed = mix64(np.uint64(ids[i]))
        shard = np.int64(hashed >> shift) if shift < 64 else 0
        tag = np.int64(hashed & LOW_32_BITS)
        batch_shards[i & (2 * LOOKUP_BATCH - 1)] = shard
        batch_tags[i & (2 * LOOKUP_BATCH - 1)] = tag
        if row_numbers[i] == 0:
            prefetch_line(index, starts[shard] + (tag & masks[shard]))


@_inlined
def find_candidates(
    index, starts, masks, int64_view, words, prefetch_words, first, size, batch_shards, batch_tags, row_numbers
):
    """Of a batch that was aimed at: the row that is likely each id's own (0: none), whose lines are asked for."""
    for i in range(first, first + size):
        k = i & (2 * LOOKUP_BATCH - 1)
        row = row_numbers[i]
        if row == 0:
            start, mask = starts[batch_shards[k]], masks[batch_shards[k]]
            tag = np.uint64(batch_tags[k])
            position = batch_tags[k] & mask
            while True:
                slot = index[start + position]
                if slot == 0:
                    break
                if slot >> np.uint64(32) == tag:
                    row = np.int64(slot & LOW_32_BITS)
                    break
                position = (position + 1) & mask
            row_numbers[i] = row
        for j in range(0, prefetch_words, 8):
            prefetch_line(int64_view, row * words + j)


@_inlined
def confirm_row(index, starts, masks, int64_view, words, ids, i, batch_shards, batch_tags, row_numbers):
    """The row that is an id's own: the one found, or one behind it where another id has the same 32 bits, which is rare."""
    row = row_numbers[i]
    if row != 0 and int64_view[row * words] != ids[i]:
        shard, tag = batch_shards[i & (2 * LOOKUP_BATCH - 1)], batch_tags[i & (2 * LOOKUP_BATCH - 1)]
        row = _probe(index, starts[shard], masks[shard], tag & masks[shard], np.uint64(tag), int64_view, words, ids[i])
        row_numbers[i] = row
    return row


@_compiled
def find_rows(index, starts, masks, shift, int64_view, words, ids, row_numbers, batch_buffer, missing_per_shard):
    """The row of each id into `row_numbers` (zeros), 0 if there is none; how many there are none of, and per shard in `missing_per_shard`."""
    index, starts, masks, int64_view, ids, row_numbers = (
        borrow(index),
        borrow(starts),
        borrow(masks),
        borrow(int64_view),
        borrow(ids),
        borrow(row_numbers),
    )
    n = ids.shape[0]
    batch_shards, batch_tags = borrow(batch_buffer[0]), borrow(batch_buffer[1])
    missing = 0
    prefetch_slots(index, starts, masks, shift, ids, 0, batch_shards, batch_tags, row_numbers)
    for first in range(0, n, LOOKUP_BATCH):
        size = min(LOOKUP_BATCH, n - first)
        prefetch_slots(index, starts, masks, shift, ids, first + LOOKUP_BATCH, batch_shards, batch_tags, row_numbers)
        find_candidates(index, starts, masks, int64_view, words, 1, first, size, batch_shards, batch_tags, row_numbers)
        for i in range(first, first + size):
            if confirm_row(index, starts, masks, int64_view, words, ids, i, batch_shards, batch_tags, row_numbers) == 0:
                missing += 1
                missing_per_shard[batch_shards[i & (2 * LOOKUP_BATCH - 1)]] += 1
    return missing


@_compiled
def _probe(index, start, mask, position, tag, int64_view, words, row_id):
    while True:
        position &= mask
        slot = index[start + position]
        if slot == 0:
            return 0
        if slot >> np.uint64(32) == tag:
            row = np.int64(slot & LOW_32_BITS)
            if int64_view[row * words] == row_id:
                return row
        position += 1


@_inlined
def insert_slot(index, start, mask, tag, row):
    position = np.int64(tag) & mask
    while index[start + position] != 0:
        position = (position + 1) & mask
    index[start + position] = (tag << np.uint64(32)) | np.uint64(row)


@_compiled
def rehash_slots(index, start, mask, new_start, new_mask):
    """A shard's slots into a larger region, which is empty; the old one is left as it was."""
    for position in range(start, start + mask + 1):
        slot = index[position]
        if slot != 0:
            insert_slot(index, new_start, new_mask, slot >> np.uint64(32), slot & LOW_32_BITS)


@_inlined
def allocate_row(int64_view, words, row_allocator):
    """A row that is not in use. free: the first of the chain of rows given back, the first never used, the chain's length."""
    row = row_allocator[0]
    if row != 0:
        row_allocator[0] = int64_view[row * words]
        row_allocator[2] -= 1
    else:
        row = row_allocator[1]
        row_allocator[1] += 1
    return row


@_compiled
def remove_rows(index, starts, masks, rows_per_shard, shift, int64_view, words, row_allocator, ids):
    """Takes ids out of the index and their rows back, those that are here; what follows in a probe's way moves up: no tombs."""
    for row_id in ids:
        hashed = mix64(np.uint64(row_id))
        shard = np.int64(hashed >> shift) if shift < 64 else 0
        start, mask, tag = starts[shard], masks[shard], hashed & LOW_32_BITS
        position = np.int64(tag) & mask
        while True:
            slot = index[start + position]
            if slot == 0 or (
                slot >> np.uint64(32) == tag and int64_view[np.int64(slot & LOW_32_BITS) * words] == row_id
            ):
                break
            position = (position + 1) & mask
        if slot == 0:
            continue
        row = np.int64(slot & LOW_32_BITS)
        for k in range(row * words, row * words + words):
            int64_view[k] = 0
        int64_view[row * words] = row_allocator[0]
        row_allocator[0] = row
        row_allocator[2] += 1
        rows_per_shard[shard] -= 1
        hole = position
        while True:
            position = (position + 1) & mask
            slot = index[start + position]
            if slot == 0:
                break
            home = np.int64(slot >> np.uint64(32)) & mask
            if ((position - home) & mask) >= ((position - hole) & mask):
                index[start + hole] = slot
                hole = position
        index[start + hole] = 0


@_compiled
def list_rows(index, start, mask, int64_view, words, row_allocator, clear, row_numbers):
    """The rows of a shard into `row_numbers`; with `clear` they are given back and the shard is left empty."""
    count = 0
    for position in range(start, start + mask + 1):
        slot = index[position]
        if slot != 0:
            row_numbers[count] = np.int64(slot & LOW_32_BITS)
            count += 1
            if clear:
                index[position] = 0
    if clear:
        for i in range(count):
            row = row_numbers[i]
            if i + PREFETCH_DISTANCE < count:
                prefetch_line(int64_view, row_numbers[i + PREFETCH_DISTANCE] * words)
            for k in range(row * words, row * words + words):
                int64_view[k] = 0
            int64_view[row * words] = row_allocator[0]
            row_allocator[0] = row
        row_allocator[2] += count
    return count


@_compiled
def list_written_rows(index, start, mask, int64_view, words, since, ids, lsns):
    """Ids and log numbers of a shard's rows that were written after `since`; how many."""
    index, int64_view = borrow(index), borrow(int64_view)
    count = 0
    for position in range(start, start + mask + 1):
        if position + 32 <= start + mask:
            prefetch_line(int64_view, np.int64(index[position + 32] & LOW_32_BITS) * words)
        slot = index[position]
        if slot != 0:
            row = np.int64(slot & LOW_32_BITS) * words
            if int64_view[row + 1] > since:
                ids[count] = int64_view[row]
                lsns[count] = int64_view[row + 1]
                count += 1
    return count


@_compiled
def read_column(int64_view, words, row_numbers, column, out):
    """The word `column` of each row: 0 its id, 1 its lsn."""
    n = row_numbers.shape[0]
    for i in range(n):
        if i + 16 < n:
            prefetch_line(int64_view, row_numbers[i + 16] * words + column)
        out[i] = int64_view[row_numbers[i] * words + column]


@_compiled
def copy_rows(int64_view, words, row_numbers, out):
    """Whole rows as they lie."""
    n = row_numbers.shape[0]
    for i in range(n):
        if i + PREFETCH_DISTANCE < n:
            for k in range(0, words, 8):
                prefetch_line(int64_view, row_numbers[i + PREFETCH_DISTANCE] * words + k)
        copy_elements(out, i * words, int64_view, row_numbers[i] * words, words)


@_compiled
def insert_rows(index, starts, masks, rows_per_shard, shift, int64_view, words, row_allocator, source):
    """Rows that `copy_rows` gave, whose ids are not here yet, into the table; the index must have room."""
    for i in range(source.shape[0] // words):
        hashed = mix64(np.uint64(source[i * words]))
        shard = np.int64(hashed >> shift) if shift < 64 else 0
        row = allocate_row(int64_view, words, row_allocator)
        copy_elements(int64_view, row * words, source, i * words, words)
        insert_slot(index, starts[shard], masks[shard], hashed & LOW_32_BITS, np.uint64(row))
        rows_per_shard[shard] += 1
