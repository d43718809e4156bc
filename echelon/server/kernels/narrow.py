"""Rows narrower than their arithmetic: fp16, and int16 and int8 with a scale.

Numbers go up or down by draws of 16 bits. With all draws in the middle that is to the nearest; random ones make updates that are smaller
than a step count in the mean.
"""

from __future__ import annotations

import math

import numpy as np

from echelon.server.kernels.jit_cache import compiling
from echelon.server.kernels.machine import GOLDEN, bare, bits_of, float_of, mix64, peak_of, steps_of
from echelon.server.kernels.places import DIM, F2, F4, I2, NATIVE, SCALE_AT, STORED, W_AT, WORDS

_compiled = compiling()
_inlined = compiling(forceinline=True)


@_inlined
def _half(x, draw):
    """A float32 as the bits of a float16, up or down by the draw; finite values beyond its range become its largest."""
    b = np.int64(bits_of(x))
    a = b & 0x7FFFFFFF
    if a < 0x38800000:
        h = np.int64(np.float64(float_of(np.uint32(a))) * 16777216.0 + (draw + 0.5) * 1.52587890625e-05)
    elif a < 0x7F800000:
        h = min((a - 0x38000000 + (draw >> 3)) >> 13, np.int64(0x7BFF))
    else:
        h = np.int64(0x7C00 if a == 0x7F800000 else 0x7E00)
    return np.int16(h | ((b >> 16) & 0x8000))


@_inlined
def _whole(h16):
    """The float32 of a float16's bits."""
    h = np.uint32(np.uint16(h16))
    em = h & np.uint32(0x7FFF)
    small = np.float32(np.int32(em)) * np.float32(5.9604644775390625e-08)
    bits = (em << np.uint32(13)) + (np.uint32(0x70000000) if em >= np.uint32(0x7C00) else np.uint32(0x38000000))
    bits = bits_of(small) if em < np.uint32(0x400) else bits
    return float_of(bits | ((h & np.uint32(0x8000)) << np.uint32(16)))


@_inlined
def _scale(values, most):
    """What one step of an integer row stands for; nan where a value is not finite.

    A little (2**-21) more than needed, so that the largest value is within the integers' range however it is rounded. A row
    so small that the scale has no inverse is zeros.
    """
    n = values.shape[0]
    bits = np.int64(peak_of(values, n >> 3))
    for j in range(n & ~7, n):
        bits = max(bits, np.int64(bits_of(np.float32(values[j]))) & 0x7FFFFFFF)
    peak = float_of(np.uint32(bits))
    scale = peak / most * np.float32(1.000000476837158)
    scale = scale if scale > np.float32(1e-37) or scale != scale else np.float32(0)
    return scale if scale < math.inf else np.float32(math.nan)


@_inlined
def noise(key, draws):
    """Sixteen random bits per column into `draws`, four columns from one hash."""
    n = draws.shape[0]
    for q in range((n + 3) >> 2):
        x = mix64(key + np.uint64(q + 1) * GOLDEN)
        for j in range(4 * q, min(4 * q + 4, n)):
            draws[j] = np.uint16(x)
            x >>= np.uint64(16)


@_inlined
def _integers(values, scale, draws, out):
    """Integer steps of `scale`, by the draws; a draw of 32768 gives the nearest."""
    n = values.shape[0]
    if not scale > np.float32(0):
        for j in range(n):
            out[j] = 0
        return
    rate = np.float32(1) / scale
    steps_of(values, rate, draws, out, n >> 3)
    for j in range(n & ~7, n):
        u = (np.float32(draws[j]) + np.float32(0.5)) * np.float32(1.52587890625e-05)
        out[j] = np.int32(np.floor(np.float32(values[j]) * rate + u))


@_inlined
def _halves(values, draws, out):
    """Float16's bits, by the draws: the 13 bits that are cut off carry where they and the draw's are together more than one."""
    for j in range(values.shape[0]):
        out[j] = _half(np.float32(values[j]), np.int64(draws[j]))


@_compiled
def encode(values, draws, layout, row, r4, r2, r1):
    """Weights into a row that holds them narrower than `values`."""
    stored, dim, words = layout[STORED], layout[DIM], layout[WORDS]
    at = layout[W_AT]
    if stored == F4:
        w4 = r4[row * words * 2 + at : row * words * 2 + at + dim]
        for j in range(dim):
            w4[j] = np.float32(values[j])
    elif stored == F2:
        _halves(values, draws, r2[row * words * 4 + at : row * words * 4 + at + dim])
    elif stored == I2:
        scale = _scale(values, np.float32(32767))
        r4[row * words * 2 + layout[SCALE_AT]] = scale
        _integers(values, scale, draws, r2[row * words * 4 + at : row * words * 4 + at + dim])
    else:
        scale = _scale(values, np.float32(127))
        r4[row * words * 2 + layout[SCALE_AT]] = scale
        _integers(values, scale, draws, r1[row * words * 8 + at : row * words * 8 + at + dim])


@_compiled
def decode(layout, row, rc, r4, r2, r1, out):
    """A row's weights into `out`."""
    stored, dim, words = layout[STORED], layout[DIM], layout[WORDS]
    at = layout[W_AT]
    if stored == NATIVE:
        start = row * words * (8 // rc.itemsize) + at
        w = rc[start : start + dim]
        for j in range(dim):
            out[j] = w[j]
    elif stored == F4:
        w4 = r4[row * words * 2 + at : row * words * 2 + at + dim]
        for j in range(dim):
            out[j] = w4[j]
    elif stored == F2:
        w2 = r2[row * words * 4 + at : row * words * 4 + at + dim]
        for j in range(dim):
            out[j] = _whole(w2[j])
    elif stored == I2:
        scale = r4[row * words * 2 + layout[SCALE_AT]]
        w2 = r2[row * words * 4 + at : row * words * 4 + at + dim]
        for j in range(dim):
            out[j] = np.float32(w2[j]) * scale
    else:
        scale = r4[row * words * 2 + layout[SCALE_AT]]
        w1 = r1[row * words * 8 + at : row * words * 8 + at + dim]
        for j in range(dim):
            out[j] = np.float32(w1[j]) * scale


@_compiled
def narrow_integers(values, most, draws, out, scales):
    values, out, draws = bare(values), bare(out), bare(draws)
    for i in range(values.shape[0]):
        scale = _scale(values[i], most)
        scales[i] = scale
        _integers(values[i], scale, draws, out[i])


@_compiled
def widen_integers(values, scales, out):
    values, out = bare(values), bare(out)
    for i in range(values.shape[0]):
        scale, v, o = scales[i], values[i], out[i]
        for j in range(v.shape[0]):
            o[j] = np.float32(v[j]) * scale
