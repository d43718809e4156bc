"""The shard of an id or block: the same on every worker and server throughout the job.

`mix64` is the finaliser of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64 bits; the highest bits choose the shard.
"""

from __future__ import annotations

import hashlib

import numpy as np

from echelon.server.protocol.specs import Dense, StoreError

_UINT64 = np.uint64


def mix64(values: np.ndarray) -> np.ndarray:
    """The hash of each int64 or uint64, as uint64."""
    hashed = np.ascontiguousarray(values).view(np.uint64)
    hashed = (hashed ^ (hashed >> _UINT64(30))) * _UINT64(0xBF58476D1CE4E5B9)
    hashed = (hashed ^ (hashed >> _UINT64(27))) * _UINT64(0x94D049BB133111EB)
    return hashed ^ (hashed >> _UINT64(31))


def shard_bits(num_shards: int) -> int:
    """log2 of the number of shards."""
    if type(num_shards) is not int or not 1 <= num_shards <= 65536 or num_shards & (num_shards - 1):
        raise StoreError(f"shards: {num_shards!r}; use a power of two from 1 to 65536")
    return num_shards.bit_length() - 1


def shard_of(ids: np.ndarray, num_shards: int) -> np.ndarray:
    """The shard of each id, int64."""
    bits = shard_bits(num_shards)
    if bits == 0:
        return np.zeros(np.shape(ids), np.int64)
    return (mix64(np.asarray(ids, np.int64)) >> _UINT64(64 - bits)).astype(np.int64)


def hash_name(name: str) -> int:
    """A 64-bit hash of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def block_shards(spec: Dense, num_shards: int) -> np.ndarray:
    """The shard of each block of a dense parameter, int64; one shard for all if its rule needs the whole parameter."""
    blocks = np.arange(spec.blocks, dtype=np.uint64)
    if spec.in_one_shard:
        blocks[:] = 0
    return shard_of((blocks + _UINT64(hash_name(spec.name))).view(np.int64), num_shards)
