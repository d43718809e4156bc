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

from echelon.errors import DataError

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

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While this lasts the global generators are these; then they are what they were before."""
        before = torch.default_generator.get_state(), random.getstate(), _numpy_generator()
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        _set_numpy_generator(self._numpy)
        try:
            yield
        finally:
            self._torch, self._python = torch.default_generator.get_state(), random.getstate()
            torch.default_generator.set_state(before[0])
            random.setstate(before[1])
            _set_numpy_generator(before[2])


class Mark:
    """Where the generators stood at a moment: tells cheaply whether anybody has drawn since."""

    __slots__ = ("_numpy", "_python", "_torch")

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        self._numpy = _numpy_words()

    def moved(self) -> bool:
        """Whether a number was drawn since."""
        if self._numpy != _numpy_words():
            return True
        state, before = random.getstate(), self._python
        # Drawing moves the position (last) or, after a whole round, changes the first word: no need to compare all 625.
        if state[1][-1] != before[1][-1] or state[1][0] != before[1][0] or state[2] != before[2]:
            return True
        return self._torch.numpy().tobytes() != torch.default_generator.get_state().numpy().tobytes()

    def restore(self) -> None:
        """Put the generators back to where they stood."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        words = np.frombuffer(self._numpy, np.uint32)
        np.random.set_state(("MT19937", words[:-1], int(words[-1]), 0, 0.0))


def _numpy_generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, but not in NumPy's own stubs


def _set_numpy_generator(generator: Any) -> None:
    np.random.set_bit_generator(generator)  # type: ignore[attr-defined]


def _numpy_words() -> bytes:
    """NumPy's state as it lies in memory: NumPy gives its address, and the struct is the algorithm's words and position."""
    generator = _numpy_generator()
    if not isinstance(generator, np.random.MT19937):
        raise DataError(
            f"NumPy's global generator was replaced by {type(generator).__name__}, which cannot be seeded per sample; "
            "put back np.random.set_bit_generator(np.random.MT19937())"
        )
    return ctypes.string_at(generator.ctypes.state_address, 4 * _WORDS)
