"""Seconds of an operator on a device of which only the data sheet is known.

A matrix product takes what the peak promises, a share more, and what it fetches again from far caches; filling and draining the
multiprocessors comes on top, so that small products are slow, and so are those whose factors or result do not lie on 16 bytes.
Everything else goes by the bytes that it moves.
"""

from __future__ import annotations

import math

from echelon.plan.cluster import DataSheet
from echelon.plan.profile import DTYPE_BYTES
from echelon.simulator.calibration import FittedConstants

#: Rows and columns of the tiles that one multiprocessor computes at a time, the largest first: libraries have kernels of all these sizes
#: and take what is fastest (cuBLAS and CUTLASS name them so).
_TILE_SHAPES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
#: What a number of the result costs in operands with the largest tiles.
_LARGEST_TILE_COST = 1 / 256 + 1 / 128
#: Lines of factors and results that lie on so many bytes are moved as a whole (cuBLAS: "Tensor Core usage", 16-byte alignment).
_ALIGNMENT_BYTES = 16
#: Otherwise kernels of earlier matrix instructions are used. Of what these promise, what is left, by the bytes of a number and those that
#: lines lie on: measured on an H200 (8192 x 4096 x 4096 with one side a little more or less: 790 TFLOP/s on 16 bytes, 260 to 282 on 4,
#: 95 to 153 on 2; TF32 340 to 380 and 114 to 136).
_MISALIGNED_FRACTIONS = {(2, 4): 0.45, (2, 2): 0.22, (4, 4): 0.42}
#: Of rows, columns and depth those that lie side by side in memory, in the two factors or in the result, by which factor is transposed.
_CONTIGUOUS_DIMS = {"nn": (3, 2), "nt": (3, 2), "tn": (1, 2), "tt": (1, 3, 2)}
#: Bytes of a number that matrix units compute in.
PRECISION_BYTES = {"fp32": 4, "tf32": 4, "half": 2, "bf16": 2, "fp8": 1, "fp4": 0.5}
#: Power goes by the clock and the square of the voltage, and the voltage by the clock: the clock falls with the third root of the power.
_CLOCK_PER_POWER_EXPONENT = 1 / 3
#: Time of a fused attention over FlashAttention-2's: version 1 from Dao 2023 (A100, about 1.9 x), cuDNN's uses the newest instructions.
ATTENTION_KERNEL_FACTORS = {"flash1": 1.9, "flash2": 1.0, "cudnn": 1.0}


def operand_line_sizes(operand_layout: str, dims: tuple[float, float, float, float]) -> tuple[float, ...]:
    """How many numbers of a product's factors and result lie side by side; `operand_layout`: which factors are transposed (`nt`)."""
    return tuple(dims[dim] for dim in _CONTIGUOUS_DIMS.get(operand_layout, _CONTIGUOUS_DIMS["nn"]))


def product_seconds(
    sheet: DataSheet,
    constants: FittedConstants,
    precision: str,
    dims: tuple[float, float, float, float],
    flops: float,
    moved: float,
    line_sizes: tuple[float, ...],
) -> float:
    """`dims`: how many products, rows, columns, depth of each; `line_sizes`: how many numbers lie side by side."""
    batch_size, rows, columns, _ = dims
    width = PRECISION_BYTES[precision]
    clock: float = sheet.power**_CLOCK_PER_POWER_EXPONENT
    peak = _peak_for_alignment(sheet, precision, line_sizes, is_batched=batch_size > 1) * clock
    refetch_seconds = constants.traffic * width / 2 / sheet.bandwidth
    units, output_size = sheet.units, batch_size * rows * columns
    seconds_per_flop = math.inf
    for tile_rows, tile_columns in _TILE_SHAPES:
        waves = math.ceil(batch_size * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns) / units)
        # Small tiles fetch their operands more often.
        relative_traffic = (1 / tile_rows + 1 / tile_columns) / _LARGEST_TILE_COST
        seconds_per_flop = min(
            seconds_per_flop,
            waves
            * units
            * tile_rows
            * tile_columns
            / output_size
            * (constants.product / peak + relative_traffic * refetch_seconds),
        )
    return max(flops * seconds_per_flop, moved / (sheet.bandwidth * constants.stream))


def _peak_for_alignment(sheet: DataSheet, precision: str, line_sizes: tuple[float, ...], *, is_batched: bool) -> float:
    """FLOP/s that products of such lines are promised; `is_batched`: in one call."""
    peak = sheet.peak_flops(precision)
    width = PRECISION_BYTES[precision]
    # What a cut leaves is whole, the largest part counts.
    sizes = [math.ceil(line) for line in line_sizes]
    if precision == "fp32" or not any(size * width % _ALIGNMENT_BYTES for size in sizes):
        return peak
    if width < 2:  # such factors must lie on lines: what does not is computed in 2 bytes
        return _peak_for_alignment(sheet, "half", line_sizes, is_batched=is_batched)
    if (
        is_batched
    ):  # kernels for many products have no such forms: 33 to 77 TFLOP/s on an H200, whose vector units promise 67
        return min(sheet.vector, peak)
    alignment = min(math.gcd(round(size * width), 4) for size in sizes)
    # Units for vectors need no lines.
    return max(peak * sheet.legacy * _MISALIGNED_FRACTIONS[round(width), alignment], min(sheet.vector, peak))


def attention_seconds(
    sheet: DataSheet, constants: FittedConstants, precision: str, kernel: str, scores: float, flops: float
) -> float:
    """A fused attention kernel; `scores`: how many of them it computes, `flops`: of its products."""
    clock: float = sheet.power**_CLOCK_PER_POWER_EXPONENT
    peak = sheet.peak_flops(precision) * clock * (1.0 if kernel == "cudnn" else sheet.legacy)
    products = flops * constants.flash / peak
    return ATTENTION_KERNEL_FACTORS[kernel] * (products + scores * constants.score / (sheet.units * clock))


def elementwise_seconds(sheet: DataSheet, constants: FittedConstants, bytes_moved: float) -> float:
    """Element-wise work over so many bytes."""
    return bytes_moved / (sheet.bandwidth * constants.stream)


def compute_precision(dtype: str, requested_precision: str) -> str:
    """What the matrix units compute a type in; `requested_precision`: the plan's precision, or the model's own."""
    if DTYPE_BYTES.get(dtype, 4) <= 2:
        return "bf16" if dtype == "bfloat16" and requested_precision != "fp16" else "half"
    return "tf32" if requested_precision == "tf32" else "fp32"
