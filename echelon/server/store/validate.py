"""What callers give to a store, checked and made what the kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echelon.server import kernels as k
from echelon.server.client.combine import table_for
from echelon.server.protocol.specs import StoreError
from echelon.server.store.dense_param import Blocks
from echelon.server.store.sparse_table import Rows

_INT64 = np.dtype(np.int64)


def ids_of(ids: np.ndarray) -> np.ndarray:
    """Ids or blocks as a flat array of int64."""
    array = np.asarray(ids)
    if array.dtype == _INT64 and array.ndim == 1 and array.flags.carray:
        return array  # as frames bring them
    if array.size and array.dtype.kind not in "iu":
        raise StoreError(f"ids: {array.dtype}; expected integers of 64 bits")
    array = np.ascontiguousarray(array, np.int64).reshape(-1)
    # The kernels are compiled for writable arrays only: one compilation instead of two.
    return array if array.flags.writeable else array.copy()


def distinct(parts: Sequence[np.ndarray]) -> np.ndarray:
    """All ids of several arrays, each once."""
    ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return ids if k.unique(ids, table_for(len(ids))) else np.unique(ids)


def rows_of(table: Rows, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One row of the table's own numbers for each id."""
    array = np.ascontiguousarray(values, table.spec.dtype)
    if array.shape != (len(ids), table.spec.dim):
        raise StoreError(
            f"{table.spec.name}: values of shape {array.shape} for {len(ids)} ids; expected ({len(ids)}, {table.spec.dim})"
        )
    return array if array.flags.writeable else array.copy()


def blocks_of(dense: Blocks, blocks: np.ndarray, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One array of the parameter's own numbers for each block."""
    spec = dense.spec
    if len(values) != len(blocks):
        raise StoreError(f"{spec.name}: {len(values)} arrays for {len(blocks)} blocks; expected one each")
    out = []
    for block, value in zip(blocks.tolist(), values, strict=True):
        array = np.ascontiguousarray(value, spec.dtype).reshape(-1)
        if len(array) != spec.length(block):
            raise StoreError(f"{spec.name}: {len(array)} values for block {block}, which has {spec.length(block)}")
        out.append(array if array.flags.writeable else array.copy())
    return out
