"""Quantize rows to float16, or to integers of 16 or 8 bits with one scale per row, and back.

They round to the nearest, because rows that are sent or exported are rounded once. Rows that are *stored* narrow round stochastically
(by id and log number, so that replicas agree): otherwise updates smaller than half a step would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.specs import DTYPE_BYTES, StoreError


def quantize(rows: np.ndarray, wire_dtype: str) -> list[np.ndarray]:
    """Rows (n, dim) of f4 or f8 as `wire_dtype`: [rows], and for i2 and i1 [rows, scales]."""
    if wire_dtype in ("f4", "f8"):
        return [rows.astype(wire_dtype, copy=False)]
    if wire_dtype == "f2":
        with np.errstate(over="ignore"):
            return [rows.astype(np.float16)]
    if wire_dtype not in DTYPE_BYTES:
        raise StoreError(f"wire: {wire_dtype!r} is no dtype; use one of {', '.join(DTYPE_BYTES)}")
    quantized = np.empty(rows.shape, wire_dtype)
    scales = np.empty(len(rows), np.float32)
    rows = np.ascontiguousarray(rows)
    max_integer, nearest_draws = np.float32(np.iinfo(wire_dtype).max), np.full(rows.shape[1], 1 << 15, np.uint16)
    k.quantize_rows(rows, max_integer, nearest_draws, quantized, scales)
    return [quantized, scales]


def dequantize(arrays: Sequence[np.ndarray], dtype: str = "f4") -> np.ndarray:
    """The inverse of `quantize`, as f4 or f8; no copy if the dtype is the same."""
    rows = arrays[0]
    if rows.dtype.kind == "f":
        return rows.astype(dtype, copy=False)
    weights = np.empty(rows.shape, dtype)
    if rows.dtype not in (np.int16, np.int8) or len(arrays) != 2 or arrays[1].shape != rows.shape[:1]:
        raise StoreError(f"{rows.dtype} rows with {len(arrays) - 1} further arrays; i2 and i1 need one scale per row")
    k.dequantize_rows(rows, arrays[1], weights)
    return weights
