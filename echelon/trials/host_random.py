"""Fix Python's and NumPy's random numbers at the middle of their distributions, as `determinism.py` fixes torch's.

The functions of `random` and `numpy.random` are patched, the methods of `random.Random` with them, and names that other modules imported
(`from random import uniform`); `default_rng` makes fixed generators. NumPy's existing generators cannot be patched: `make_fixed_generator`
makes the one to put in their place. What escapes moves a state, which `random_state.read_host_random_state` shows.
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

from echelon.trials.torch_patches import patch_attribute

_Draw = Callable[..., Any]


def _fill(value: Any, size: Any, dtype: Any = None) -> Any:
    """`value` in the shape that NumPy would give it: a scalar where neither a size nor an array was given."""
    if size is None and np.ndim(value) == 0:
        return np.asarray(value, dtype).item()
    return np.array(np.broadcast_to(value, np.shape(value) if size is None else size), dtype)


def _middle_integer(low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64, endpoint: bool = False) -> Any:
    low, high = (0, low) if high is None else (low, high)
    return _fill((np.asarray(low) + np.asarray(high) - (0 if endpoint else 1)) // 2, size, dtype)


def _fixed_choice(
    a: Any, size: Any = None, replace: bool = True, p: Any = None, axis: int = 0, shuffle: bool = True
) -> Any:
    values = np.arange(a) if np.ndim(a) == 0 else np.asarray(a)
    count = values.shape[axis]
    order = np.arange(count) if p is None else np.argsort(-np.asarray(p), kind="stable")
    first = order[count // 2 if p is None else 0]
    if size is None:
        return np.take(values, first, axis)
    total = int(np.prod(size))
    indices = np.full(total, first) if replace else order[:total]
    return np.take(values, indices.reshape(size), axis)


def _location(loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
    return _fill(np.asarray(loc) + 0.0 * np.asarray(scale), size)


def _mean_dirichlet(alpha: Any, size: Any = None) -> Any:
    shape = () if size is None else tuple(np.atleast_1d(size))
    return np.array(np.broadcast_to(np.asarray(alpha) / np.sum(alpha), (*shape, len(alpha))))


#: Name of a method -> its middle; the names that legacy functions and generators share.
_COMMON_DRAWS: dict[str, _Draw] = {
    "random": lambda size=None, **_: _fill(0.5, size),
    "uniform": lambda low=0.0, high=1.0, size=None: _fill((np.asarray(low) + np.asarray(high)) / 2, size),
    "standard_normal": lambda size=None, **_: _fill(0.0, size),
    "normal": _location, "laplace": _location, "logistic": _location, "gumbel": _location,
    "choice": _fixed_choice,
    "permutation": lambda x, axis=0: np.arange(x) if np.ndim(x) == 0 else np.array(x),
    "shuffle": lambda x, axis=0: None,
    "exponential": lambda scale=1.0, size=None: _fill(np.asarray(scale) * math.log(2.0), size),
    "standard_exponential": lambda size=None, **_: _fill(math.log(2.0), size),
    "beta": lambda a, b, size=None: _fill(np.asarray(a) / (np.asarray(a) + np.asarray(b)), size),
    "gamma": lambda shape, scale=1.0, size=None: _fill(np.asarray(shape) * np.asarray(scale), size),
    "dirichlet": _mean_dirichlet,
    "binomial": lambda n, p, size=None: _fill(np.rint(np.asarray(n) * np.asarray(p)).astype(np.int64), size),
    "poisson": lambda lam=1.0, size=None: _fill(np.floor(lam).astype(np.int64), size),
    "lognormal": lambda mean=0.0, sigma=1.0, size=None: _fill(np.exp(mean), size),
    "triangular": lambda left, mode, right, size=None: _fill(mode, size),
}  # fmt: skip
_LEGACY_NUMPY_DRAWS: dict[str, _Draw] = _COMMON_DRAWS | {
    "rand": lambda *shape: _fill(0.5, shape or None),
    "randn": lambda *shape: _fill(0.0, shape or None),
    "random_sample": _COMMON_DRAWS["random"], "ranf": _COMMON_DRAWS["random"], "sample": _COMMON_DRAWS["random"],
    "randint": _middle_integer,
    "random_integers": lambda low, high=None, size=None: _middle_integer(low, high, size, int, endpoint=True),
}  # fmt: skip
_GENERATOR_DRAWS = _COMMON_DRAWS | {"integers": _middle_integer, "permuted": lambda x, **_: np.array(x)}


def _middle_item(population: Sequence[Any]) -> Any:
    return population[len(population) // 2]


def _middle_of_range(start: int, stop: int | None = None, step: int = 1) -> int:
    return _middle_item(range(start) if stop is None else range(start, stop, step))


def _fixed_choices(population: Any, weights: Any = None, *, cum_weights: Any = None, k: int = 1) -> list[Any]:
    heaviest = max(range(len(population)), key=lambda i: weights[i]) if weights else len(population) // 2
    return [population[heaviest]] * k


#: The same for methods of `random.Random`, called without the instance.
_PYTHON_DRAWS: dict[str, _Draw] = {
    "random": lambda: 0.5,
    "uniform": lambda a, b: (a + b) / 2,
    "triangular": lambda low=0.0, high=1.0, mode=None: (low + high) / 2 if mode is None else mode,
    "randint": lambda a, b: (a + b) // 2,
    "randrange": _middle_of_range,
    "getrandbits": lambda k: 1 << (k - 1) if k else 0,
    "choice": _middle_item,
    "choices": _fixed_choices,
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


def _as_method(draw: _Draw) -> _Draw:
    return lambda self, *args, **kwargs: draw(*args, **kwargs)


def _as_methods(draws: dict[str, _Draw]) -> dict[str, _Draw]:
    return {name: _as_method(draw) for name, draw in draws.items()}


_FixedGenerator = type("_FixedGenerator", (np.random.Generator,), _as_methods(_GENERATOR_DRAWS))
_FixedRandomState = type("_FixedRandomState", (np.random.RandomState,), _as_methods(_LEGACY_NUMPY_DRAWS))


def make_fixed_generator(value: Any) -> Any:
    """A fixed generator in place of one of NumPy's; None for anything else."""
    if isinstance(value, np.random.Generator):
        return _FixedGenerator(np.random.PCG64(0))
    return _FixedRandomState(0) if isinstance(value, np.random.RandomState) else None


@contextlib.contextmanager
def fixed_host_random() -> Iterator[None]:
    """Inside, Python's and NumPy's random numbers are fixed."""
    numpy_draws = _LEGACY_NUMPY_DRAWS | {"default_rng": lambda seed=None: _FixedGenerator(np.random.PCG64(0))}
    patches: list[tuple[Any, dict[str, _Draw]]] = [
        (np.random, numpy_draws),
        (random, _PYTHON_DRAWS),
        (random.Random, _as_methods(_PYTHON_DRAWS)),
        *_find_imported_draws(len(sys.modules)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, draws in patches:
            for name, draw in draws.items():
                stack.enter_context(patch_attribute(owner, name, draw))
        yield


#: The functions themselves, before they are replaced -> their middles.
_DRAWS_BY_ORIGINAL: dict[int, _Draw] = {
    id(getattr(owner, name)): middle
    for owner, table in ((np.random, _LEGACY_NUMPY_DRAWS), (random, _PYTHON_DRAWS))
    for name, middle in table.items()
    if hasattr(owner, name)
}


@lru_cache(maxsize=1)
def _find_imported_draws(num_modules: int) -> list[tuple[Any, dict[str, _Draw]]]:
    """Modules that imported these functions under names of their own, with the draws; searched again when `num_modules` changes."""
    sources = (random, np.random, sys.modules.get("numpy.random.mtrand"))
    draws_by_module = []
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and not any(module is source for source in sources):
            names = [name for name, value in list(vars(module).items()) if id(value) in _DRAWS_BY_ORIGINAL]
            draws_by_module.append((module, {name: _DRAWS_BY_ORIGINAL[id(vars(module)[name])] for name in names}))
    return draws_by_module
