"""The shards that a frame covers, ready for indexing: workers send the same few covers again and again."""

from __future__ import annotations

import numpy as np

from echelon.server.protocol.wire import WireError

_KEPT = 4096
_U16 = np.dtype(np.uint16)


def every(flags: np.ndarray) -> bool:
    """Whether all flags are set. Of every frame several such questions are asked, and `all` and `any` take six times as long."""
    return 0 not in flags.tobytes()


def some(flags: np.ndarray) -> bool:
    """Whether any flag is set."""
    return 1 in flags.tobytes()


class Cover:
    """`shards`: their numbers; `at`: what indexes arrays per shard, a slice where they are evenly spaced (several times faster)."""

    __slots__ = ("at", "shards", "wire")

    def __init__(self, shards: np.ndarray) -> None:
        self.wire = shards
        self.shards = shards.astype(np.intp)
        self.at: slice | np.ndarray = self.shards
        count = len(shards)
        if count == 1:
            self.at = slice(int(shards[0]), int(shards[0]) + 1)
        elif count > 1:
            step = int(self.shards[1] - self.shards[0])
            if step > 0 and (np.diff(self.shards) == step).all():
                self.at = slice(int(shards[0]), int(shards[-1]) + 1, step)

    def __len__(self) -> int:
        return len(self.wire)

    def part(self, chosen: np.ndarray) -> Cover:
        """Those for which `chosen` is true."""
        return Cover(self.wire[chosen])


class Covers:
    """Covers by their bytes, checked once: each shard exists, and is named once."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self._known: dict[bytes, Cover] = {}

    def of(self, array: np.ndarray) -> Cover:
        """The cover that a frame's first array is."""
        if array.dtype != _U16 or array.ndim != 1:
            raise WireError("a cover is one row of 16-bit shard numbers")
        key = array.tobytes()
        found = self._known.get(key)
        if found is None:
            if not len(array) or int(array.max()) >= self.shards or np.bincount(array).max() > 1:
                raise WireError(f"a cover names shards below {self.shards}, each once")
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._known[key] = Cover(array.copy())
        return found

    def these(self, shards: np.ndarray) -> Cover:
        """The cover of shard numbers of any kind."""
        return self.of(np.asarray(shards).astype(np.uint16))
