"""Which gradients are exchanged together under zero=0. Pure; the engine lays out its buckets by it, the simulator prices them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

#: The first bucket is no larger, so that the exchange starts early.
_FIRST = 2**20


def layout(tensors: Sequence[tuple[int, Hashable]], megabytes: int) -> list[list[int]]:
    """Positions of `tensors` bucket by bucket, the last tensor first, since backward reaches it first.

    `tensors` is (bytes, kind) in the model's order; what differs in kind (type, device) cannot share a bucket. A bucket is full
    once it holds `megabytes` or more: no tensor is cut.
    """
    buckets: list[list[int]] = []
    filled, kind, limit = 0, None, min(megabytes * 2**20, _FIRST)
    for place in reversed(range(len(tensors))):
        size, this = tensors[place]
        if not buckets or kind != this or filled >= limit:
            if buckets:
                limit = megabytes * 2**20
            buckets.append([])
            filled, kind = 0, this
        buckets[-1].append(place)
        filled += size
    return buckets
