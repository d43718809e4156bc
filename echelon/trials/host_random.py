"""Hold Python's and NumPy's random numbers at the middle of their distributions, as `still.py` holds torch's.

    uniform, normal                    the mean
    whole numbers, a choice            the middle of the range; without replacement the first ones
    exponential                        the median
    binomial                           the expected number, rounded
    a permutation, a shuffle           the identity

The functions of `random` and `numpy.random` are replaced for a while, the methods of `random.Random` with them; `default_rng` makes held
generators. Names that other modules imported (`from random import uniform`) are replaced too. NumPy's generators that exist already
cannot be patched: `make_fixed_generator` gives a held one to put in their place. What escapes moves a state, which `random_state.read_host_random_state` shows.
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


def _fill_like_numpy(value: Any, size: Any, dtype: Any = None) -> Any:
    """`value` in the shape that NumPy would give it: a scalar where neither a size nor an array was given."""
    if size is None and np.ndim(value) == 0:
        return np.asarray(value, dtype).item()
    return np.array(np.broadcast_to(value, np.shape(value) if size is None else size), dtype)


def _shape_or_none(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return shape or None


def _middle_integers(
    low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64, endpoint: bool = False
) -> Any:
    low, high = (0, low) if high is None else (low, high)
    return _fill_like_numpy((np.asarray(low) + np.asarray(high) - (0 if endpoint else 1)) // 2, size, dtype)


def _fixed_choice(
    population: Any, size: Any = None, replace: bool = True, weights: Any = None, axis: int = 0, shuffle: bool = True
) -> Any:
    values = np.arange(population) if np.ndim(population) == 0 else np.asarray(population)
    count = values.shape[axis]
    order = np.arange(count) if weights is None else np.argsort(-np.asarray(weights), kind="stable")
    if size is None:
        return np.take(values, order[0 if weights is not None else count // 2], axis)
    total = int(np.prod(size))
    picked_indices = np.full(total, order[0 if weights is not None else count // 2]) if replace else order[:total]
    return np.take(values, picked_indices.reshape(size), axis)


def _identity_permutation(x: Any, axis: int = 0) -> Any:
    return np.arange(x) if np.ndim(x) == 0 else np.array(x)


def _mean_of_location(loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
    return _fill_like_numpy(np.asarray(loc) + 0.0 * np.asarray(scale), size)


def _mean_dirichlet(alpha: Any, size: Any = None) -> Any:
    shape = () if size is None else tuple(np.atleast_1d(size))
    return np.array(np.broadcast_to(np.asarray(alpha) / np.sum(alpha), (*shape, len(alpha))))


def _identity_permuted(x: Any, axis: int | None = None, out: Any = None) -> Any:
    return np.array(x)


def _triangular_mode(left: Any, mode: Any, right: Any, size: Any = None) -> Any:
    return _fill_like_numpy(mode, size)


def _identity_shuffle(x: Any, axis: int = 0) -> None:
    """A shuffle that leaves the order."""


def _filled_half(*shape: int) -> Any:
    return _fill_like_numpy(0.5, _shape_or_none(shape))


def _filled_zero(*shape: int) -> Any:
    return _fill_like_numpy(0.0, _shape_or_none(shape))


def _middle_randint(low: Any, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
    return _middle_integers(low, high, size, dtype)


def _middle_random_integers(low: Any, high: Any = None, size: Any = None) -> Any:
    return _middle_integers(low, high, size, int, endpoint=True)


#: Name of a method -> its middle; the names that legacy functions and generators share.
_COMMON_DRAWS: dict[str, Callable[..., Any]] = {
    "random": lambda size=None, **_: _fill_like_numpy(0.5, size),
    "uniform": lambda low=0.0, high=1.0, size=None: _fill_like_numpy((np.asarray(low) + np.asarray(high)) / 2, size),
    "standard_normal": lambda size=None, **_: _fill_like_numpy(0.0, size),
    "normal": _mean_of_location, "laplace": _mean_of_location, "logistic": _mean_of_location, "gumbel": _mean_of_location,
    "choice": _fixed_choice,
    "permutation": _identity_permutation,
    "shuffle": _identity_shuffle,
    "exponential": lambda scale=1.0, size=None: _fill_like_numpy(np.asarray(scale) * math.log(2.0), size),
    "standard_exponential": lambda size=None, **_: _fill_like_numpy(math.log(2.0), size),
    "beta": lambda a, b, size=None: _fill_like_numpy(np.asarray(a) / (np.asarray(a) + np.asarray(b)), size),
    "gamma": lambda shape, scale=1.0, size=None: _fill_like_numpy(np.asarray(shape) * np.asarray(scale), size),
    "dirichlet": _mean_dirichlet,
    "binomial": lambda n, p, size=None: _fill_like_numpy(np.rint(np.asarray(n) * np.asarray(p)).astype(np.int64), size),
    "poisson": lambda lam=1.0, size=None: _fill_like_numpy(np.floor(lam).astype(np.int64), size),
    "lognormal": lambda mean=0.0, sigma=1.0, size=None: _fill_like_numpy(np.exp(mean), size),
    "triangular": _triangular_mode,
}  # fmt: skip
_LEGACY_NUMPY_DRAWS: dict[str, Callable[..., Any]] = _COMMON_DRAWS | {
    "rand": _filled_half,
    "randn": _filled_zero,
    "random_sample": _COMMON_DRAWS["random"], "ranf": _COMMON_DRAWS["random"], "sample": _COMMON_DRAWS["random"],
    "randint": _middle_randint,
    "random_integers": _middle_random_integers,
}  # fmt: skip
_GENERATOR_DRAWS: dict[str, Callable[..., Any]] = _COMMON_DRAWS | {
    "integers": _middle_integers,
    "permuted": _identity_permuted,
}


def _middle_item(population: Sequence[Any]) -> Any:
    return population[len(population) // 2]


def _middle_of_range(start: int, stop: int | None = None, step: int = 1) -> int:
    return _middle_item(range(start) if stop is None else range(start, stop, step))


#: The same for methods of `random.Random`, called without the instance.
_PYTHON_DRAWS: dict[str, Callable[..., Any]] = {
    "random": lambda: 0.5,
    "uniform": lambda a, b: (a + b) / 2,
    "triangular": lambda low=0.0, high=1.0, mode=None: (low + high) / 2 if mode is None else mode,
    "randint": lambda a, b: (a + b) // 2,
    "randrange": _middle_of_range,
    "getrandbits": lambda k: 1 << (k - 1) if k else 0,
    "choice": _middle_item,
    "choices": lambda population, weights=None, *, cum_weights=None, k=1: (
        [population[max(range(len(population)), key=lambda at: weights[at])] if weights else _middle_item(population)]
        * k
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


def _as_method(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: draw(*args, **kwargs)


_FixedGenerator = type(
    "_FixedGenerator", (np.random.Generator,), {name: _as_method(held) for name, held in _GENERATOR_DRAWS.items()}
)
_FixedRandomState = type(
    "_FixedRandomState",
    (np.random.RandomState,),
    {name: _as_method(held) for name, held in _LEGACY_NUMPY_DRAWS.items()},
)


def make_fixed_generator(value: Any) -> Any:
    """A held generator in place of one of NumPy's; None for anything else."""
    if isinstance(value, np.random.Generator):
        return _FixedGenerator(np.random.PCG64(0))
    return _FixedRandomState(0) if isinstance(value, np.random.RandomState) else None


@contextlib.contextmanager
def fixed_host_random() -> Iterator[None]:
    """Python's and NumPy's random numbers stand still."""
    with contextlib.ExitStack() as stack:
        for name, draw in _LEGACY_NUMPY_DRAWS.items():
            stack.enter_context(_patched_attribute(np.random, name, draw))
        stack.enter_context(
            _patched_attribute(np.random, "default_rng", lambda seed=None: _FixedGenerator(np.random.PCG64(0)))
        )
        for name, draw in _PYTHON_DRAWS.items():
            stack.enter_context(_patched_attribute(random, name, draw))
            stack.enter_context(_patched_attribute(random.Random, name, _as_method(draw)))
        for module, name, draw in _find_imported_draws(len(sys.modules)):
            stack.enter_context(_patched_attribute(module, name, draw))
        yield


#: The functions themselves, before they are replaced -> their middles.
_DRAWS_BY_ORIGINAL: dict[int, Callable[..., Any]] = {
    id(getattr(owner, name)): middle
    for owner, table in ((np.random, _LEGACY_NUMPY_DRAWS), (random, _PYTHON_DRAWS))
    for name, middle in table.items()
    if hasattr(owner, name)
}


@lru_cache(maxsize=1)
def _find_imported_draws(num_modules: int) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Where other modules hold these functions under names of their own (`from random import uniform`). `num_modules`: how many there are,
    so that they are looked through again when more come."""
    source_modules = (random, np.random, sys.modules.get("numpy.random.mtrand"))
    return [
        (module, name, _DRAWS_BY_ORIGINAL[id(value)])
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and not any(module is source_module for source_module in source_modules)
        for name, value in list(vars(module).items())
        if id(value) in _DRAWS_BY_ORIGINAL
    ]


@contextlib.contextmanager
def _patched_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while; another version may not have it, and then nothing happens."""
    if not hasattr(owner, name):
        yield
        return
    is_inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
