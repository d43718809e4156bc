"""Which gradients are reduced together under zero=0, for the engine and the simulator."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

#: The first bucket is no larger, so that the exchange starts early.
_FIRST_BUCKET_BYTES = 2**20


def assign_buckets(tensors: Sequence[tuple[int, Hashable]], megabytes: int) -> list[list[int]]:
    """Indices of `tensors` by bucket, the last tensor first, since backward reaches it first.

    `tensors`: (bytes, kind) in the model's order; only tensors of one kind (dtype, device) share a bucket. A bucket is full once it holds
    `megabytes` or more: tensors are not split.
    """
    buckets: list[list[int]] = []
    filled_bytes, bucket_kind, bucket_limit = 0, None, min(megabytes * 2**20, _FIRST_BUCKET_BYTES)
    for index in reversed(range(len(tensors))):
        tensor_bytes, tensor_kind = tensors[index]
        if not buckets or bucket_kind != tensor_kind or filled_bytes >= bucket_limit:
            if buckets:
                bucket_limit = megabytes * 2**20
            buckets.append([])
            filled_bytes, bucket_kind = 0, tensor_kind
        buckets[-1].append(index)
        filled_bytes += tensor_bytes
    return buckets
