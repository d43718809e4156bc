"""The ranks' pieces of a tensor are all of it, each number once, where the whole has it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.engine.checkpoint.save_load import CheckpointTensor
from echelon.engine.parallel.shard_layout import TPShard, local_regions
from echelon.plan.placement import compute_shard_sizes

sizes = st.integers(1, 9)


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 3))
def test_rows_are_dealt_out_evenly_in_units(count: int, ways: int, unit: int) -> None:
    dealt = compute_shard_sizes(count * unit, ways, unit)
    assert sum(dealt) == count * unit
    assert all(each % unit == 0 for each in dealt)
    assert dealt[0] - dealt[-1] in (0, unit)
    assert dealt == sorted(dealt, reverse=True)


@given(sizes, sizes, st.lists(sizes, max_size=3), st.integers(0, 1), st.integers(1, 4), st.integers(1, 3))
def test_the_pieces_of_all_ranks_are_the_whole(
    rows: int, columns: int, parts: list[int], dim: int, ways: int, unit: int
) -> None:
    shape = [rows, columns]
    parts = [size * unit for size in parts]
    shape[dim] = sum(parts) or shape[dim] * unit
    full = torch.arange(shape[0] * shape[1]).view(shape)
    found, seen = torch.full_like(full, -1), torch.zeros_like(full)
    for rank in range(ways):
        piece = TPShard(full.shape, dim, tuple(parts), rank, ways, unit)
        mine = piece.extract(full)
        assert mine.shape == piece.local_shape
        for region in local_regions(mine, piece):
            assert torch.equal(region.values, full[region.slices])
            found[region.slices] = region.values
            seen[region.slices] += 1
        assert CheckpointTensor(mine, piece).size() == full.shape
    assert torch.equal(found, full)
    assert bool((seen == 1).all())
