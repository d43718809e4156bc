"""The optimizers' updates of one row or block."""

from __future__ import annotations

import math

import numpy as np

from echelon.server.kernels.jit_cache import compiling
from echelon.server.kernels.machine import power, squares_by_eight
from echelon.server.kernels.places import (
    ADAGRAD,
    ADAM,
    B1,
    B1C,
    B2,
    B2C,
    COUNT_AT,
    DECAY,
    EPS,
    KEEP,
    KIND,
    LR,
    MOMENTUM,
    MU,
    NESTEROV,
    ROWWISE,
    SGD,
    SPARSE,
    STEP,
    UNDAMPED,
    WIDTH,
)

_compiled = compiling()
_inlined = compiling(forceinline=True)


@_inlined
def _squares(x):
    """The sum of squares, in eight lanes."""
    n = x.shape[0]
    total = squares_by_eight(x, n >> 3)
    for j in range(n & ~7, n):
        total += x[j] * x[j]
    return total


@_inlined
def _count(switches, state):
    """Which update of this row or block this is, from 1; its own count goes on where it keeps one."""
    at = switches[COUNT_AT]
    times = switches[STEP]
    if at >= 0:
        state[at] += 1
        if times == 0:
            times = np.int64(state[at])
    return times


@_inlined
def _lamb(c, p, switches, w, g, state, u, pair):
    """LAMB's direction before the trust ratio, into `u`."""
    n = w.shape[0]
    times = _count(switches, state)
    m, v = state[:n], state[n : 2 * n]
    pair[0] = 1.0 / (1.0 - power(p[B1], times))
    pair[1] = 1.0 / math.sqrt(1.0 - power(p[B2], times))
    k1, k2 = pair[0], pair[1]
    b1, b1c, b2, b2c, eps, decay = c[B1], c[B1C], c[B2], c[B2C], c[EPS], c[DECAY]
    for j in range(n):
        m[j] = b1 * m[j] + b1c * g[j]
        v[j] = b2 * v[j] + b2c * g[j] * g[j]
        u[j] = (m[j] * k1) / (math.sqrt(v[j]) * k2 + eps) + decay * w[j]


@_inlined
def take_step(c, p, switches, w, g, state, scratch):
    """One update of `w` by the gradient `g`. `c`: the rule's scalars in the arithmetic's float, `p`: in float64."""
    n = w.shape[0]
    kind = switches[KIND]
    lr, decay = c[LR], c[DECAY]
    if kind == SGD:
        for j in range(n):
            w[j] -= lr * (g[j] + decay * w[j])
    elif kind == MOMENTUM:
        mu, undamped = c[MU], c[UNDAMPED]
        if switches[COUNT_AT] >= 0 and _count(switches, state) == 1:
            undamped = c[WIDTH] / c[WIDTH]
        m = state[:n]
        if switches[NESTEROV]:
            for j in range(n):
                d = g[j] + decay * w[j]
                m[j] = mu * m[j] + undamped * d
                w[j] -= lr * (d + mu * m[j])
        else:
            for j in range(n):
                m[j] = mu * m[j] + undamped * (g[j] + decay * w[j])
                w[j] -= lr * m[j]
    elif kind == ADAGRAD:
        eps = c[EPS]
        v = state[:n]
        if decay == 0:
            for j in range(n):
                d = g[j]
                v[j] += d * d
                w[j] -= lr * d / (math.sqrt(v[j]) + eps)
        else:
            for j in range(n):
                d = g[j] + decay * w[j]
                v[j] += d * d
                w[j] -= lr * d / (math.sqrt(v[j]) + eps)
    elif kind == ROWWISE:
        u = g
        if decay != 0:
            u = scratch[:n]
            for j in range(n):
                u[j] = g[j] + decay * w[j]
        state[0] += _squares(u) / c[WIDTH]
        rate = lr / (math.sqrt(state[0]) + c[EPS])
        for j in range(n):
            w[j] -= rate * u[j]
    elif kind == ADAM:
        times = _count(switches, state)
        m, v = state[:n], state[n : 2 * n]
        b1, b1c, b2, b2c = c[B1], c[B1C], c[B2], c[B2C]
        root = math.sqrt(1.0 - power(p[B2], times))
        scratch[0] = p[LR] * root / (1.0 - power(p[B1], times))
        scratch[1] = p[EPS] if switches[SPARSE] else p[EPS] * root
        rate, eps = scratch[0], scratch[1]
        keep = c[KEEP]
        for j in range(n):
            d = g[j] + decay * w[j]
            m[j] = b1 * m[j] + b1c * d
            v[j] = b2 * v[j] + b2c * d * d
            w[j] = keep * w[j] - rate * m[j] / (math.sqrt(v[j]) + eps)
    else:
        u = scratch[:n]
        _lamb(c, p, switches, w, g, state, u, scratch[n:])
        a, b = _squares(w), _squares(u)
        rate = lr * (math.sqrt(a) / math.sqrt(b)) if a > 0 and b > 0 else lr
        for j in range(n):
            w[j] -= rate * u[j]


@_compiled
def dense_step(c, p, switches, w, g, state, scratch):
    take_step(c, p, switches, w, g, state, scratch)


@_compiled
def dense_lamb(c, p, switches, w, g, state, u, pair):
    """LAMB's direction of one block, and what the block adds to the norms of weights and direction."""
    _lamb(c, p, switches, w, g, state, u, pair)
    return np.float64(_squares(w)), np.float64(_squares(u))
