"""What callers give to a store, checked and made what the kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.grouped_ids import make_hash_table
from echelon.server.protocol.specs import StoreError
from echelon.server.store.dense_param import DenseParameter
from echelon.server.store.sparse_table import SparseTable

_INT64 = np.dtype(np.int64)


def as_id_array(ids: np.ndarray) -> np.ndarray:
    """Ids or blocks as a flat array of int64."""
    array = np.asarray(ids)
    if array.dtype == _INT64 and array.ndim == 1 and array.flags.carray:
        return array  # as frames bring them
    if array.size and array.dtype.kind not in "iu":
        raise StoreError(f"ids: {array.dtype}; expected integers of 64 bits")
    array = np.ascontiguousarray(array, np.int64).reshape(-1)
    # The kernels are compiled for writable arrays only: one compilation instead of two.
    return array if array.flags.writeable else array.copy()


def unique_ids(id_arrays: Sequence[np.ndarray]) -> np.ndarray:
    """All ids of several arrays, each once."""
    ids = id_arrays[0] if len(id_arrays) == 1 else np.concatenate(id_arrays)
    return ids if k.all_unique(ids, make_hash_table(len(ids))) else np.unique(ids)


def as_row_values(table: SparseTable, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One row of the table's own numbers for each id."""
    array = np.ascontiguousarray(values, table.spec.dtype)
    if array.shape != (len(ids), table.spec.dim):
        raise StoreError(
            f"{table.spec.name}: values of shape {array.shape} for {len(ids)} ids; expected ({len(ids)}, {table.spec.dim})"
        )
    return array if array.flags.writeable else array.copy()


def as_block_values(dense: DenseParameter, blocks: np.ndarray, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One array of the parameter's own numbers for each block."""
    spec = dense.spec
    if len(values) != len(blocks):
        raise StoreError(f"{spec.name}: {len(values)} arrays for {len(blocks)} blocks; expected one each")
    arrays = []
    for block, value in zip(blocks.tolist(), values, strict=True):
        array = np.ascontiguousarray(value, spec.dtype).reshape(-1)
        if len(array) != spec.block_length(block):
            raise StoreError(
                f"{spec.name}: {len(array)} values for block {block}, which has {spec.block_length(block)}"
            )
        arrays.append(array if array.flags.writeable else array.copy())
    return arrays
