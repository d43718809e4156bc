"""Random order of a range, as a table or, for ranges too long for one, as a formula. Pure: the key decides, for ever."""

from __future__ import annotations

from math import isqrt

import numpy as np

#: Version of the formula. Another one is another order: a checkpoint holds it.
FORMULA = 1
#: Half rounds of the formula: each moves one of two coordinates by a hash of the other. Twice as many as the
#: tests of mixing need (`_ROUNDS = 4` passes them).
_ROUNDS = 8


def shuffled(samples: int, *key: int) -> np.ndarray:
    """0 to `samples` in random order, as a table of 8 bytes each.

    Each number goes below random bits and the whole is sorted. NumPy promises the raw bits of PCG64 for ever but not
    what `permutation` makes of them: a checkpoint must find the same order under another NumPy. Equal bits, which leave two
    neighbours in the order of their numbers, are rare below 10^8 samples.
    """
    width = np.uint64((samples - 1).bit_length())
    keys = np.random.PCG64([part % 2**64 for part in key]).random_raw(samples)
    keys <<= width
    keys |= np.arange(samples, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << width) - np.uint64(1)
    order = keys.view(np.int64)
    order.flags.writeable = False  # slices of it are handed out
    return order


class Keyed:
    """0 to `samples` in random order, as a formula that needs no memory: a Feistel network.

    A number is a place (row, column) in a table that is nearly square. Each round moves along one coordinate by a hash of the
    other, which can be undone, so two numbers never meet. The table may have a few places too many: a number that lands there
    goes through the rounds again until it lands inside, which can be undone as well.
    """

    def __init__(self, samples: int, *key: int) -> None:
        self._samples = np.uint64(samples)
        rows = isqrt(samples - 1) + 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-samples // rows))
        self._keys = np.random.PCG64([part % 2**64 for part in key]).random_raw(_ROUNDS)

    def at(self, places: np.ndarray) -> np.ndarray:
        """What stands at these places of the order."""
        found = self._once(places.astype(np.uint64))
        while len(outside := np.flatnonzero(found >= self._samples)):
            found[outside] = self._once(found[outside])
        return found.view(np.int64)

    def _once(self, numbers: np.ndarray) -> np.ndarray:
        row, column = np.divmod(numbers, self._columns)
        for turn in range(0, _ROUNDS, 2):
            row = _moved(row, column, self._rows, self._keys[turn])
            column = _moved(column, row, self._columns, self._keys[turn + 1])
        return row * self._columns + column


def _moved(place: np.ndarray, other: np.ndarray, size: np.uint64, key: np.uint64) -> np.ndarray:
    """`place` further by a hash of `other`, around a circle of `size` places."""
    hashed = (other + key) * np.uint64(0x9E3779B97F4A7C15)
    hashed ^= hashed >> np.uint64(32)
    hashed *= np.uint64(0xD6E8FEB86659FD93)
    hashed >>= np.uint64(32)
    hashed *= size  # 32 random bits as a share of the circle
    hashed >>= np.uint64(32)
    hashed += place
    hashed -= size * (hashed >= size)
    return hashed
