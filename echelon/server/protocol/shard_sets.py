"""The shards that a frame covers, ready for indexing: workers send the same few covers again and again."""

from __future__ import annotations

import numpy as np

from echelon.server.protocol.wire import WireError

_MAX_CACHED = 4096
_UINT16 = np.dtype(np.uint16)


def all_set(flags: np.ndarray) -> bool:
    """Whether all flags are set. Of every frame several such questions are asked, and `all` and `has_drawn` take six times as long."""
    return 0 not in flags.tobytes()


def any_set(flags: np.ndarray) -> bool:
    """Whether any flag is set."""
    return 1 in flags.tobytes()


class ShardSet:
    """`shards`: their numbers; `index`: what indexes arrays per shard, a slice where they are evenly spaced (several times faster)."""

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
        """Those for which `mask` is true."""
        return ShardSet(self.wire_shards[mask])


class ShardSetCache:
    """Covers by their bytes, checked once: each shard exists, and is named once."""

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self._cached: dict[bytes, ShardSet] = {}

    def get(self, array: np.ndarray) -> ShardSet:
        """The cover that a frame's first array is."""
        if array.dtype != _UINT16 or array.ndim != 1:
            raise WireError("a cover is one row of 16-bit shard numbers")
        key = array.tobytes()
        shard_set = self._cached.get(key)
        if shard_set is None:
            if not len(array) or int(array.max()) >= self.num_shards or np.bincount(array).max() > 1:
                raise WireError(f"a cover names shards below {self.num_shards}, each once")
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            shard_set = self._cached[key] = ShardSet(array.copy())
        return shard_set

    def from_numbers(self, shards: np.ndarray) -> ShardSet:
        """The cover of shard numbers of any kind."""
        return self.get(np.asarray(shards).astype(np.uint16))
