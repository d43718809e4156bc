"""The shards that a frame covers, prepared for indexing and cached: workers send the same few sets again and again."""

from __future__ import annotations

import numpy as np

from echelon.server.protocol.wire import WireError

_MAX_CACHED = 4096
_UINT16 = np.dtype(np.uint16)


def all_set(flags: np.ndarray) -> bool:
    """Whether all flags are set. Asked several times per frame: numpy's `all` and `any` take six times as long."""
    return 0 not in flags.tobytes()


def any_set(flags: np.ndarray) -> bool:
    return 1 in flags.tobytes()


class ShardSet:
    """`index` selects the shards from per-shard arrays: a slice if they are evenly spaced, which is several times faster."""

    __slots__ = ("index", "shards", "wire_shards")

    def __init__(self, shards: np.ndarray) -> None:
        self.wire_shards = shards
        self.shards = shards.astype(np.intp)
        self.index: slice | np.ndarray = self.shards
        count = len(shards)
        if count == 1:
            self.index = slice(int(shards[0]), int(shards[0]) + 1)
        elif count > 1:
            step = int(self.shards[1] - self.shards[0])
            if step > 0 and (np.diff(self.shards) == step).all():
                self.index = slice(int(shards[0]), int(shards[-1]) + 1, step)

    def __len__(self) -> int:
        return len(self.wire_shards)

    def subset(self, mask: np.ndarray) -> ShardSet:
        return ShardSet(self.wire_shards[mask])


class ShardSetCache:
    """Shard sets by their bytes, checked once: each shard exists and occurs once."""

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self._cached: dict[bytes, ShardSet] = {}

    def get(self, array: np.ndarray) -> ShardSet:
        """The set in a frame's first array."""
        if array.dtype != _UINT16 or array.ndim != 1:
            raise WireError("a shard set is a flat array of 16-bit shard numbers")
        key = array.tobytes()
        shard_set = self._cached.get(key)
        if shard_set is None:
            if not len(array) or int(array.max()) >= self.num_shards or np.bincount(array).max() > 1:
                raise WireError(f"a shard set has shards below {self.num_shards}, each once")
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            shard_set = self._cached[key] = ShardSet(array.copy())
        return shard_set

    def from_numbers(self, shards: np.ndarray) -> ShardSet:
        """The set of shard numbers of any dtype."""
        return self.get(np.asarray(shards).astype(np.uint16))
