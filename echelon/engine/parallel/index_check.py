"""Ids that are out of range. On one device torch refuses them; where a rank has a part of the rows they would pass for another rank's."""

from __future__ import annotations

import torch
from torch import Tensor


def require_in_range(ids: Tensor, size: int, description: str) -> None:
    """Refuse ids that are not below `size`, as torch does: on the CPU at once, on a GPU without waiting for it."""
    if ids.is_meta:
        return
    in_range = (ids >= 0) & (ids < size)
    if not ids.is_cpu or torch.compiler.is_compiling():
        torch._assert_async(in_range.all(), f"{description}: an index is out of range of 0 to {size - 1}")
    elif not in_range.all():
        bad_id = int(ids[~in_range].flatten()[0])
        raise IndexError(f"{description}: index {bad_id} is out of range of 0 to {size - 1}")
