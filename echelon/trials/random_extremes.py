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
ENDS = (0.0, 1 - 1e-7)
_PYTHON = ("random", "uniform")
_NUMPY = ("random", "rand", "uniform", "random_sample")


@contextmanager
def draws_at(end: float) -> Iterator[None]:
    """Inside, uniform random numbers of torch, Python and NumPy are `end`, between the bounds that were asked for."""
    with ExitStack() as stack:
        for name in _PYTHON:
            stack.enter_context(patch.object(random, name, _scalar(end)))
        for name in _NUMPY:
            stack.enter_context(patch.object(numpy.random, name, _array(end, shaped=name != "uniform")))
        stack.enter_context(_Ends(end))
        yield


def _scalar(end: float) -> Any:
    return lambda low=0.0, high=1.0: low + (high - low) * end


def _array(end: float, *, shaped: bool) -> Any:
    def drawn(*given: Any, size: Any = None) -> Any:
        if shaped:
            size = given[0] if len(given) == 1 else given or size
            return numpy.full(size, end) if size not in (None, ()) else end
        low, high, *rest = (*given, 0.0, 1.0)[:2] if len(given) < 3 else given
        value = low + (high - low) * end
        size = rest[0] if rest else size
        return value if size is None else numpy.full(size, value)

    return drawn


class _Ends(TorchFunctionMode):
    def __init__(self, end: float) -> None:
        super().__init__()
        self._end = end

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.rand, torch.rand_like) and isinstance(out, Tensor):
            return torch.full_like(out, self._end)
        return out
