"""Find, insert and remove rows by id.

The index of a shard is a power of two of uint64 slots with linear probing: the low 32 bits of the id's hash (its tag) above the number
of its row; 0 is empty.
"""

from __future__ import annotations

import numpy as np

from echelon.server.kernels.intrinsics import borrow, copy_elements, mix64, prefetch_line
from echelon.server.kernels.jit_cache import compiled, inlined

LOW_32_BITS = np.uint64(0xFFFFFFFF)
#: How many rows ahead a loop over rows prefetches.
PREFETCH_DISTANCE = 6
#: Ids whose slots and rows are prefetched together: a tight loop for each stage, because a mispredicted branch in one loop over all stages
#: would discard the work of the others.
LOOKUP_BATCH = 32
#: `i & BATCH_MASK` is the place of id i in the buffers, which hold two batches.
BATCH_MASK = 2 * LOOKUP_BATCH - 1


@inlined
def shard_and_tag(row_id, shift):
    hashed = mix64(np.uint64(row_id))
    return (np.int64(hashed >> shift) if shift < 64 else 0), hashed & LOW_32_BITS


@inlined
def prefetch_slots(index, starts, masks, shift, ids, first, batch_shards, batch_tags, row_numbers):
    """Hash a batch of ids and prefetch the slots of those whose row is not known."""
    for i in range(first, min(first + LOOKUP_BATCH, ids.shape[0])):
        shard, tag = shard_and_tag(ids[i], shift)
        batch_shards[i & BATCH_MASK], batch_tags[i & BATCH_MASK] = shard, np.int64(tag)
        if row_numbers[i] == 0:
            prefetch_line(index, starts[shard] + (np.int64(tag) & masks[shard]))


@inlined
def find_candidates(
    index, starts, masks, int64_view, words, prefetch_words, first, size, batch_shards, batch_tags, row_numbers
):
    """For each id of a hashed batch the first row with its tag (0: none), and prefetch that row."""
    for i in range(first, first + size):
        row = row_numbers[i]
        if row == 0:
            shard, position = batch_shards[i & BATCH_MASK], batch_tags[i & BATCH_MASK]
            start, mask, tag = starts[shard], masks[shard], np.uint64(position)
            position &= mask
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


@inlined
def confirm_row(index, starts, masks, int64_view, words, ids, i, batch_shards, batch_tags, row_numbers):
    """The row of an id: its candidate, or a later one if another id has the same tag, which is rare."""
    row = row_numbers[i]
    if row != 0 and int64_view[row * words] != ids[i]:
        shard, tag = batch_shards[i & BATCH_MASK], np.uint64(batch_tags[i & BATCH_MASK])
        position = _find_position(index, starts[shard], masks[shard], tag, int64_view, words, ids[i])
        row = np.int64(index[starts[shard] + position] & LOW_32_BITS) if position >= 0 else 0
        row_numbers[i] = row
    return row


@compiled
def find_rows(index, starts, masks, shift, int64_view, words, ids, row_numbers, batch_buffer, missing_per_shard):
    """The row of each id into `row_numbers` (zeros), 0 if it has none. Returns how many are missing, per shard in `missing_per_shard`."""
    index, starts, masks, int64_view = borrow(index), borrow(starts), borrow(masks), borrow(int64_view)
    ids, row_numbers = borrow(ids), borrow(row_numbers)
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
                missing_per_shard[batch_shards[i & BATCH_MASK]] += 1
    return missing


@compiled
def _find_position(index, start, mask, tag, int64_view, words, row_id):
    """The position of an id's slot in its shard's region; -1 if it has none."""
    position = np.int64(tag) & mask
    while True:
        slot = index[start + position]
        if slot == 0:
            return -1
        if slot >> np.uint64(32) == tag and int64_view[np.int64(slot & LOW_32_BITS) * words] == row_id:
            return position
        position = (position + 1) & mask


@inlined
def insert_slot(index, start, mask, tag, row):
    position = np.int64(tag) & mask
    while index[start + position] != 0:
        position = (position + 1) & mask
    index[start + position] = (tag << np.uint64(32)) | np.uint64(row)


@compiled
def rehash_slots(index, start, mask, new_start, new_mask):
    """Insert a shard's slots into a larger, empty region; the old one stays as it was."""
    for position in range(start, start + mask + 1):
        slot = index[position]
        if slot != 0:
            insert_slot(index, new_start, new_mask, slot >> np.uint64(32), slot & LOW_32_BITS)


@inlined
def allocate_row(int64_view, words, row_allocator):
    """An unused row. `row_allocator`: the head of the free list, the first row that was never used, the length of the free list."""
    row = row_allocator[0]
    if row != 0:
        row_allocator[0] = int64_view[row * words]
        row_allocator[2] -= 1
    else:
        row = row_allocator[1]
        row_allocator[1] += 1
    return row


@inlined
def _free_row(int64_view, words, row_allocator, row):
    for k in range(row * words, row * words + words):
        int64_view[k] = 0
    int64_view[row * words] = row_allocator[0]
    row_allocator[0] = row
    row_allocator[2] += 1


@compiled
def remove_rows(index, starts, masks, rows_per_shard, shift, int64_view, words, row_allocator, ids):
    """Remove the ids that are present and free their rows. Later slots of a probe sequence move up, so there are no tombstones."""
    for row_id in ids:
        shard, tag = shard_and_tag(row_id, shift)
        start, mask = starts[shard], masks[shard]
        position = _find_position(index, start, mask, tag, int64_view, words, row_id)
        if position < 0:
            continue
        _free_row(int64_view, words, row_allocator, np.int64(index[start + position] & LOW_32_BITS))
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


@compiled
def list_rows(index, start, mask, int64_view, words, row_allocator, clear, row_numbers):
    """The rows of a shard into `row_numbers`; `clear` frees them and empties the shard's region."""
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
            if i + PREFETCH_DISTANCE < count:
                prefetch_line(int64_view, row_numbers[i + PREFETCH_DISTANCE] * words)
            _free_row(int64_view, words, row_allocator, row_numbers[i])
    return count


@compiled
def list_written_rows(index, start, mask, int64_view, words, since, ids, lsns):
    """Ids and log numbers of a shard's rows that were written after `since`. Returns how many there are."""
    index, int64_view = borrow(index), borrow(int64_view)
    count = 0
    for position in range(start, start + mask + 1):
        if position + 32 <= start + mask:
            prefetch_line(int64_view, np.int64(index[position + 32] & LOW_32_BITS) * words)
        slot = index[position]
        if slot != 0:
            row = np.int64(slot & LOW_32_BITS) * words
            if int64_view[row + 1] > since:
                ids[count], lsns[count] = int64_view[row], int64_view[row + 1]
                count += 1
    return count


@compiled
def read_column(int64_view, words, row_numbers, column, out):
    """The word `column` of each row: 0 its id, 1 its lsn."""
    n = row_numbers.shape[0]
    for i in range(n):
        if i + 16 < n:
            prefetch_line(int64_view, row_numbers[i + 16] * words + column)
        out[i] = int64_view[row_numbers[i] * words + column]


@compiled
def copy_rows(int64_view, words, row_numbers, out):
    """Copy whole rows, word for word."""
    n = row_numbers.shape[0]
    for i in range(n):
        if i + PREFETCH_DISTANCE < n:
            for k in range(0, words, 8):
                prefetch_line(int64_view, row_numbers[i + PREFETCH_DISTANCE] * words + k)
        copy_elements(out, i * words, int64_view, row_numbers[i] * words, words)


@compiled
def insert_rows(index, starts, masks, rows_per_shard, shift, int64_view, words, row_allocator, source):
    """Insert rows that `copy_rows` copied and whose ids are not present; the index must have room."""
    for i in range(source.shape[0] // words):
        shard, tag = shard_and_tag(source[i * words], shift)
        row = allocate_row(int64_view, words, row_allocator)
        copy_elements(int64_view, row * words, source, i * words, words)
        insert_slot(index, starts[shard], masks[shard], tag, np.uint64(row))
        rows_per_shard[shard] += 1
