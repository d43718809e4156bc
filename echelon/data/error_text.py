"""Samples and data sets in words, for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from echelon.errors import DataError


def kind_of(data: Any) -> str:
    """What a person would call it: its type's name."""
    return {"Tensor": "tensor", "ndarray": "array"}.get(type(data).__name__, type(data).__name__)


def shape_of(sample: Any) -> str:
    """A sample's structure with shapes, as `(float32[3, 32, 32], int)`."""
    if isinstance(sample, Tensor | np.ndarray):
        return f"{str(sample.dtype).removeprefix('torch.')}{list(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {shape_of(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, list | tuple):
        few = sample if len(sample) <= 8 else sample[:3]
        inside = ", ".join(shape_of(part) for part in few) + ("" if few is sample else f", ... {len(sample)} in all")
        return f"({inside})" if isinstance(sample, tuple) else f"[{inside}]"
    return type(sample).__name__


def collation_error(samples: list[Any], numbers: list[int], error: Exception, own: bool) -> DataError:
    """Why these samples do not make a batch: the first two that differ, or what they are if they do not. `own`: by collate=."""
    shapes = [shape_of(sample) for sample in samples]
    by = "by the job's collate=" if own else "as torch does (default_collate)"
    remedy = "repair collate=" if own else "make them alike (pad, crop, convert), or give the job collate="
    other = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is None:
        what = f"samples {_few(numbers)}, each {shapes[0]}, cannot be put into one batch {by}"
    else:
        what = (
            f"samples {numbers[0]} and {numbers[other]} cannot be put into one batch {by}: "
            f"sample {numbers[0]} is {shapes[0]}, sample {numbers[other]} is {shapes[other]}"
        )
    return DataError(f"{what}; {remedy} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")


def _few(numbers: list[int]) -> str:
    return (
        ", ".join(map(str, numbers))
        if len(numbers) <= 8
        else f"{', '.join(map(str, numbers[:8]))}, ... ({len(numbers)})"
    )
