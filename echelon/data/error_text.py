"""Samples and data sets in words, for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from echelon.errors import DataError


def type_name(data: Any) -> str:
    """What a person would call it: its type's name."""
    return {"Tensor": "tensor", "ndarray": "array"}.get(type(data).__name__, type(data).__name__)


def describe_shape(sample: Any) -> str:
    """A sample's structure with shapes, as `(float32[3, 32, 32], int)`."""
    if isinstance(sample, Tensor | np.ndarray):
        return f"{str(sample.dtype).removeprefix('torch.')}{list(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {describe_shape(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, list | tuple):
        shown_parts = sample if len(sample) <= 8 else sample[:3]
        contents = ", ".join(describe_shape(part) for part in shown_parts) + (
            "" if shown_parts is sample else f", ... {len(sample)} in all"
        )
        return f"({contents})" if isinstance(sample, tuple) else f"[{contents}]"
    return type(sample).__name__


def collation_error(samples: list[Any], indices: list[int], error: Exception, custom_collate: bool) -> DataError:
    """Why these samples do not make a batch: the first two that differ, or what they are if they do not. `custom_collate`: by collate=."""
    shapes = [describe_shape(sample) for sample in samples]
    method = "by the job's collate=" if custom_collate else "as torch does (default_collate)"
    remedy = "repair collate=" if custom_collate else "make them alike (pad, crop, convert), or give the job collate="
    mismatch = next((position for position, shape in enumerate(shapes) if shape != shapes[0]), None)
    if mismatch is None:
        problem = f"samples {_format_indices(indices)}, each {shapes[0]}, cannot be put into one batch {method}"
    else:
        problem = (
            f"samples {indices[0]} and {indices[mismatch]} cannot be put into one batch {method}: "
            f"sample {indices[0]} is {shapes[0]}, sample {indices[mismatch]} is {shapes[mismatch]}"
        )
    return DataError(
        f"{problem}; {remedy} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    )


def _format_indices(indices: list[int]) -> str:
    return (
        ", ".join(map(str, indices))
        if len(indices) <= 8
        else f"{', '.join(map(str, indices[:8]))}, ... ({len(indices)})"
    )
