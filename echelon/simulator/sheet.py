"""Seconds of an operator on a device of which only the data sheet is known.

A matrix product takes what the peak promises, a share more, and what it fetches again from far caches; filling and draining the
multiprocessors comes on top, so that small products are slow. Numbers of 2 bytes or less whose rows do not lie on 16 bytes miss the
matrix units altogether. Everything else goes by the bytes that it moves.
"""

from __future__ import annotations

import math

from echelon.plan.cluster import Sheet
from echelon.plan.profile import WIDTH
from echelon.simulator.fitted import Fitted

#: Rows and columns of the tiles that one multiprocessor computes at a time, the largest first: libraries have kernels of all these sizes
#: and take what is fastest (cuBLAS and CUTLASS name them so).
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
#: What a number of the result costs in operands with the largest tiles.
_LEAST = 1 / 256 + 1 / 128
#: Rows of narrow numbers must lie on so many bytes for matrix units to read them (cuBLAS: "Tensor Core usage", 16-byte alignment).
_LINE = 16
#: Bytes of a number that matrix units compute in.
NARROW = {"fp32": 4, "tf32": 4, "half": 2, "fp8": 1, "fp4": 0.5}
#: Power goes by the clock and the square of the voltage, and the voltage by the clock: the clock falls with the third root of the power.
_CLOCK = 1 / 3
#: Time of a fused attention over FlashAttention-2's: version 1 from Dao 2023 (A100, about 1.9 x), cuDNN's uses the newest instructions.
KERNELS = {"flash1": 1.9, "flash2": 1.0, "cudnn": 1.0}


def product_seconds(
    sheet: Sheet, fitted: Fitted, precision: str, dims: tuple[float, float, float, float], flops: float, moved: float
) -> float:
    """`dims`: how many products, rows, columns, depth of each."""
    lots, rows, columns, depth = dims
    width = NARROW[precision]
    clock: float = sheet.power**_CLOCK
    peak = sheet.peak(precision) * clock
    if width <= 2 and (columns * width % _LINE or depth * width % _LINE):
        peak = sheet.vector * clock
    fetched = fitted.traffic * width / 2 / sheet.bandwidth
    units, area = sheet.units, lots * rows * columns
    busy = math.inf
    for tall, wide in _TILES:
        waves = math.ceil(lots * math.ceil(rows / tall) * math.ceil(columns / wide) / units)
        # Small tiles fetch their operands more often.
        again = (1 / tall + 1 / wide) / _LEAST
        busy = min(busy, waves * units * tall * wide / area * (fitted.product / peak + again * fetched))
    return max(flops * busy, moved / (sheet.bandwidth * fitted.stream))


def attention_seconds(sheet: Sheet, fitted: Fitted, precision: str, kernel: str, scores: float, flops: float) -> float:
    """A fused attention kernel; `scores`: how many of them it computes, `flops`: of its products."""
    clock: float = sheet.power**_CLOCK
    peak = sheet.peak(precision) * clock * (1.0 if kernel == "cudnn" else sheet.legacy)
    products = flops * fitted.flash / peak
    return KERNELS[kernel] * (products + scores * fitted.score / (sheet.units * clock))


def stream_seconds(sheet: Sheet, fitted: Fitted, moved: float) -> float:
    """Element-wise work over so many bytes."""
    return moved / (sheet.bandwidth * fitted.stream)


def precision_of(dtype: str, *, tf32: bool) -> str:
    """What the matrix units compute a type in."""
    if WIDTH.get(dtype, 4) <= 2:
        return "half"
    return "tf32" if tf32 else "fp32"
