"""Read, update and create many rows at once."""

from __future__ import annotations

import numpy as np

from echelon.server.kernels.constants import (
    COUNT_OFFSET,
    DIM,
    NATIVE,
    STATE_INIT,
    STATE_OFFSET,
    STATE_SIZE,
    STORED,
    WEIGHT_OFFSET,
    WORDS,
)
from echelon.server.kernels.hash_index import (
    BATCH_MASK,
    LOOKUP_BATCH,
    PREFETCH_DISTANCE,
    allocate_row,
    confirm_row,
    find_candidates,
    insert_slot,
    prefetch_slots,
    shard_and_tag,
)
from echelon.server.kernels.initial_values import init_row
from echelon.server.kernels.intrinsics import GOLDEN, borrow, copy_elements, mix64, prefetch_line
from echelon.server.kernels.jit_cache import compiled
from echelon.server.kernels.quantization import fill_draws, load_weights, store_weights
from echelon.server.kernels.update_rules import apply_rule


@compiled
def read_rows(
    index, starts, masks, shift, ids, row_numbers, batch_buffer, layout, int64_view, float_view, float32_view, int16_view,
    int8_view, init_kind, init_scalars, seed, nearest_draws, out,
):  # fmt: skip
    """The weights of each id into `out`; for an absent row those with which it would be created.

    `row_numbers`: the row of each id as far as known, else 0; filled in. `batch_buffer`: int64 (2, 2 * LOOKUP_BATCH).
    """
    index, starts, masks, ids, layout = borrow(index), borrow(starts), borrow(masks), borrow(ids), borrow(layout)
    int64_view, float_view, float32_view = borrow(int64_view), borrow(float_view), borrow(float32_view)
    int16_view, int8_view, out = borrow(int16_view), borrow(int8_view), borrow(out)
    nearest_draws, row_numbers = borrow(nearest_draws), borrow(row_numbers)
    n = ids.shape[0]
    dim, words, stored = layout[DIM], layout[WORDS], layout[STORED]
    floats_per_word = 8 // float_view.itemsize
    prefetch_words = layout[STATE_OFFSET] // floats_per_word
    flat = out.reshape(-1)
    batch_shards, batch_tags = borrow(batch_buffer[0]), borrow(batch_buffer[1])
    prefetch_slots(index, starts, masks, shift, ids, 0, batch_shards, batch_tags, row_numbers)
    for first in range(0, n, LOOKUP_BATCH):
        size = min(LOOKUP_BATCH, n - first)
        prefetch_slots(index, starts, masks, shift, ids, first + LOOKUP_BATCH, batch_shards, batch_tags, row_numbers)
        find_candidates(
            index, starts, masks, int64_view, words, prefetch_words, first, size, batch_shards, batch_tags, row_numbers
        )
        for i in range(first, first + size):
            row = confirm_row(index, starts, masks, int64_view, words, ids, i, batch_shards, batch_tags, row_numbers)
            if row == 0:
                init_row(init_kind, init_scalars[0], init_scalars[1], seed, ids[i], out[i])
                if stored != NATIVE:
                    store_weights(out[i], nearest_draws, layout, 0, float32_view, int16_view, int8_view)
                    load_weights(layout, 0, float_view, float32_view, int16_view, int8_view, out[i])
            elif stored == NATIVE:
                copy_elements(flat, i * dim, float_view, row * words * floats_per_word + layout[WEIGHT_OFFSET], dim)
            else:
                load_weights(layout, row, float_view, float32_view, int16_view, int8_view, out[i])


@compiled
def update_rows(
    index, starts, masks, shift, ids, row_numbers, batch_buffer, values, lsns, layout, int64_view, float_view, cast_scalars,
    scalars, switches, scratch, absent_positions,
):  # fmt: skip
    """Update present rows, whose weights are stored in the dtype of the arithmetic, by their gradients. Ids are unique.

    `row_numbers`, `batch_buffer`: as in `read_rows`. Returns how many ids have no row; their positions go into `absent_positions`.
    """
    index, starts, masks, int64_view = borrow(index), borrow(starts), borrow(masks), borrow(int64_view)
    ids, row_numbers, values, lsns = borrow(ids), borrow(row_numbers), borrow(values), borrow(lsns)
    float_view, scratch, cast_scalars = borrow(float_view), borrow(scratch), borrow(cast_scalars)
    scalars, switches, layout = borrow(scalars), borrow(switches), borrow(layout)
    n = ids.shape[0]
    dim, words = layout[DIM], layout[WORDS]
    floats_per_word = 8 // float_view.itemsize
    batch_shards, batch_tags = borrow(batch_buffer[0]), borrow(batch_buffer[1])
    missing = 0
    prefetch_slots(index, starts, masks, shift, ids, 0, batch_shards, batch_tags, row_numbers)
    for first in range(0, n, LOOKUP_BATCH):
        size = min(LOOKUP_BATCH, n - first)
        prefetch_slots(index, starts, masks, shift, ids, first + LOOKUP_BATCH, batch_shards, batch_tags, row_numbers)
        find_candidates(
            index, starts, masks, int64_view, words, words, first, size, batch_shards, batch_tags, row_numbers
        )
        for i in range(first, first + size):
            row = confirm_row(index, starts, masks, int64_view, words, ids, i, batch_shards, batch_tags, row_numbers)
            if row == 0:
                absent_positions[missing] = i
                missing += 1
                continue
            int64_view[row * words + 1] = lsns[batch_shards[i & BATCH_MASK]]
            row_start = row * words * floats_per_word
            w = float_view[row_start + layout[WEIGHT_OFFSET] : row_start + layout[WEIGHT_OFFSET] + dim]
            state = float_view[row_start + layout[STATE_OFFSET] : row_start + layout[STATE_OFFSET] + layout[STATE_SIZE]]
            apply_rule(cast_scalars, scalars, switches, w, values[i], state, scratch)
    return missing


@compiled
def write_rows(
    index, starts, masks, rows_per_shard, shift, row_allocator, ids, row_numbers, values, lsns, layout, int64_view, float_view,
    float32_view, int16_view, int8_view, init_kind, init_scalars, seed, cast_scalars, scalars, switches, scratch, nearest_draws,
    draws, is_assignment,
):  # fmt: skip
    """Update each row by its gradient, or set it to its value (`is_assignment`: 1); absent rows are created. Ids are unique."""
    index, starts, masks, row_allocator = borrow(index), borrow(starts), borrow(masks), borrow(row_allocator)
    int64_view, float_view, float32_view = borrow(int64_view), borrow(float_view), borrow(float32_view)
    int16_view, int8_view, values, scratch = borrow(int16_view), borrow(int8_view), borrow(values), borrow(scratch)
    cast_scalars, scalars, switches, layout = borrow(cast_scalars), borrow(scalars), borrow(switches), borrow(layout)
    nearest_draws, draws = borrow(nearest_draws), borrow(draws)
    n = ids.shape[0]
    dim, words, stored = layout[DIM], layout[WORDS], layout[STORED]
    floats_per_word = 8 // float_view.itemsize
    state_init = cast_scalars[STATE_INIT]
    weight_buffer, step_scratch = scratch[:dim], scratch[dim:]
    for i in range(n):
        if i + PREFETCH_DISTANCE < n:
            for k in range(0, words, 8):
                prefetch_line(int64_view, row_numbers[i + PREFETCH_DISTANCE] * words + k)
        row, row_id = row_numbers[i], ids[i]
        shard, tag = shard_and_tag(row_id, shift)
        is_new = row == 0
        if is_new:
            row = allocate_row(int64_view, words, row_allocator)
            insert_slot(index, starts[shard], masks[shard], tag, np.uint64(row))
            rows_per_shard[shard] += 1
            int64_view[row * words] = row_id
        int64_view[row * words + 1] = lsns[shard]
        start = row * words * floats_per_word + layout[STATE_OFFSET]
        state = float_view[start : start + layout[STATE_SIZE]]
        if is_new or is_assignment:
            for j in range(layout[STATE_SIZE]):
                state[j] = state_init
            if switches[COUNT_OFFSET] >= 0:
                state[switches[COUNT_OFFSET]] = 0
        w = weight_buffer
        if stored == NATIVE:
            start = row * words * floats_per_word + layout[WEIGHT_OFFSET]
            w = float_view[start : start + dim]
        if is_assignment:
            for j in range(dim):
                w[j] = values[i, j]
        elif is_new:
            init_row(init_kind, init_scalars[0], init_scalars[1], seed, row_id, w)
        if stored != NATIVE:
            if is_new or is_assignment:
                store_weights(w, nearest_draws, layout, row, float32_view, int16_view, int8_view)
            load_weights(layout, row, float_view, float32_view, int16_view, int8_view, w)
        if not is_assignment:
            apply_rule(cast_scalars, scalars, switches, w, values[i], state, step_scratch)
            if stored != NATIVE:
                fill_draws(mix64(mix64(np.uint64(row_id) ^ GOLDEN) + np.uint64(lsns[shard])), draws)
                store_weights(w, draws, layout, row, float32_view, int16_view, int8_view)
