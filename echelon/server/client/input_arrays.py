"""Check and convert the arrays that are passed to a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from echelon.errors import ServerError
from echelon.server.protocol.specs import Dense


def require_mapping(values: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ServerError(f"{type(values).__name__} where a mapping is expected; give {{table's name: {what}}}")
    return values


def require_pair(name: str, pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ServerError(f"{name}: {type(pair).__name__}, where two things are expected; give (ids, values)")
    return pair[0], pair[1]


def as_number_array(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # tensors with gradients, on a device, or of torch's own dtypes
        advice = "give numpy's, of a tensor t.detach().float().cpu().numpy()"
        raise ServerError(f"{name}: values that are no array ({error}); {advice}") from None
    if array.dtype.kind not in "fiub" and array.size:
        raise ServerError(f"{name}: values of dtype {array.dtype}; they are real numbers, use float32")
    return array


def as_flat_ids(name: str, ids: Any) -> np.ndarray:
    array = as_number_array(name, ids)
    if not array.size:
        return np.empty(0, np.int64)  # an empty list has no integer dtype
    if array.dtype.kind not in "iu":
        raise ServerError(f"{name}: ids of dtype {array.dtype}; they are integers, use int64")
    return np.ascontiguousarray(array.reshape(-1), np.int64)


def flatten_dense(spec: Dense, values: Any) -> np.ndarray:
    """A flat copy of a dense parameter's values."""
    array = as_number_array(spec.name, values)
    if array.size != spec.size:
        raise ServerError(f"{spec.name}: {array.size} values of shape {array.shape}; it has {spec.size} elements")
    return np.array(array.reshape(-1), spec.dtype)
