"""Every gradient is in one bucket, in the order in which backward makes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.plan.gradient_buckets import assign_buckets

tensors = st.lists(st.tuples(st.integers(0, 8 * 2**20), st.sampled_from(["float32", "bfloat16"])), max_size=40)


@given(tensors, st.integers(1, 4))
def test_every_tensor_once_last_first_and_of_one_kind(given: list[tuple[int, str]], megabytes: int) -> None:
    found = assign_buckets(given, megabytes)
    assert [place for bucket in found for place in bucket] == list(reversed(range(len(given))))
    assert all(len({given[place][1] for place in bucket}) == 1 for bucket in found)
    # Only the last tensor may overfill a bucket.
    for bucket in found:
        assert sum(given[place][0] for place in bucket[:-1]) < megabytes * 2**20


def test_the_first_bucket_is_small() -> None:
    assert assign_buckets([(2**19, "")] * 8, 25) == [[7, 6], [5, 4, 3, 2, 1, 0]]
    assert assign_buckets([], 25) == []
