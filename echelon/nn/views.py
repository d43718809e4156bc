"""Views by a width of which a rank has only a part.

Code that takes the width from its input (`b, t, c = x.shape`) asks for all columns when it joins heads again:
`y.transpose(1, 2).reshape(b, t, c)`. On a rank with some of the heads, it gets their columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_VIEW_FUNCTIONS = (Tensor.view, Tensor.reshape, torch.reshape)


class LocalWidthViews(TorchFunctionMode):
    """Inside, a view that asks for `full_width` columns of a tensor that has `local_width` gets those."""

    def __init__(self, full_width: int, local_width: int) -> None:
        super().__init__()
        self._full_width, self._local_width = full_width, local_width

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VIEW_FUNCTIONS and not kwargs:
            requested = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
            local_shape = fit_to_local_width(args[0].shape, requested, self._full_width, self._local_width)
            if local_shape is not None:
                return func(args[0], local_shape)
        return func(*args, **(kwargs or {}))


def fit_to_local_width(shape: Sequence[int], requested: Sequence[Any], full: int, local: int) -> list[int] | None:
    """`requested` with one of its sizes scaled by `local / full`; None if that is not needed or does not help.

    The last size that is the width, else the first after those that stay (samples and positions).
    """
    if not all(type(size) is int and size > 0 for size in requested):
        return None
    if math.prod(requested) * local != math.prod(shape) * full or full == local:
        return None
    pairs = enumerate(zip(requested, shape, strict=False))
    unchanged = next((dim for dim, (wanted, actual) in pairs if wanted != actual), len(requested))
    candidates = [dim for dim in reversed(range(len(requested))) if requested[dim] == full]
    candidates += [dim for dim in range(unchanged, len(requested)) if requested[dim] * local % full == 0]
    if not candidates:
        return None
    return [size * local // full if dim == candidates[0] else size for dim, size in enumerate(requested)]
