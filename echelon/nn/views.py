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

_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)


class Fitted(TorchFunctionMode):
    """Inside, a view that asks for `width` columns where there are `mine` of them gets those."""

    def __init__(self, width: int, mine: int) -> None:
        super().__init__()
        self._width, self._mine = width, mine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VIEWS and not kwargs:
            asked = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
            fitted = fit(args[0].shape, asked, self._width, self._mine)
            if fitted is not None:
                return func(args[0], fitted)
        return func(*args, **(kwargs or {}))


def fit(shape: Sequence[int], asked: Sequence[Any], width: int, mine: int) -> list[int] | None:
    """`asked` with one of its sizes reduced as `mine` is to `width`; None: it needs no fitting, or none helps.

    The last one that is the width; else the first after those that stay as they are (samples and positions).
    """
    if not all(type(size) is int and size > 0 for size in asked):
        return None
    if math.prod(asked) * mine != math.prod(shape) * width or width == mine:
        return None
    same = next((place for place, (a, b) in enumerate(zip(asked, shape, strict=False)) if a != b), len(asked))
    places = [place for place in reversed(range(len(asked))) if asked[place] == width]
    places += [place for place in range(same, len(asked)) if asked[place] * mine % width == 0]
    if not places:
        return None
    return [size * mine // width if place == places[0] else size for place, size in enumerate(asked)]
