"""Gathers rows of a column in memory by index."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: `(ids, pin)` -> the rows as one tensor, in page-locked memory if `pin`.
ColumnGather = Callable[[np.ndarray, bool], Tensor]

_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def make_column_gather(column: Any) -> ColumnGather | None:
    """Make a gather for a tensor or array; None where gathering rows would not equal stacking them."""
    if type(column) is Tensor and column.layout is torch.strided and column.ndim and not column.requires_grad:
        if column.device.type != "cpu":
            return lambda ids, pin: column.index_select(0, torch.as_tensor(ids, device=column.device))
        rows = _numpy_view(column)
        return None if rows is None else partial(gather_in_memory, rows, column.dtype)
    if type(column) in (np.ndarray, np.memmap) and column.ndim:
        try:
            dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
        except (TypeError, ValueError):  # text, objects, the other byte order
            return None
        return partial(gather_in_memory, np.asarray(column), dtype)
    return None


def _numpy_view(column: Tensor) -> np.ndarray | None:
    """The same memory as an array; dtypes that NumPy lacks (bfloat16) as integers of their size."""
    try:
        return column.numpy()
    except TypeError:
        integer_dtype = _INTEGER_DTYPES.get(column.itemsize)
        return None if integer_dtype is None else column.view(integer_dtype).numpy()
    except RuntimeError:  # lazily conjugated or negated
        return None


def gather_in_memory(rows: np.ndarray, dtype: torch.dtype, ids: np.ndarray, pin: bool) -> Tensor:
    """Gather rows with NumPy, as a tensor of `dtype` (of the same size as the rows' own).

    torch's index_select wakes its threads for this, which cost more than they copy.
    """
    is_contiguous = rows.flags.c_contiguous  # `take` would first copy the whole of a strided column
    if not pin:
        gathered = torch.from_numpy(rows.take(ids, axis=0) if is_contiguous else rows[ids])
        return gathered if gathered.dtype is dtype else gathered.view(dtype)
    # Straight into page-locked memory: the copy to the device needs no second copy here.
    gathered = torch.empty((len(ids), *rows.shape[1:]), dtype=dtype, pin_memory=True)
    view = _numpy_view(gathered)
    assert view is not None
    out = view.view(rows.dtype)
    if is_contiguous:
        np.take(rows, ids, axis=0, out=out, mode="clip")  # the mode "raise" would go through a buffer
    else:
        out[...] = rows[ids]
    return gathered
