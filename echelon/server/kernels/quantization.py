"""Rows stored narrower than the arithmetic: fp16, and int16 and int8 with a scale.

Values round up or down by 16-bit draws. With every draw in the middle they round to the nearest; with random draws, updates smaller than
a step count on average.
"""

from __future__ import annotations

import math

import numpy as np

from echelon.server.kernels.constants import DIM, F2, F4, I2, NATIVE, SCALE_OFFSET, STORED, WEIGHT_OFFSET, WORDS
from echelon.server.kernels.intrinsics import (
    GOLDEN,
    bits_to_float,
    borrow,
    float_to_bits,
    max_abs_bits,
    mix64,
    round_stochastically,
)
from echelon.server.kernels.jit_cache import compiled, inlined


@inlined
def _float32_to_float16(x, draw):
    """A float32 as the bits of a float16, rounded by the draw; finite values beyond its range become its largest."""
    b = np.int64(float_to_bits(x))
    a = b & 0x7FFFFFFF
    if a < 0x38800000:
        h = np.int64(np.float64(bits_to_float(np.uint32(a))) * 16777216.0 + (draw + 0.5) * 1.52587890625e-05)
    elif a < 0x7F800000:
        h = min((a - 0x38000000 + (draw >> 3)) >> 13, np.int64(0x7BFF))
    else:
        h = np.int64(0x7C00 if a == 0x7F800000 else 0x7E00)
    return np.int16(h | ((b >> 16) & 0x8000))


@inlined
def _float16_to_float32(half_bits):
    """The float32 of a float16's bits."""
    h = np.uint32(np.uint16(half_bits))
    exponent_mantissa = h & np.uint32(0x7FFF)
    subnormal = np.float32(np.int32(exponent_mantissa)) * np.float32(5.9604644775390625e-08)
    bias = np.uint32(0x70000000) if exponent_mantissa >= np.uint32(0x7C00) else np.uint32(0x38000000)
    bits = (exponent_mantissa << np.uint32(13)) + bias
    bits = float_to_bits(subnormal) if exponent_mantissa < np.uint32(0x400) else bits
    return bits_to_float(bits | ((h & np.uint32(0x8000)) << np.uint32(16)))


@inlined
def _row_scale(values, max_integer):
    """The value of one step of an integer row; nan if a value is not finite.

    A little (2**-21) larger than needed, so that the largest value is within range however it is rounded. A row so small that the scale
    has no inverse becomes zeros.
    """
    n = values.shape[0]
    bits = np.int64(max_abs_bits(values, n >> 3))
    for j in range(n & ~7, n):
        bits = max(bits, np.int64(float_to_bits(np.float32(values[j]))) & 0x7FFFFFFF)
    peak = bits_to_float(np.uint32(bits))
    scale = peak / max_integer * np.float32(1.000000476837158)
    scale = scale if scale > np.float32(1e-37) or scale != scale else np.float32(0)
    return scale if scale < math.inf else np.float32(math.nan)


@inlined
def fill_draws(key, draws):
    """Sixteen random bits per column into `draws`, four columns from one hash."""
    n = draws.shape[0]
    for q in range((n + 3) >> 2):
        x = mix64(key + np.uint64(q + 1) * GOLDEN)
        for j in range(4 * q, min(4 * q + 4, n)):
            draws[j] = np.uint16(x)
            x >>= np.uint64(16)


@inlined
def _quantize_row(values, scale, draws, out):
    """Integer multiples of `scale`, by the draws; a draw of 32768 rounds to the nearest."""
    n = values.shape[0]
    if not scale > np.float32(0):
        for j in range(n):
            out[j] = 0
        return
    inverse_scale = np.float32(1) / scale
    round_stochastically(values, inverse_scale, draws, out, n >> 3)
    for j in range(n & ~7, n):
        u = (np.float32(draws[j]) + np.float32(0.5)) * np.float32(1.52587890625e-05)
        out[j] = np.int32(np.floor(np.float32(values[j]) * inverse_scale + u))


@inlined
def _dequantize_row(values, scale, out):
    for j in range(values.shape[0]):
        out[j] = np.float32(values[j]) * scale


@compiled
def store_weights(values, draws, layout, row, float32_view, int16_view, int8_view):
    """Weights into a row that stores them narrower than `values`."""
    stored, dim, words, offset = layout[STORED], layout[DIM], layout[WORDS], layout[WEIGHT_OFFSET]
    if stored == F4:
        w4 = float32_view[row * words * 2 + offset : row * words * 2 + offset + dim]
        for j in range(dim):
            w4[j] = np.float32(values[j])
    elif stored == F2:
        w2 = int16_view[row * words * 4 + offset : row * words * 4 + offset + dim]
        for j in range(dim):
            w2[j] = _float32_to_float16(np.float32(values[j]), np.int64(draws[j]))
    else:
        scale = _row_scale(values, np.float32(32767) if stored == I2 else np.float32(127))
        float32_view[row * words * 2 + layout[SCALE_OFFSET]] = scale
        if stored == I2:
            _quantize_row(values, scale, draws, int16_view[row * words * 4 + offset : row * words * 4 + offset + dim])
        else:
            _quantize_row(values, scale, draws, int8_view[row * words * 8 + offset : row * words * 8 + offset + dim])


@compiled
def load_weights(layout, row, float_view, float32_view, int16_view, int8_view, out):
    """A row's weights into `out`."""
    stored, dim, words, offset = layout[STORED], layout[DIM], layout[WORDS], layout[WEIGHT_OFFSET]
    if stored == NATIVE:
        start = row * words * (8 // float_view.itemsize) + offset
        w = float_view[start : start + dim]
        for j in range(dim):
            out[j] = w[j]
    elif stored == F4:
        w4 = float32_view[row * words * 2 + offset : row * words * 2 + offset + dim]
        for j in range(dim):
            out[j] = w4[j]
    elif stored == F2:
        w2 = int16_view[row * words * 4 + offset : row * words * 4 + offset + dim]
        for j in range(dim):
            out[j] = _float16_to_float32(w2[j])
    else:
        scale = float32_view[row * words * 2 + layout[SCALE_OFFSET]]
        if stored == I2:
            _dequantize_row(int16_view[row * words * 4 + offset : row * words * 4 + offset + dim], scale, out)
        else:
            _dequantize_row(int8_view[row * words * 8 + offset : row * words * 8 + offset + dim], scale, out)


@compiled
def quantize_rows(values, max_integer, draws, out, scales):
    values, out, draws = borrow(values), borrow(out), borrow(draws)
    for i in range(values.shape[0]):
        scales[i] = _row_scale(values[i], max_integer)
        _quantize_row(values[i], scales[i], draws, out[i])


@compiled
def dequantize_rows(values, scales, out):
    values, out = borrow(values), borrow(out)
    for i in range(values.shape[0]):
        _dequantize_row(values[i], scales[i], out[i])
