"""The global random generators that a data set may draw from: torch's, Python's and NumPy's.

Seeded for each sample and apart from the training's own: augmentation then depends on the seed, the epoch and the sample
alone, not on which rank or worker happens to load it, and loading does not disturb what the model draws.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_numpy: Any = np.random  # whose type stubs lack the two functions that exchange its generator
_WORDS = 625  # MT19937: 624 words of state and the position in them


def seeds(seed: int, epoch: int, ids: np.ndarray) -> list[int]:
    """One well-mixed number per sample (splitmix64 over seed, epoch, id), for `seed_all`."""
    base = _mix(_mix(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch))
    mixed: list[int] = _mix(base + ids.astype(np.uint64)).tolist()
    return mixed


def _mix(x: Any) -> Any:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_all(number: int) -> None:
    """Start all three generators from `number`. CPU only: torch.manual_seed would also reseed every accelerator."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


class Apart:
    """A second set of generators that takes the place of the global ones while a data set is read.

    NumPy's is exchanged as an object, since copying its state takes 80 microseconds each way; that drops the spare number
    which NumPy's old normal distribution may hold.
    """

    def __init__(self) -> None:
        self._torch = torch.Generator().get_state()
        self._python = random.Random(0).getstate()
        self._numpy = np.random.MT19937(0)
        self._words = _words(self._numpy)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While this lasts the global generators are these; then they are what they were before."""
        before = torch.default_generator.get_state(), random.getstate(), _numpy.get_bit_generator()
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        _numpy.set_bit_generator(self._numpy)
        self._words = _words(self._numpy)
        try:
            yield
        finally:
            torch.default_generator.set_state(before[0])
            random.setstate(before[1])
            _numpy.set_bit_generator(before[2])

    def drawn(self) -> bool:
        """Inside: whether a number was drawn since the beginning."""
        if _words(self._numpy) != self._words:
            return True
        state, start = random.getstate(), self._python
        # Drawing moves the position (last) or, after a whole round, changes the first word: no need to compare all 625.
        if state[1][-1] != start[1][-1] or state[1][0] != start[1][0] or state[2] != start[2]:
            return True
        return self._torch.numpy().tobytes() != torch.default_generator.get_state().numpy().tobytes()

    def keep(self) -> None:
        """Inside: go on from here the next time, instead of from where it began this time."""
        self._torch, self._python = torch.default_generator.get_state(), random.getstate()


def _words(generator: np.random.MT19937) -> bytes:
    """NumPy's state as it lies in memory: NumPy gives its address, and the struct is the algorithm's words and position."""
    return ctypes.string_at(generator.ctypes.state_address, 4 * _WORDS)
