"""Which samples of a batch each data rank computes, micro-batch by micro-batch. Pure; simulator, engine and reference share it.

The ranks take consecutive slices of the global batch, in rank order, and cut them into consecutive micro-batches: run
one after another they are the batch in its own order. Every rank runs the same number of rounds (a collective needs
everybody) and no micro-batch is empty.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    slices = []
    for part in range(parts):
        end = start + base + (part < extra)
        slices.append(Span(start, end))
        start = end
    return slices


def rounds(batch: int, dp: int, micro: int | None) -> int:
    """How many micro-batches each data rank runs for a batch of `batch` samples."""
    if batch < dp:
        raise ValueError(f"{batch} samples cannot feed {dp} data ranks: each needs at least one")
    if micro is None:
        return 1
    largest, smallest = -(-batch // dp), batch // dp
    # The largest share decides, but the smallest must not run dry before it: then a micro-batch holds one sample more.
    return min(-(-largest // micro), smallest)


def split(batch: int, dp: int, micro: int | None = None) -> list[list[Span]]:
    """For each data rank its micro-batches, as slices of the global batch."""
    turns = rounds(batch, dp, micro)
    return [cut(share.start, share.stop, turns) for share in cut(0, batch, dp)]
