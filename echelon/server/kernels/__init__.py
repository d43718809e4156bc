"""The compiled inner loops of a server's store: index, rows, rules, first values, narrow numbers.

All njit code is in this folder: what is kept of it is renewed by a change of any of its files (`compiled`). Nothing here depends on the
machine's libm, on fused multiply-adds or on the order in which a vector unit would add: replicas on unlike machines stay byte-equal.
Sums over a row are in eight lanes, in this order everywhere.

A row is `words` 64-bit words: id, lsn, then weights, scale and state where the layout says. The same memory is passed as several views:
`ri` int64, `rc` the arithmetic's float, `r4` float32, `r2` int16, `r1` int8. Row 0 is scratch.
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

from echelon.server.kernels.first import initial, quantile
from echelon.server.kernels.groups import add_up, group, take, unique
from echelon.server.kernels.index import BATCH, column, copy_in, copy_out, find, move, remove, walk, written
from echelon.server.kernels.machine import mix64
from echelon.server.kernels.narrow import narrow_integers, widen_integers
from echelon.server.kernels.places import F2, F4, FIRST, I1, I2, LR, NATIVE
from echelon.server.kernels.rows import apply, read, update
from echelon.server.kernels.rules import dense_lamb, dense_step

__all__ = [
    "BATCH",
    "F2",
    "F4",
    "FIRST",
    "I1",
    "I2",
    "LR",
    "NATIVE",
    "add_up",
    "apply",
    "column",
    "copy_in",
    "copy_out",
    "dense_lamb",
    "dense_step",
    "find",
    "group",
    "initial",
    "mix64",
    "move",
    "narrow_integers",
    "quantile",
    "read",
    "remove",
    "take",
    "unique",
    "update",
    "walk",
    "widen_integers",
    "written",
]
