"""Random numbers at the ends of their range: what a model calls must not follow from them if it is to be cut into stages.

Layer drop with a rate of zero draws and never drops; with any other rate one of the two ends shows it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: The lowest number that is drawn from [0, 1), and one that is above every rate.
UNIFORM_EXTREMES = (0.0, 1 - 1e-7)
_PYTHON_FUNCTIONS = ("random", "uniform")
_NUMPY_FUNCTIONS = ("random", "rand", "uniform", "random_sample")


@contextmanager
def uniform_draws_fixed_at(extreme: float) -> Iterator[None]:
    """Inside, uniform random numbers of torch, Python and NumPy are `extreme`, between the bounds that were asked for."""
    with ExitStack() as stack:
        for name in _PYTHON_FUNCTIONS:
            stack.enter_context(patch.object(random, name, _make_scalar_draw(extreme)))
        for name in _NUMPY_FUNCTIONS:
            stack.enter_context(
                patch.object(numpy.random, name, _make_array_draw(extreme, takes_shape=name != "uniform"))
            )
        stack.enter_context(_TorchUniformPatch(extreme))
        yield


def _make_scalar_draw(extreme: float) -> Any:
    return lambda low=0.0, high=1.0: low + (high - low) * extreme


def _make_array_draw(extreme: float, *, takes_shape: bool) -> Any:
    def drawn(*positional: Any, size: Any = None) -> Any:
        if takes_shape:
            size = positional[0] if len(positional) == 1 else positional or size
            return numpy.full(size, extreme) if size not in (None, ()) else extreme
        low, high, *rest = (*positional, 0.0, 1.0)[:2] if len(positional) < 3 else positional
        value = low + (high - low) * extreme
        size = rest[0] if rest else size
        return value if size is None else numpy.full(size, value)

    return drawn


class _TorchUniformPatch(TorchFunctionMode):
    def __init__(self, extreme: float) -> None:
        super().__init__()
        self._extreme = extreme

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.rand, torch.rand_like) and isinstance(out, Tensor):
            return torch.full_like(out, self._extreme)
        return out
