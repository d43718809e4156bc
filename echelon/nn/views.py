"""Views by a width of which a rank has a part.

Code that takes the width from what it was given (`b, t, c = x.shape`), not from its columns, asks for all of them when it puts heads
together again: `y.transpose(1, 2).reshape(b, t, c)`. Where one rank has some of the heads, it is given those.
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
    """Inside, a view that asks for `width` columns where there are `mine` of them gets those."""

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


def fit_to_local_width(
    shape: Sequence[int], requested: Sequence[Any], full_width: int, local_width: int
) -> list[int] | None:
    """`requested` with one of its sizes reduced as `local_width` is to `full_width`; None: it needs no fitting, or none helps.

    The last one that is the width; else the first after those that stay as they are (samples and positions).
    """
    if not all(type(size) is int and size > 0 for size in requested):
        return None
    if math.prod(requested) * local_width != math.prod(shape) * full_width or full_width == local_width:
        return None
    unchanged = next(
        (
            dim
            for dim, (requested_size, actual_size) in enumerate(zip(requested, shape, strict=False))
            if requested_size != actual_size
        ),
        len(requested),
    )
    candidates = [dim for dim in reversed(range(len(requested))) if requested[dim] == full_width]
    candidates += [dim for dim in range(unchanged, len(requested)) if requested[dim] * local_width % full_width == 0]
    if not candidates:
        return None
    return [size * local_width // full_width if dim == candidates[0] else size for dim, size in enumerate(requested)]
