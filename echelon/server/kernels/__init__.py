"""The compiled inner loops of a server's store: hash index, rows, update rules, initial values, quantization.

All njit code is in this folder: a change of any file invalidates the whole cache (`jit_cache`). Nothing here depends on the machine's
libm, on fused multiply-adds or on the order of a vector unit's sums, so that replicas on different machines stay byte-equal: sums
over a row always take eight lanes, in the same order.

A row is `words` 64-bit words: id, lsn, then weights, scale and state as the layout says. The same memory is passed as several views:
`int64_view`, `float_view` (the dtype of the arithmetic), `float32_view`, `int16_view` and `int8_view`. Row 0 is scratch.
"""

from __future__ import annotations

from echelon.errors import EchelonError

try:
    import numba as _numba  # noqa: F401 (checked before the kernels import it)
except ImportError as error:
    raise EchelonError("the parameter server needs numba; pip install 'echelon[server]'") from error

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
    "F2", "F4", "I1", "I2", "LOOKUP_BATCH", "LR", "NATIVE", "STATE_INIT",
    "all_unique", "copy_rows", "dequantize_rows", "find_rows", "gather_rows", "group_ids", "init_row", "insert_rows",
    "lamb_block_direction", "list_rows", "list_written_rows", "mix64", "normal_quantile", "quantize_rows", "read_column",
    "read_rows", "rehash_slots", "remove_rows", "segment_sum", "update_block", "update_rows", "write_rows",
]  # fmt: skip
