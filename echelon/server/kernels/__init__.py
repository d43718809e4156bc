"""The compiled inner loops of a server's store: index, rows, rules, first values, narrow numbers.

All njit code is in this folder: what is kept of it is renewed by a change of any of its files (`jit_cache`). Nothing here depends on the
machine's libm, on fused multiply-adds or on the order in which a vector unit would add: replicas on unlike machines stay byte-equal.
Sums over a row are in eight lanes, in this order everywhere.

A row is `words` 64-bit words: id, lsn, then weights, scale and state where the layout says. The same memory is passed as several views:
`int64_view` int64, `float_view` the arithmetic's float, `float32_view` float32, `int16_view` int16, `int8_view` int8. Row 0 is scratch.
"""

from __future__ import annotations

from echelon.errors import EchelonError

try:
    import numba as _numba  # noqa: F401 (whether it is there)
except ImportError as error:
    raise EchelonError(
        "echelon.server: the parameter server's loops are compiled by numba, which is not installed; "
        "pip install 'echelon[server]'"
    ) from error

from echelon.server.kernels.constants import F2, F4, I1, I2, LR, NATIVE, STATE_INIT
from echelon.server.kernels.hash_index import (
    LOOKUP_BATCH,
    copy_rows,
    find_rows,
    insert_rows,
    list_rows,
    list_written_rows,
    read_column,
    rehash_slots,
    remove_rows,
)
from echelon.server.kernels.initial_values import init_row, normal_quantile
from echelon.server.kernels.intrinsics import mix64
from echelon.server.kernels.quantization import dequantize_rows, quantize_rows
from echelon.server.kernels.rows import read_rows, update_rows, write_rows
from echelon.server.kernels.unique_ids import all_unique, gather_rows, group_ids, segment_sum
from echelon.server.kernels.update_rules import lamb_block_direction, update_block

__all__ = [
    "LOOKUP_BATCH",
    "F2",
    "F4",
    "STATE_INIT",
    "I1",
    "I2",
    "LR",
    "NATIVE",
    "segment_sum",
    "write_rows",
    "read_column",
    "insert_rows",
    "copy_rows",
    "lamb_block_direction",
    "update_block",
    "find_rows",
    "group_ids",
    "init_row",
    "mix64",
    "rehash_slots",
    "quantize_rows",
    "normal_quantile",
    "read_rows",
    "remove_rows",
    "gather_rows",
    "all_unique",
    "update_rows",
    "list_rows",
    "dequantize_rows",
    "list_written_rows",
]
