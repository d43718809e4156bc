"""Ids that are out of range. On one device torch refuses them; where a rank has a part of the rows they would pass for another rank's."""

from __future__ import annotations

import torch
from torch import Tensor


def require_inside(ids: Tensor, size: int, what: str) -> None:
    """Refuse ids that are not below `size`, as torch does: on the CPU at once, on a GPU without waiting for it."""
    if ids.is_meta:
        return
    inside = (ids >= 0) & (ids < size)
    if not ids.is_cpu or torch.compiler.is_compiling():
        torch._assert_async(inside.all(), f"{what}: an index is out of range of 0 to {size - 1}")
    elif not inside.all():
        wrong = int(ids[~inside].flatten()[0])
        raise IndexError(f"{what}: index {wrong} is out of range of 0 to {size - 1}")
