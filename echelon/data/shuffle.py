"""Random order of a range, as a table or, for ranges too long for one, as a formula. Pure: the key decides, for ever."""

from __future__ import annotations

from math import isqrt

import numpy as np

#: Version of the formula. Another one is another order: a checkpoint holds it.
FORMULA_VERSION = 1
#: Half rounds of the formula: each moves one of two coordinates by a hash of the other. Twice as many as the
#: tests of mixing need (`_ROUNDS = 4` passes them).
_HALF_ROUNDS = 8


def random_permutation(samples: int, *key: int) -> np.ndarray:
    """0 to `samples` in random order, as a table of 8 bytes each.

    Each number goes below random bits and the whole is sorted. NumPy promises the raw bits of PCG64 for ever but not
    what `permutation` makes of them: a checkpoint must find the same order under another NumPy. Equal bits, which leave two
    neighbours in the order of their numbers, are rare below 10^8 samples.
    """
    index_bits = np.uint64((samples - 1).bit_length())
    sort_keys = np.random.PCG64([part % 2**64 for part in key]).random_raw(samples)
    sort_keys <<= index_bits
    sort_keys |= np.arange(samples, dtype=np.uint64)
    sort_keys.sort()
    sort_keys &= (np.uint64(1) << index_bits) - np.uint64(1)
    order = sort_keys.view(np.int64)
    order.flags.writeable = False  # slices of it are handed out
    return order


class FeistelPermutation:
    """0 to `samples` in random order, as a formula that needs no memory: a Feistel network.

    A number is a place (row, column) in a table that is nearly square. Each round moves along one coordinate by a hash of the
    other, which can be undone, so two numbers never meet. The table may have a few places too many: a number that lands there
    goes through the rounds again until it lands inside, which can be undone as well.
    """

    def __init__(self, samples: int, *key: int) -> None:
        self._samples = np.uint64(samples)
        rows = isqrt(samples - 1) + 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-samples // rows))
        self._keys = np.random.PCG64([part % 2**64 for part in key]).random_raw(_HALF_ROUNDS)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """What stands at these places of the order."""
        values = self._apply_rounds(positions.astype(np.uint64))
        while len(out_of_range := np.flatnonzero(values >= self._samples)):
            values[out_of_range] = self._apply_rounds(values[out_of_range])
        return values.view(np.int64)

    def _apply_rounds(self, values: np.ndarray) -> np.ndarray:
        row, column = np.divmod(values, self._columns)
        for half_round in range(0, _HALF_ROUNDS, 2):
            row = _rotate_by_hash(row, column, self._rows, self._keys[half_round])
            column = _rotate_by_hash(column, row, self._columns, self._keys[half_round + 1])
        return row * self._columns + column


def _rotate_by_hash(
    coordinate: np.ndarray, other_coordinate: np.ndarray, size: np.uint64, key: np.uint64
) -> np.ndarray:
    """`coordinate` further by a hash of `other_coordinate`, around a circle of `size` places."""
    hashed = (other_coordinate + key) * np.uint64(0x9E3779B97F4A7C15)
    hashed ^= hashed >> np.uint64(32)
    hashed *= np.uint64(0xD6E8FEB86659FD93)
    hashed >>= np.uint64(32)
    hashed *= size  # 32 random bits as a share of the circle
    hashed >>= np.uint64(32)
    hashed += coordinate
    hashed -= size * (hashed >= size)
    return hashed
