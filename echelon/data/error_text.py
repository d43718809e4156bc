"""Describes samples and data sets in error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from echelon.errors import DataError


def type_name(data: Any) -> str:
    name = type(data).__name__
    return {"Tensor": "tensor", "ndarray": "array"}.get(name, name)


def describe_shape(sample: Any) -> str:
    """Describe a sample's structure with shapes, as `(float32[3, 32, 32], int)`."""
    if isinstance(sample, Tensor | np.ndarray):
        return f"{str(sample.dtype).removeprefix('torch.')}{list(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {describe_shape(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, list | tuple):
        shown = [describe_shape(part) for part in (sample if len(sample) <= 8 else sample[:3])]
        contents = ", ".join(shown if len(sample) <= 8 else [*shown, f"... {len(sample)} in all"])
        return f"({contents})" if isinstance(sample, tuple) else f"[{contents}]"
    return type(sample).__name__


def collation_error(samples: list[Any], indices: list[int], error: Exception, custom_collate: bool) -> DataError:
    """Explain why samples do not collate: name the first two that differ, or describe all of them. `custom_collate`: the job's."""
    shapes = [describe_shape(sample) for sample in samples]
    method = "by the job's collate=" if custom_collate else "as torch does (default_collate)"
    remedy = "repair collate=" if custom_collate else "make them alike (pad, crop, convert), or give the job collate="
    mismatch = next((position for position, shape in enumerate(shapes) if shape != shapes[0]), None)
    if mismatch is None:
        listed = ", ".join(map(str, indices[:8])) + (f", ... ({len(indices)})" if len(indices) > 8 else "")
        problem = f"samples {listed}, each {shapes[0]}, cannot be put into one batch {method}"
    else:
        first, other = indices[0], indices[mismatch]
        differences = f"sample {first} is {shapes[0]}, sample {other} is {shapes[mismatch]}"
        problem = f"samples {first} and {other} cannot be put into one batch {method}: {differences}"
    first_line = str(error).partition("\n")[0]
    return DataError(f"{problem}; {remedy} ({type(error).__name__}: {first_line})")
