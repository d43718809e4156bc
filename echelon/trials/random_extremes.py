"""Fix random numbers at the ends of their range: a model whose calls depend on them cannot be cut into stages.

Layer drop with a rate of zero draws and never drops; with any other rate one of the two ends shows it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from echelon.trials.torch_patches import patch_attribute

#: The lowest number that is drawn from [0, 1), and one that is above every rate.
UNIFORM_EXTREMES = (0.0, 1 - 1e-7)


@contextmanager
def uniform_draws_fixed_at(extreme: float) -> Iterator[None]:
    """Inside, uniform random numbers of torch, Python and NumPy are `extreme`, scaled to the requested bounds."""

    def draw_uniform(low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        value = low + (high - low) * extreme
        return value if size is None else numpy.full(size, value)

    def draw_shape(*shape: Any, size: Any = None) -> Any:
        size = shape[0] if len(shape) == 1 else shape or size
        return numpy.full(size, extreme) if size not in (None, ()) else extreme

    with ExitStack() as stack:
        for name in ("random", "uniform"):
            stack.enter_context(patch_attribute(random, name, draw_uniform))
        for name in ("random", "rand", "random_sample", "uniform"):
            draw = draw_uniform if name == "uniform" else draw_shape
            stack.enter_context(patch_attribute(numpy.random, name, draw))
        stack.enter_context(_TorchUniformPatch(extreme))
        yield


class _TorchUniformPatch(TorchFunctionMode):
    def __init__(self, extreme: float) -> None:
        super().__init__()
        self._extreme = extreme

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.rand, torch.rand_like) and isinstance(out, Tensor):
            return torch.full_like(out, self._extreme)
        return out
