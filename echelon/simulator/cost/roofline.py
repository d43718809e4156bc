"""Seconds of an operator on a device of which only the data sheet is known.

A matrix product takes what the peak promises, a share more, and what it fetches again from far caches; filling and draining the
multiprocessors comes on top, so that small products are slow, and so are those whose factors or result do not lie on 16 bytes.
Everything else goes by the bytes that it moves.
"""

from __future__ import annotations

import math

from echelon.plan.cluster import Sheet
from echelon.plan.profile import WIDTH
from echelon.simulator.calibration import Fitted

#: Rows and columns of the tiles that one multiprocessor computes at a time, the largest first: libraries have kernels of all these sizes
#: and take what is fastest (cuBLAS and CUTLASS name them so).
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
#: What a number of the result costs in operands with the largest tiles.
_LEAST = 1 / 256 + 1 / 128
#: Lines of factors and results that lie on so many bytes are moved as a whole (cuBLAS: "Tensor Core usage", 16-byte alignment).
_LINE = 16
#: Otherwise kernels of earlier matrix instructions are used. Of what these promise, what is left, by the bytes of a number and those that
#: lines lie on: measured on an H200 (8192 x 4096 x 4096 with one side a little more or less: 790 TFLOP/s on 16 bytes, 260 to 282 on 4,
#: 95 to 153 on 2; TF32 340 to 380 and 114 to 136).
_ASKEW = {(2, 4): 0.45, (2, 2): 0.22, (4, 4): 0.42}
#: Of rows, columns and depth those that lie side by side in memory, in the two factors or in the result, by which factor is transposed.
_LINES = {"nn": (3, 2), "nt": (3, 2), "tn": (1, 2), "tt": (1, 3, 2)}
#: Bytes of a number that matrix units compute in.
NARROW = {"fp32": 4, "tf32": 4, "half": 2, "bf16": 2, "fp8": 1, "fp4": 0.5}
#: Power goes by the clock and the square of the voltage, and the voltage by the clock: the clock falls with the third root of the power.
_CLOCK = 1 / 3
#: Time of a fused attention over FlashAttention-2's: version 1 from Dao 2023 (A100, about 1.9 x), cuDNN's uses the newest instructions.
KERNELS = {"flash1": 1.9, "flash2": 1.0, "cudnn": 1.0}


def lines_of(lies: str, dims: tuple[float, float, float, float]) -> tuple[float, ...]:
    """How many numbers of a product's factors and result lie side by side; `lies`: which factors are transposed (`nt`)."""
    return tuple(dims[place] for place in _LINES.get(lies, _LINES["nn"]))


def product_seconds(
    sheet: Sheet,
    fitted: Fitted,
    precision: str,
    dims: tuple[float, float, float, float],
    flops: float,
    moved: float,
    lines: tuple[float, ...],
) -> float:
    """`dims`: how many products, rows, columns, depth of each; `lines`: how many numbers lie side by side."""
    lots, rows, columns, _ = dims
    width = NARROW[precision]
    clock: float = sheet.power**_CLOCK
    peak = _aligned(sheet, precision, lines, many=lots > 1) * clock
    fetched = fitted.traffic * width / 2 / sheet.bandwidth
    units, area = sheet.units, lots * rows * columns
    busy = math.inf
    for tall, wide in _TILES:
        waves = math.ceil(lots * math.ceil(rows / tall) * math.ceil(columns / wide) / units)
        # Small tiles fetch their operands more often.
        again = (1 / tall + 1 / wide) / _LEAST
        busy = min(busy, waves * units * tall * wide / area * (fitted.product / peak + again * fetched))
    return max(flops * busy, moved / (sheet.bandwidth * fitted.stream))


def _aligned(sheet: Sheet, precision: str, lines: tuple[float, ...], *, many: bool) -> float:
    """FLOP/s that products of such lines are promised; `many`: in one call."""
    peak = sheet.peak(precision)
    width = NARROW[precision]
    # What a cut leaves is whole, the largest part counts.
    sizes = [math.ceil(line) for line in lines]
    if precision == "fp32" or not any(size * width % _LINE for size in sizes):
        return peak
    if width < 2:  # such factors must lie on lines: what does not is computed in 2 bytes
        return _aligned(sheet, "half", lines, many=many)
    if many:  # kernels for many products have no such forms: 33 to 77 TFLOP/s on an H200, whose vector units promise 67
        return min(sheet.vector, peak)
    least = min(math.gcd(round(size * width), 4) for size in sizes)
    # Units for vectors need no lines.
    return max(peak * sheet.legacy * _ASKEW[round(width), least], min(sheet.vector, peak))


def attention_seconds(sheet: Sheet, fitted: Fitted, precision: str, kernel: str, scores: float, flops: float) -> float:
    """A fused attention kernel; `scores`: how many of them it computes, `flops`: of its products."""
    clock: float = sheet.power**_CLOCK
    peak = sheet.peak(precision) * clock * (1.0 if kernel == "cudnn" else sheet.legacy)
    products = flops * fitted.flash / peak
    return KERNELS[kernel] * (products + scores * fitted.score / (sheet.units * clock))


def stream_seconds(sheet: Sheet, fitted: Fitted, moved: float) -> float:
    """Element-wise work over so many bytes."""
    return moved / (sheet.bandwidth * fitted.stream)


def precision_of(dtype: str, wanted: str) -> str:
    """What the matrix units compute a type in; `wanted`: the plan's precision, or the model's own."""
    if WIDTH.get(dtype, 4) <= 2:
        return "bf16" if dtype == "bfloat16" and wanted != "fp16" else "half"
    return "tf32" if wanted == "tf32" else "fp32"
