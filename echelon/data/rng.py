"""The global random generators that a data set may draw from: torch's, Python's and NumPy's.

Seeded for each sample and apart from the training's own: augmentation then depends on the seed, the epoch and the sample
alone, not on which rank or worker happens to load it, and loading does not disturb what the model draws.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch

_numpy: Any = np.random  # whose type stubs lack the two functions that exchange its generator
#: Bytes of a Mersenne twister as Python and NumPy hold it: 624 words and the position in them.
_TWISTER = 4 * 625

KINDS = ("torch", "python", "numpy")


def seeds(seed: int, epoch: int, ids: np.ndarray) -> list[int]:
    """One well-mixed number per sample (splitmix64 over seed, epoch, id), for `seed`."""
    base = _mix(_mix(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch))
    mixed: list[int] = _mix(base + ids.astype(np.uint64)).tolist()
    return mixed


def _mix(x: Any) -> Any:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed(number: int, kinds: Iterable[str] = KINDS) -> None:
    """Start the generators of these kinds from `number`. CPU only: torch.manual_seed would also reseed every accelerator."""
    for kind in kinds:
        if kind == "torch":
            torch.default_generator.manual_seed(number)
        elif kind == "python":
            random.seed(number)
        else:
            np.random.seed(number & 0xFFFFFFFF)


class Apart:
    """A second set of generators that takes the place of the global ones while a data set is read: `with apart: ...`.

    It is entered for every batch, so it costs microseconds: NumPy's generator is exchanged as an object (which drops the spare
    number that its old normal distribution may hold), and Python's is put back only if it moved.
    """

    def __init__(self) -> None:
        self._torch = torch.Generator().get_state()
        self._torch_bytes = _bytes(self._torch)
        self._numpy = np.random.MT19937(0)
        self._python: Any = None  # None: the global one as it stands; it is seeded before it is used, or put back
        self._python_address = _python_address()

    def __getstate__(self) -> dict[str, Any]:
        # An address of this process is none in a worker that was spawned, and neither is what stands while it is entered.
        apart = ("_python_address", "_outer", "_start")
        return {name: value for name, value in self.__dict__.items() if name not in apart}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._python_address = _python_address()

    def __enter__(self) -> Self:
        python = self._python_words()
        self._outer = torch.default_generator.get_state(), python, _numpy.get_bit_generator()
        torch.default_generator.set_state(self._torch)
        _numpy.set_bit_generator(self._numpy)
        if self._python is not None:
            random.setstate(self._python)
            python = self._python_words()
        self._start = self._torch_bytes, python, _words(self._numpy)
        return self

    def __exit__(self, *error: object) -> None:
        before, python, numpy = self._outer
        torch.default_generator.set_state(before)
        _numpy.set_bit_generator(numpy)
        if self._python_words() != python:
            random.setstate(python if self._python_address is None else _decoded(*python))

    def drawn(self) -> set[str]:
        """Which kinds have been drawn from, or seeded, since it was entered."""
        now = _bytes(torch.default_generator.get_state()), self._python_words(), _words(self._numpy)
        if now == self._start:
            return set()
        return {kind for kind, was, is_ in zip(KINDS, self._start, now, strict=True) if was != is_}

    def keep(self) -> None:
        """Go on from here when it is entered again, instead of from where it was entered this time."""
        self._torch, self._python = torch.default_generator.get_state(), random.getstate()
        self._torch_bytes = _bytes(self._torch)

    def _python_words(self) -> Any:
        if self._python_address is None:
            return random.getstate()
        return ctypes.string_at(self._python_address, _TWISTER), _python().gauss_next


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _words(generator: np.random.MT19937) -> bytes:
    """NumPy's state as it lies in memory, at the address that NumPy gives: its own copy of it takes 80 microseconds."""
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER)


def _python() -> Any:
    function: Any = random.random
    return function.__self__  # the generator behind the functions of `random`


def _python_address() -> int | None:
    """Where CPython holds the state of `random` (`getstate` makes 625 objects of it); None if it is not found there."""
    address = id(_python()) + object.__basicsize__
    try:
        found = _decoded(ctypes.string_at(address, _TWISTER), _python().gauss_next)
    except AttributeError:
        return None
    return address if found == random.getstate() else None


def _decoded(words: bytes, gauss_next: float | None) -> tuple[Any, ...]:
    """The words in memory (position first) as `random.setstate` takes them (position last)."""
    position, *key = np.frombuffer(words, np.uint32).tolist()
    return 3, (*key, position), gauss_next
