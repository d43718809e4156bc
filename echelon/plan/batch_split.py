"""Which samples of a batch each data rank computes, micro-batch by micro-batch. Pure; simulator, engine and reference share it.

The ranks take consecutive slices of the global batch, in rank order, and cut them into consecutive micro-batches: run
one after another they are the batch in its own order. Every rank runs the same number of rounds (a collective needs
everybody) and no micro-batch is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Span:
    """Samples `start` to `stop` (exclusive) of the global batch."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start


def cut(start: int, stop: int, parts: int) -> list[Span]:
    """`parts` consecutive slices whose sizes differ by one at most, the larger first."""
    base, extra = divmod(stop - start, parts)
    return _slices(start, [base + (part < extra) for part in range(parts)])


def _slices(start: int, sizes: Sequence[int]) -> list[Span]:
    ends = list(accumulate(sizes, initial=start))
    return [Span(begin, end) for begin, end in pairwise(ends)]


def sizes(batch: int, dp: int, shares: Sequence[int] = ()) -> list[int]:
    """Samples of each data rank: alike, or in proportion to `shares`, and one at least."""
    if batch < dp:
        raise ValueError(f"{batch} samples cannot feed {dp} data ranks: each needs at least one")
    if not shares:
        return [part.size for part in cut(0, batch, dp)]
    if len(shares) != dp:
        raise ValueError(f"{len(shares)} shares for {dp} data ranks")
    whole = sum(shares)
    found = [batch * share // whole for share in shares]
    # What rounding left over goes where the most was cut off, the first of those alike.
    behind = sorted(range(dp), key=lambda rank: -(batch * shares[rank] % whole))
    for rank in behind[: batch - sum(found)]:
        found[rank] += 1
    # Nobody may be without a sample: those that have most give.
    while 0 in found:
        found[found.index(max(found))] -= 1
        found[found.index(0)] = 1
    return found


def largest_share(batch: int, dp: int, shares: Sequence[int] = ()) -> int:
    """Samples of the data rank that has most."""
    if batch < dp:
        raise ValueError(f"{batch} samples cannot feed {dp} data ranks: each needs at least one")
    return max(sizes(batch, dp, shares)) if shares else -(-batch // dp)


def rounds(batch: int, dp: int, micro: int | None, shares: Sequence[int] = ()) -> int:
    """How many micro-batches each data rank runs for a batch of `batch` samples."""
    largest = largest_share(batch, dp, shares)
    if micro is None:
        return 1
    smallest = min(sizes(batch, dp, shares)) if shares else batch // dp
    # The largest share decides, but the smallest must not run dry before it: then micro-batches hold more than was asked for, by one sample
    # where shares are alike. `check` refuses more than that.
    return min(-(-largest // micro), smallest)


def largest_micro(batch: int, dp: int, micro: int | None, shares: Sequence[int] = ()) -> int:
    """Samples of the largest micro-batch of all ranks."""
    return -(-largest_share(batch, dp, shares) // rounds(batch, dp, micro, shares))


def split(batch: int, dp: int, micro: int | None = None, shares: Sequence[int] = ()) -> list[list[Span]]:
    """For each data rank its micro-batches, as slices of the global batch. `shares`: of ranks that are not equally fast."""
    turns = rounds(batch, dp, micro, shares)
    return [cut(share.start, share.stop, turns) for share in _slices(0, sizes(batch, dp, shares))]
