"""Hold Python's and NumPy's random numbers at the middle of their distributions, as `still.py` holds torch's.

    uniform, normal                    the mean
    whole numbers, a choice            the middle of the range; without replacement the first ones
    exponential                        the median
    binomial                           the expected number, rounded
    a permutation, a shuffle           the identity

The functions of `random` and `numpy.random` are replaced for a while, the methods of `random.Random` with them; `default_rng` makes held
generators. Names that other modules imported (`from random import uniform`) are replaced too. NumPy's generators that exist already
cannot be patched: `held_generator` gives a held one to put in their place. What escapes moves a state, which `states` shows.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np


def _filled(value: Any, size: Any, dtype: Any = None) -> Any:
    """`value` in the shape that NumPy would give it: a scalar where neither a size nor an array was given."""
    if size is None and np.ndim(value) == 0:
        return np.asarray(value, dtype).item()
    return np.array(np.broadcast_to(value, np.shape(value) if size is None else size), dtype)


def _shape(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return shape or None


def _integers(low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64, endpoint: bool = False) -> Any:
    low, high = (0, low) if high is None else (low, high)
    return _filled((np.asarray(low) + np.asarray(high) - (0 if endpoint else 1)) // 2, size, dtype)


def _choice(a: Any, size: Any = None, replace: bool = True, p: Any = None, axis: int = 0, shuffle: bool = True) -> Any:
    values = np.arange(a) if np.ndim(a) == 0 else np.asarray(a)
    count = values.shape[axis]
    order = np.arange(count) if p is None else np.argsort(-np.asarray(p), kind="stable")
    if size is None:
        return np.take(values, order[0 if p is not None else count // 2], axis)
    total = int(np.prod(size))
    picks = np.full(total, order[0 if p is not None else count // 2]) if replace else order[:total]
    return np.take(values, picks.reshape(size), axis)


def _permutation(x: Any, axis: int = 0) -> Any:
    return np.arange(x) if np.ndim(x) == 0 else np.array(x)


def _mean(loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
    return _filled(np.asarray(loc) + 0.0 * np.asarray(scale), size)


def _dirichlet(alpha: Any, size: Any = None) -> Any:
    shape = () if size is None else tuple(np.atleast_1d(size))
    return np.array(np.broadcast_to(np.asarray(alpha) / np.sum(alpha), (*shape, len(alpha))))


def _permuted(x: Any, axis: int | None = None, out: Any = None) -> Any:
    return np.array(x)


def _mode(left: Any, mode: Any, right: Any, size: Any = None) -> Any:
    return _filled(mode, size)


def _unchanged(x: Any, axis: int = 0) -> None:
    """A shuffle that leaves the order."""


def _half(*shape: int) -> Any:
    return _filled(0.5, _shape(shape))


def _zero(*shape: int) -> Any:
    return _filled(0.0, _shape(shape))


def _randint(low: Any, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
    return _integers(low, high, size, dtype)


def _random_integers(low: Any, high: Any = None, size: Any = None) -> Any:
    return _integers(low, high, size, int, endpoint=True)


#: Name of a method -> its middle; the names that legacy functions and generators share.
_BOTH: dict[str, Callable[..., Any]] = {
    "random": lambda size=None, **_: _filled(0.5, size),
    "uniform": lambda low=0.0, high=1.0, size=None: _filled((np.asarray(low) + np.asarray(high)) / 2, size),
    "standard_normal": lambda size=None, **_: _filled(0.0, size),
    "normal": _mean, "laplace": _mean, "logistic": _mean, "gumbel": _mean,
    "choice": _choice,
    "permutation": _permutation,
    "shuffle": _unchanged,
    "exponential": lambda scale=1.0, size=None: _filled(np.asarray(scale) * math.log(2.0), size),
    "standard_exponential": lambda size=None, **_: _filled(math.log(2.0), size),
    "beta": lambda a, b, size=None: _filled(np.asarray(a) / (np.asarray(a) + np.asarray(b)), size),
    "gamma": lambda shape, scale=1.0, size=None: _filled(np.asarray(shape) * np.asarray(scale), size),
    "dirichlet": _dirichlet,
    "binomial": lambda n, p, size=None: _filled(np.rint(np.asarray(n) * np.asarray(p)).astype(np.int64), size),
    "poisson": lambda lam=1.0, size=None: _filled(np.floor(lam).astype(np.int64), size),
    "lognormal": lambda mean=0.0, sigma=1.0, size=None: _filled(np.exp(mean), size),
    "triangular": _mode,
}  # fmt: skip
_LEGACY: dict[str, Callable[..., Any]] = _BOTH | {
    "rand": _half,
    "randn": _zero,
    "random_sample": _BOTH["random"], "ranf": _BOTH["random"], "sample": _BOTH["random"],
    "randint": _randint,
    "random_integers": _random_integers,
}  # fmt: skip
_GENERATOR: dict[str, Callable[..., Any]] = _BOTH | {
    "integers": _integers,
    "permuted": _permuted,
}


def _draw_one(population: Sequence[Any]) -> Any:
    return population[len(population) // 2]


def _range_middle(start: int, stop: int | None = None, step: int = 1) -> int:
    return _draw_one(range(start) if stop is None else range(start, stop, step))


#: The same for methods of `random.Random`, called without the instance.
_PYTHON: dict[str, Callable[..., Any]] = {
    "random": lambda: 0.5,
    "uniform": lambda a, b: (a + b) / 2,
    "triangular": lambda low=0.0, high=1.0, mode=None: (low + high) / 2 if mode is None else mode,
    "randint": lambda a, b: (a + b) // 2,
    "randrange": _range_middle,
    "getrandbits": lambda k: 1 << (k - 1) if k else 0,
    "choice": _draw_one,
    "choices": lambda population, weights=None, *, cum_weights=None, k=1: (
        [population[max(range(len(population)), key=lambda at: weights[at])] if weights else _draw_one(population)] * k
    ),
    "sample": lambda population, k, *, counts=None: list(population)[:k],
    "shuffle": lambda x: None,
    "gauss": lambda mu=0.0, sigma=1.0: mu,
    "normalvariate": lambda mu=0.0, sigma=1.0: mu,
    "lognormvariate": lambda mu=0.0, sigma=1.0: math.exp(mu),
    "expovariate": lambda lambd=1.0: math.log(2.0) / lambd,
    "betavariate": lambda alpha, beta: alpha / (alpha + beta),
    "gammavariate": lambda alpha, beta: alpha * beta,
    "vonmisesvariate": lambda mu, kappa: mu,
}


def _method(held: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: held(*args, **kwargs)


_HeldGenerator = type(
    "_HeldGenerator", (np.random.Generator,), {name: _method(held) for name, held in _GENERATOR.items()}
)
_HeldState = type("_HeldState", (np.random.RandomState,), {name: _method(held) for name, held in _LEGACY.items()})


def held_generator(value: Any) -> Any:
    """A held generator in place of one of NumPy's; None for anything else."""
    if isinstance(value, np.random.Generator):
        return _HeldGenerator(np.random.PCG64(0))
    return _HeldState(0) if isinstance(value, np.random.RandomState) else None


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Python's and NumPy's random numbers stand still."""
    with contextlib.ExitStack() as stack:
        for name, middle in _LEGACY.items():
            stack.enter_context(_replaced(np.random, name, middle))
        stack.enter_context(_replaced(np.random, "default_rng", lambda seed=None: _HeldGenerator(np.random.PCG64(0))))
        for name, middle in _PYTHON.items():
            stack.enter_context(_replaced(random, name, middle))
            stack.enter_context(_replaced(random.Random, name, _method(middle)))
        for module, name, middle in _named_imports(len(sys.modules)):
            stack.enter_context(_replaced(module, name, middle))
        yield


#: The functions themselves, before they are replaced -> their middles.
_ORIGINALS: dict[int, Callable[..., Any]] = {
    id(getattr(owner, name)): middle
    for owner, table in ((np.random, _LEGACY), (random, _PYTHON))
    for name, middle in table.items()
    if hasattr(owner, name)
}


@lru_cache(maxsize=1)
def _named_imports(modules: int) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Where other modules hold these functions under names of their own (`from random import uniform`). `modules`: how many there are,
    so that they are looked through again when more come."""
    own = (random, np.random, sys.modules.get("numpy.random.mtrand"))
    return [
        (module, name, _ORIGINALS[id(value)])
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and not any(module is each for each in own)
        for name, value in list(vars(module).items())
        if id(value) in _ORIGINALS
    ]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while; another version may not have it, and then nothing happens."""
    if not hasattr(owner, name):
        yield
        return
    inherited = name not in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def states() -> tuple[Any, ...]:
    """What the default generators stand at, to see whether something drew from them."""
    state: Any = np.random.get_state(legacy=True)
    return random.getstate(), state[1].tobytes(), *state[2:]
