"""Rows as narrower numbers: float16, or integers of 16 or 8 bits with one scale per row, and back.

To the nearest, because what is sent or exported is rounded once. Rows that are *stored* narrow are rounded up or down by
chance instead (drawn from id and log number, so that replicas agree): updates smaller than half a step would else be lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.specs import SIZES, StoreError


def narrow(rows: np.ndarray, wire: str) -> list[np.ndarray]:
    """Rows (n, dim) of f4 or f8 as `wire`: [rows], and for i2 and i1 [rows, scales]."""
    if wire in ("f4", "f8"):
        return [rows.astype(wire, copy=False)]
    if wire == "f2":
        with np.errstate(over="ignore"):
            return [rows.astype(np.float16)]
    if wire not in SIZES:
        raise StoreError(f"wire: {wire!r} is no kind of number; use one of {', '.join(SIZES)}")
    out = np.empty(rows.shape, wire)
    scales = np.empty(len(rows), np.float32)
    rows = np.ascontiguousarray(rows)
    k.narrow_integers(rows, np.float32(np.iinfo(wire).max), np.full(rows.shape[1], 1 << 15, np.uint16), out, scales)
    return [out, scales]


def widen(arrays: Sequence[np.ndarray], dtype: str = "f4") -> np.ndarray:
    """What `narrow` gave, as f4 or f8; not a copy where it is that already."""
    rows = arrays[0]
    if rows.dtype.kind == "f":
        return rows.astype(dtype, copy=False)
    out = np.empty(rows.shape, dtype)
    if rows.dtype not in (np.int16, np.int8) or len(arrays) != 2 or arrays[1].shape != rows.shape[:1]:
        raise StoreError(
            f"rows of {rows.dtype} with {len(arrays) - 1} further arrays; i2 and i1 come with one scale per row"
        )
    k.widen_integers(rows, arrays[1], out)
    return out
