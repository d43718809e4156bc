"""Which samples of a batch each data rank computes, micro-batch by micro-batch.

The ranks take consecutive slices of the global batch, in rank order, and cut them into consecutive micro-batches. Every rank runs the same number
of them, because collectives need all ranks, and none is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Samples `start` to `stop` (exclusive) of the global batch."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start


def split_evenly(start: int, stop: int, parts: int) -> list[SampleRange]:
    """`parts` consecutive slices whose sizes differ by one at most, the larger first."""
    base, extra = divmod(stop - start, parts)
    return _consecutive_ranges(start, [base + (part < extra) for part in range(parts)])


def _consecutive_ranges(start: int, sizes: Sequence[int]) -> list[SampleRange]:
    ends = list(accumulate(sizes, initial=start))
    return [SampleRange(begin, end) for begin, end in pairwise(ends)]


def local_batch_sizes(batch: int, dp: int, shares: Sequence[int] = ()) -> list[int]:
    """Samples of each data rank: equal, or in proportion to `shares`, and at least one."""
    if batch < dp:
        raise ValueError(f"{batch} samples cannot feed {dp} data ranks: each needs at least one")
    if not shares:
        return [samples.size for samples in split_evenly(0, batch, dp)]
    if len(shares) != dp:
        raise ValueError(f"{len(shares)} shares for {dp} data ranks")
    total = sum(shares)
    sizes = [batch * share // total for share in shares]
    # Samples left over by rounding go to the largest remainders, the first of equal ones.
    by_remainder = sorted(range(dp), key=lambda rank: -(batch * shares[rank] % total))
    for rank in by_remainder[: batch - sum(sizes)]:
        sizes[rank] += 1
    while 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] = 1
    return sizes


def largest_local_batch(batch: int, dp: int, shares: Sequence[int] = ()) -> int:
    """Samples of the data rank that has most."""
    return max(local_batch_sizes(batch, dp, shares)) if shares or batch < dp else -(-batch // dp)


def count_micro_batches(batch: int, dp: int, micro_batch_size: int | None, shares: Sequence[int] = ()) -> int:
    """How many micro-batches each data rank runs for a batch of `batch` samples."""
    largest = largest_local_batch(batch, dp, shares)
    if micro_batch_size is None:
        return 1
    smallest = min(local_batch_sizes(batch, dp, shares)) if shares else batch // dp
    # The largest share decides, unless the smallest would run out of samples: then micro-batches exceed the requested size, by one sample where
    # shares are equal. `check` refuses more than that.
    return min(-(-largest // micro_batch_size), smallest)


def largest_micro_batch(batch: int, dp: int, micro_batch_size: int | None, shares: Sequence[int] = ()) -> int:
    """Samples of the largest micro-batch of all ranks."""
    return -(-largest_local_batch(batch, dp, shares) // count_micro_batches(batch, dp, micro_batch_size, shares))


def split_batch(
    batch: int, dp: int, micro_batch_size: int | None = None, shares: Sequence[int] = ()
) -> list[list[SampleRange]]:
    """The micro-batches of each data rank, as slices of the global batch. `shares`: relative speeds of unequal ranks."""
    count = count_micro_batches(batch, dp, micro_batch_size, shares)
    local_batches = _consecutive_ranges(0, local_batch_sizes(batch, dp, shares))
    return [split_evenly(samples.start, samples.stop, count) for samples in local_batches]
