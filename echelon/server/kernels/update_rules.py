"""Optimizer updates of one row or block."""

from __future__ import annotations

import math

import numpy as np

from echelon.server.kernels.constants import (
    ADAGRAD,
    ADAM,
    B1,
    B2,
    COUNT_OFFSET,
    DECAY,
    DECAY_FACTOR,
    EPS,
    GRAD_WEIGHT,
    KIND,
    LR,
    MOMENTUM,
    MU,
    NESTEROV,
    ONE_MINUS_B1,
    ONE_MINUS_B2,
    ROWWISE_ADAGRAD,
    SGD,
    SPARSE,
    STEP,
    WIDTH,
)  # fmt: skip
from echelon.server.kernels.intrinsics import integer_power, sum_squares_by_eight
from echelon.server.kernels.jit_cache import compiled, inlined


@inlined
def _sum_squares(x):
    """The sum of squares, in eight lanes."""
    n = x.shape[0]
    total = sum_squares_by_eight(x, n >> 3)
    for j in range(n & ~7, n):
        total += x[j] * x[j]
    return total


@inlined
def _count_update(switches, state):
    """The number of this update of the row or block, from 1; increments its own count if it has one."""
    offset = switches[COUNT_OFFSET]
    step = switches[STEP]
    if offset >= 0:
        state[offset] += 1
        if step == 0:
            step = np.int64(state[offset])
    return step


@inlined
def _lamb_direction(cast_scalars, scalars, switches, w, g, state, direction, corrections):
    """LAMB's direction before the trust ratio, into `direction`."""
    n = w.shape[0]
    step = _count_update(switches, state)
    m, v = state[:n], state[n : 2 * n]
    corrections[0] = 1.0 / (1.0 - integer_power(scalars[B1], step))
    corrections[1] = 1.0 / math.sqrt(1.0 - integer_power(scalars[B2], step))
    m_correction, v_correction = corrections[0], corrections[1]
    b1, one_minus_b1, eps = cast_scalars[B1], cast_scalars[ONE_MINUS_B1], cast_scalars[EPS]
    b2, one_minus_b2, decay = cast_scalars[B2], cast_scalars[ONE_MINUS_B2], cast_scalars[DECAY]
    for j in range(n):
        m[j] = b1 * m[j] + one_minus_b1 * g[j]
        v[j] = b2 * v[j] + one_minus_b2 * g[j] * g[j]
        direction[j] = (m[j] * m_correction) / (math.sqrt(v[j]) * v_correction + eps) + decay * w[j]


@inlined
def apply_rule(cast_scalars, scalars, switches, w, g, state, scratch):
    """Update `w` by the gradient `g`. `cast_scalars`: the rule's scalars in the dtype of the arithmetic, `scalars`: in float64."""
    n = w.shape[0]
    kind = switches[KIND]
    lr, decay = cast_scalars[LR], cast_scalars[DECAY]
    if kind == SGD:
        for j in range(n):
            w[j] -= lr * (g[j] + decay * w[j])
    elif kind == MOMENTUM:
        mu, grad_weight = cast_scalars[MU], cast_scalars[GRAD_WEIGHT]
        if switches[COUNT_OFFSET] >= 0 and _count_update(switches, state) == 1:
            grad_weight = cast_scalars[WIDTH] / cast_scalars[WIDTH]
        m = state[:n]
        if switches[NESTEROV]:
            for j in range(n):
                d = g[j] + decay * w[j]
                m[j] = mu * m[j] + grad_weight * d
                w[j] -= lr * (d + mu * m[j])
        else:
            for j in range(n):
                m[j] = mu * m[j] + grad_weight * (g[j] + decay * w[j])
                w[j] -= lr * m[j]
    elif kind == ADAGRAD:
        eps = cast_scalars[EPS]
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
    elif kind == ROWWISE_ADAGRAD:
        u = g
        if decay != 0:
            u = scratch[:n]
            for j in range(n):
                u[j] = g[j] + decay * w[j]
        state[0] += _sum_squares(u) / cast_scalars[WIDTH]
        rate = lr / (math.sqrt(state[0]) + cast_scalars[EPS])
        for j in range(n):
            w[j] -= rate * u[j]
    elif kind == ADAM:
        step = _count_update(switches, state)
        m, v = state[:n], state[n : 2 * n]
        b1, one_minus_b1 = cast_scalars[B1], cast_scalars[ONE_MINUS_B1]
        b2, one_minus_b2 = cast_scalars[B2], cast_scalars[ONE_MINUS_B2]
        bias_correction = math.sqrt(1.0 - integer_power(scalars[B2], step))
        scratch[0] = scalars[LR] * bias_correction / (1.0 - integer_power(scalars[B1], step))
        scratch[1] = scalars[EPS] if switches[SPARSE] else scalars[EPS] * bias_correction
        rate, eps = scratch[0], scratch[1]
        decay_factor = cast_scalars[DECAY_FACTOR]
        for j in range(n):
            d = g[j] + decay * w[j]
            m[j] = b1 * m[j] + one_minus_b1 * d
            v[j] = b2 * v[j] + one_minus_b2 * d * d
            w[j] = decay_factor * w[j] - rate * m[j] / (math.sqrt(v[j]) + eps)
    else:
        u = scratch[:n]
        _lamb_direction(cast_scalars, scalars, switches, w, g, state, u, scratch[n:])
        weight_norm_squared, direction_norm_squared = _sum_squares(w), _sum_squares(u)
        rate = lr
        if weight_norm_squared > 0 and direction_norm_squared > 0:
            rate = lr * (math.sqrt(weight_norm_squared) / math.sqrt(direction_norm_squared))
        for j in range(n):
            w[j] -= rate * u[j]


@compiled
def update_block(cast_scalars, scalars, switches, w, g, state, scratch):
    apply_rule(cast_scalars, scalars, switches, w, g, state, scratch)


@compiled
def lamb_block_direction(cast_scalars, scalars, switches, w, g, state, direction, corrections):
    """LAMB's direction of one block. Returns its sums of squares of weights and direction."""
    _lamb_direction(cast_scalars, scalars, switches, w, g, state, direction, corrections)
    return np.float64(_sum_squares(w)), np.float64(_sum_squares(direction))
