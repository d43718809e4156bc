"""Random order of a range, as a table or, for long ranges, as a formula. Pure: the key decides, in every version."""

from __future__ import annotations

from math import isqrt

import numpy as np

#: Version of the formula, which checkpoints record: another formula is another order.
FORMULA_VERSION = 1
#: Half rounds of the formula, each of which moves one of two coordinates by a hash of the other: twice what the mixing tests need.
_HALF_ROUNDS = 8


def random_permutation(samples: int, *key: int) -> np.ndarray:
    """Make a table of 0 to `samples` in random order, of 8 bytes each.

    Numbers are sorted by random bits above them. NumPy guarantees the raw bits of PCG64, but not what `permutation` makes of them, and
    a checkpoint must find the same order under another NumPy. Equal bits, which keep two numbers in order, are rare below 10^8 samples.
    """
    index_bits = np.uint64((samples - 1).bit_length())
    sort_keys = np.random.PCG64([part % 2**64 for part in key]).random_raw(samples)
    sort_keys <<= index_bits
    sort_keys |= np.arange(samples, dtype=np.uint64)
    sort_keys.sort()
    sort_keys &= (np.uint64(1) << index_bits) - np.uint64(1)
    order = sort_keys.view(np.int64)
    order.flags.writeable = False  # slices of it are returned
    return order


class FeistelPermutation:
    """0 to `samples` in random order without a table: a Feistel network.

    A number is a place (row, column) in a nearly square table. Each round moves along one coordinate by a hash of the other, which is
    invertible, so two numbers never collide. The table may have a few places too many: a number that lands there goes through the rounds
    again until it lands inside, which is invertible as well.
    """

    def __init__(self, samples: int, *key: int) -> None:
        self._samples = np.uint64(samples)
        rows = isqrt(samples - 1) + 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-samples // rows))
        self._keys = np.random.PCG64([part % 2**64 for part in key]).random_raw(_HALF_ROUNDS)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The numbers at these positions of the order."""
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


def _rotate_by_hash(coordinate: np.ndarray, other: np.ndarray, size: np.uint64, key: np.uint64) -> np.ndarray:
    """Move `coordinate` by a hash of `other`, around a circle of `size` places."""
    hashed = (other + key) * np.uint64(0x9E3779B97F4A7C15)
    hashed ^= hashed >> np.uint64(32)
    hashed *= np.uint64(0xD6E8FEB86659FD93)
    hashed >>= np.uint64(32)
    hashed *= size  # 32 random bits as a share of the circle
    hashed >>= np.uint64(32)
    hashed += coordinate
    hashed -= size * (hashed >= size)
    return hashed
