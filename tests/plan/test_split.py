"""Every sample of a batch is in exactly one micro-batch, in the batch's own order, on any number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.plan.batch_split import count_micro_batches, largest_micro_batch, local_batch_sizes, split_batch

ranks = st.integers(1, 64)


@given(ranks, st.integers(0, 500), st.none() | st.integers(1, 100))
def test_micro_batches_are_the_batch_in_its_order(dp: int, more: int, micro: int | None) -> None:
    batch = dp + more
    parts = split_batch(batch, dp, micro)
    flat = [part for rank in parts for part in rank]
    assert [sample for part in flat for sample in range(part.start, part.stop)] == list(range(batch))


@given(ranks, st.integers(0, 500), st.none() | st.integers(1, 100))
def test_every_rank_runs_the_same_rounds_and_none_is_empty(dp: int, more: int, micro: int | None) -> None:
    batch = dp + more
    parts = split_batch(batch, dp, micro)
    assert {len(rank) for rank in parts} == {count_micro_batches(batch, dp, micro)}
    sizes = [part.size for rank in parts for part in rank]
    assert min(sizes) >= 1
    # One more than asked only where the smallest share would otherwise run dry.
    assert micro is None or max(sizes) <= micro + (batch % dp > 0)


@given(ranks, st.integers(1, 20), st.integers(1, 20))
def test_a_batch_that_divides_is_cut_as_asked(dp: int, micro: int, turns: int) -> None:
    parts = split_batch(dp * micro * turns, dp, micro)
    assert {part.size for rank in parts for part in rank} == {micro}
    assert {len(rank) for rank in parts} == {turns}


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="3 samples cannot feed 4 data ranks"):
        split_batch(3, 4)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 300), st.none() | st.integers(1, 50))
def test_unequal_shares_are_the_batch_too(shares: list[int], more: int, micro: int | None) -> None:
    dp, batch = len(shares), len(shares) + more
    parts = split_batch(batch, dp, micro, shares)
    flat = [sample for rank in parts for part in rank for sample in range(part.start, part.stop)]
    assert flat == list(range(batch))
    assert {len(rank) for rank in parts} == {count_micro_batches(batch, dp, micro, shares)}
    assert min(part.size for rank in parts for part in rank) >= 1
    found = local_batch_sizes(batch, dp, shares)
    # In proportion, to less than a sample; where somebody would have none others give.
    exact = [batch * share / sum(shares) for share in shares]
    assert all(abs(size - wanted) < 1 for size, wanted in zip(found, exact, strict=True)) or min(exact) < 1
    assert max(part.size for rank in parts for part in rank) == largest_micro_batch(batch, dp, micro, shares)


@pytest.mark.parametrize(
    ("batch", "shares", "found"),
    [
        (10, (9, 1), [9, 1]),
        (16, (13, 13, 13, 13, 4, 4, 4, 4), [3, 3, 3, 3, 1, 1, 1, 1]),
        (4, (97, 1, 1, 1), [1, 1, 1, 1]),
    ],
)
def test_shares_are_in_proportion(batch: int, shares: tuple[int, ...], found: list[int]) -> None:
    assert local_batch_sizes(batch, len(shares), shares) == found


def test_shares_alike_are_no_shares() -> None:
    assert split_batch(24, 4, 2, (5, 5, 5, 5)) == split_batch(24, 4, 2)
    with pytest.raises(ValueError, match="3 shares for 4 data ranks"):
        split_batch(24, 4, 2, (1, 1, 1))
