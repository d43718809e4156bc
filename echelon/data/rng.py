"""Isolates the global random generators that a data set may draw from: torch's, Python's and NumPy's.

They are seeded for each sample and separate from the training's: augmentation depends only on the seed, the epoch and the sample, not on
the rank or worker that loads it, and loading does not change what the model draws.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch

_numpy_random: Any = np.random  # its type stubs lack the functions that exchange the generator
#: Bytes of a Mersenne twister in Python and NumPy: 624 words and the position in them.
_MT_STATE_BYTES = 4 * 625

GENERATOR_KINDS = ("torch", "python", "numpy")


def derive_seeds(seed: int, epoch: int, ids: np.ndarray) -> list[int]:
    """Derive one seed per sample (splitmix64 over seed, epoch, id)."""
    base = _splitmix64(_splitmix64(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch))
    seeds: list[int] = _splitmix64(base + ids.astype(np.uint64)).tolist()
    return seeds


def _splitmix64(x: Any) -> Any:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_generators(seed_value: int, kinds: Iterable[str] = GENERATOR_KINDS) -> None:
    """Seed the generators of these kinds. CPU only: torch.manual_seed would also reseed every accelerator."""
    for kind in kinds:
        if kind == "torch":
            torch.default_generator.manual_seed(seed_value)
        elif kind == "python":
            random.seed(seed_value)
        else:
            np.random.seed(seed_value & 0xFFFFFFFF)


class IsolatedRng:
    """A second set of generators that replaces the global ones inside `with`.

    It is entered for every batch, so it costs microseconds: NumPy's generator is exchanged as an object (which drops the spare number of
    its old normal distribution), and Python's is restored only if it moved.
    """

    def __init__(self) -> None:
        self._torch_state = torch.Generator().get_state()
        self._torch_state_bytes = _tensor_bytes(self._torch_state)
        self._numpy_generator = np.random.MT19937(0)
        self._python_state: Any = None  # None: the global one, which is seeded before use or restored
        self._python_address = _python_address()

    def __getstate__(self) -> dict[str, Any]:
        # Addresses differ in a spawned worker, and so does what is saved while it is entered.
        excluded = ("_python_address", "_outer", "_start")
        return {name: value for name, value in self.__dict__.items() if name not in excluded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._python_address = _python_address()

    def __enter__(self) -> Self:
        python_words = self._read_python_words()
        self._outer = torch.default_generator.get_state(), python_words, _numpy_random.get_bit_generator()
        torch.default_generator.set_state(self._torch_state)
        _numpy_random.set_bit_generator(self._numpy_generator)
        if self._python_state is not None:
            random.setstate(self._python_state)
            python_words = self._read_python_words()
        self._start = self._torch_state_bytes, python_words, _numpy_words(self._numpy_generator)
        return self

    def __exit__(self, *error: object) -> None:
        torch_state, python_words, numpy_generator = self._outer
        torch.default_generator.set_state(torch_state)
        _numpy_random.set_bit_generator(numpy_generator)
        if self._read_python_words() != python_words:
            random.setstate(python_words if self._python_address is None else _decode_python_words(*python_words))

    def find_used_kinds(self) -> set[str]:
        """The kinds that were drawn from, or seeded, since it was entered."""
        torch_bytes = _tensor_bytes(torch.default_generator.get_state())
        states = torch_bytes, self._read_python_words(), _numpy_words(self._numpy_generator)
        pairs = zip(GENERATOR_KINDS, self._start, states, strict=True)
        return {kind for kind, before, after in pairs if before != after}

    def save_state(self) -> None:
        """Continue from here when it is entered again."""
        self._torch_state, self._python_state = torch.default_generator.get_state(), random.getstate()
        self._torch_state_bytes = _tensor_bytes(self._torch_state)

    def _read_python_words(self) -> Any:
        if self._python_address is None:
            return random.getstate()
        return ctypes.string_at(self._python_address, _MT_STATE_BYTES), _python_generator().gauss_next


def _tensor_bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _numpy_words(generator: np.random.MT19937) -> bytes:
    """NumPy's state in memory, at the address that NumPy gives: asking for a copy takes 80 microseconds."""
    return ctypes.string_at(generator.ctypes.state_address, _MT_STATE_BYTES)


def _python_generator() -> Any:
    function: Any = random.random
    return function.__self__  # the generator behind the functions of `random`


def _python_address() -> int | None:
    """Where CPython holds the state of `random`, of which `getstate` makes 625 objects; None if it is not found there."""
    address = id(_python_generator()) + object.__basicsize__
    try:
        state = _decode_python_words(ctypes.string_at(address, _MT_STATE_BYTES), _python_generator().gauss_next)
    except AttributeError:
        return None
    return address if state == random.getstate() else None


def _decode_python_words(words: bytes, gauss_next: float | None) -> tuple[Any, ...]:
    """Convert words in memory (position first) to what `random.setstate` takes (position last)."""
    position, *key = np.frombuffer(words, np.uint32).tolist()
    return 3, (*key, position), gauss_next
