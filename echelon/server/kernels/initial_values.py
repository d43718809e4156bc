"""Initial values of a row by its id: zeros, a constant, uniform or normal, the same on every machine."""

from __future__ import annotations

import math

import numpy as np

from echelon.server.kernels.constants import CONSTANT, UNIFORM
from echelon.server.kernels.intrinsics import GOLDEN, mix64
from echelon.server.kernels.jit_cache import compiled, inlined


@compiled
def _portable_log(x):
    """The logarithm of 0 < x < 1, with IEEE operations only."""
    exponent = 0
    while x < 0.7071067811865476:
        x *= 2.0
        exponent -= 1
    ratio = (x - 1.0) / (x + 1.0)
    square = ratio * ratio
    total = 0.0
    for k in range(23, 0, -2):
        total = total * square + 1.0 / k
    return 2.0 * ratio * total + exponent * 0.6931471805599453


@compiled
def normal_quantile(p):
    """The normal quantile of 0 < p < 1: Wichura's AS 241, to 1e-15."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        num = (2.5090809287301226727e3 * r + 3.3430575583588128105e4) * r + 6.7265770927008700853e4
        num = ((num * r + 4.5921953931549871457e4) * r + 1.3731693765509461125e4) * r + 1.9715909503065514427e3
        num = (num * r + 1.3314166789178437745e2) * r + 3.3871328727963666080
        den = (5.2264952788528545610e3 * r + 2.8729085735721942674e4) * r + 3.9307895800092710610e4
        den = ((den * r + 2.1213794301586595867e4) * r + 5.3941960214247511077e3) * r + 6.8718700749205790830e2
        den = (den * r + 4.2313330701600911252e1) * r + 1.0
        return q * num / den
    r = math.sqrt(-_portable_log(p if q < 0 else 1.0 - p))
    if r <= 5.0:
        r -= 1.6
        num = (7.74545014278341407640e-4 * r + 2.27238449892691845833e-2) * r + 2.41780725177450611770e-1
        num = ((num * r + 1.27045825245236838258) * r + 3.64784832476320460504) * r + 5.76949722146069140550
        num = (num * r + 4.63033784615654529590) * r + 1.42343711074968357734
        den = (1.05075007164441684324e-9 * r + 5.47593808499534494600e-4) * r + 1.51986665636164571966e-2
        den = ((den * r + 1.48103976427480074590e-1) * r + 6.89767334985100004550e-1) * r + 1.67638483018380384940
        den = (den * r + 2.05319162663775882187) * r + 1.0
    else:
        r -= 5.0
        num = (2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r + 1.24266094738807843860e-3
        num = ((num * r + 2.65321895265761230930e-2) * r + 2.96560571828504891230e-1) * r + 1.78482653991729133580
        num = (num * r + 5.46378491116411436990) * r + 6.65790464350110377720
        den = (2.04426310337993978564e-15 * r + 1.42151175831644588870e-7) * r + 1.84631831751005468180e-5
        den = ((den * r + 7.86869131145613259100e-4) * r + 1.48753612908506148525e-2) * r + 1.36929880922735805310e-1
        den = (den * r + 5.99832206555887937690e-1) * r + 1.0
    return -num / den if q < 0 else num / den


@inlined
def _uniform_draw(key, column):
    """A key's draw for a column: the middle of one of 2**53 equal parts of 0..1."""
    x = mix64(key + np.uint64(column + 1) * GOLDEN)
    return (np.float64(np.int64(x >> np.uint64(11))) + 0.5) * 1.1102230246251565e-16


@compiled
def init_row(kind, value, scale, seed, row_id, out):
    if kind <= CONSTANT:
        for j in range(out.shape[0]):
            out[j] = value
        return
    key = mix64(seed + np.uint64(row_id))
    if kind == UNIFORM:
        for j in range(out.shape[0]):
            out[j] = value + scale * (2.0 * _uniform_draw(key, j) - 1.0)
    else:
        for j in range(out.shape[0]):
            out[j] = value + scale * normal_quantile(_uniform_draw(key, j))
