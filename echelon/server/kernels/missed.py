"""Updates that rows missed, made up for: see `replay`."""

from __future__ import annotations

import math

import numpy as np

from echelon.server.kernels.jit_cache import compiling
from echelon.server.kernels.machine import power

#: How missed updates are made up for.
LINEAR, AVERAGES, COUPLED, ADAGRAD = range(4)
#: Places among a rule's numbers.
HOW, MU, UNDAMPED, NESTEROV, DECAY, B1, B2, EPS, FIRST = range(9)
#: Places among a layout's.
WORDS, DIM, W_AT, S_AT, STATE = range(5)
#: Updates whose product is kept; those of twice, four times, ... as many above them.
BLOCK = 16
#: Updates after which it is looked whether the rest of Adam's is below rounding.
_LOOK = 16
_KEPT = 256

_compiled = compiling()
_inlined = compiling(forceinline=True)


@_inlined
def _after(late, early):
    """The product of two by two numbers: `early` comes first."""
    a, b, c, d = late
    e, f, g, h = early
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


@_inlined
def _one(numbers, t, rate):
    """What update t (from 0) makes of a row's weight and momentum where the gradient is zero."""
    decay = numbers[DECAY]
    if numbers[HOW] != LINEAR:
        return 1.0 - rate * decay, 0.0, 0.0, 1.0
    mu = numbers[MU]
    undamped = 1.0 if t == 0 else numbers[UNDAMPED]  # torch's first momentum is the gradient itself
    gained = undamped * decay
    if numbers[NESTEROV]:
        return 1.0 - rate * (decay + mu * gained), -rate * mu * mu, gained, mu
    return 1.0 - rate * gained, -rate * mu, gained, mu


@_inlined
def _node(nodes, i):
    return nodes[i, 0], nodes[i, 1], nodes[i, 2], nodes[i, 3]


@_compiled
def extend(numbers, rates, terms, nodes, first, last):
    """What is kept of the updates first .. last - 1, whose rates are there."""
    leaves = nodes.shape[0] // 2
    for t in range(first, last):
        if terms.shape[0]:
            root = math.sqrt(1.0 - power(numbers[B2], t + 1))
            terms[t, 0] = rates[t] * root / (1.0 - power(numbers[B1], t + 1))
            terms[t, 1] = numbers[EPS] * root
        if t % BLOCK == BLOCK - 1 and leaves:
            total = _one(numbers, t - BLOCK + 1, rates[t - BLOCK + 1])
            for s in range(t - BLOCK + 2, t + 1):
                total = _after(_one(numbers, s, rates[s]), total)
            i = leaves + t // BLOCK
            while True:
                nodes[i, 0], nodes[i, 1], nodes[i, 2], nodes[i, 3] = total
                if i & 1 == 0:
                    break
                total = _after(total, _node(nodes, i - 1))
                i >>= 1


@_compiled
def _span(numbers, rates, nodes, t, last):
    """The product of the updates t .. last - 1."""
    total = 1.0, 0.0, 0.0, 1.0
    while t < last and t % BLOCK != 0:
        total = _after(_one(numbers, t, rates[t]), total)
        t += 1
    if t < last:
        leaves = nodes.shape[0] // 2
        low, high = leaves + t // BLOCK, leaves + last // BLOCK
        late = 1.0, 0.0, 0.0, 1.0
        while low < high:
            if low & 1:
                total = _after(_node(nodes, low), total)
                low += 1
            if high & 1:
                high -= 1
                late = _after(late, _node(nodes, high))
            low >>= 1
            high >>= 1
        total = _after(late, total)
        t = last // BLOCK * BLOCK
    while t < last:
        total = _after(_one(numbers, t, rates[t]), total)
        t += 1
    return total


@_inlined
def _averages(numbers, terms, rates, most, least, t, now, m, s, u, c):
    """The sum of what Adam's averages `m` and the roots `s` of the others add to the weights in updates t .. now - 1, into `u`, to be
    multiplied by m; up to which update: the rest is below rounding.

    Each term is at most `shrink` times the one before it, but for its rate, which is at most `most`.
    """
    n = m.shape[0]
    decay, b1, root = numbers[DECAY], numbers[B1], math.sqrt(numbers[B2])
    shrink = b1 / (root * least) if least > 0 and root > 0 else 1.0
    tiny = 2.0**-27 if c.itemsize == 4 else 2.0**-56
    rest = shrink / (1.0 - shrink) * most if shrink < 1 else 0.0
    grown, shrunk = 1.0, 1.0
    looked = t + _LOOK
    while t < now:
        grown *= b1
        shrunk *= root
        c[0], c[1], c[2], c[3] = terms[t, 0] * grown, shrunk, terms[t, 1], 1.0 - rates[t] * decay
        rate, by, eps, keep = c[0], c[1], c[2], c[3]
        for j in range(n):
            u[j] = u[j] * keep + rate / (s[j] * by + eps)
        t += 1
        if t == looked and shrink < 1:
            looked += _LOOK
            c[0] = rest * grown
            left = c[0]
            ended = True
            for j in range(n):
                if m[j] != 0 and not left / (s[j] * by + eps) <= tiny * abs(u[j]):
                    ended = False
                    break
            if ended:
                break
    return t


@_compiled
def bring(numbers, rates, terms, nodes, most, least, now, layout, where, ri, rc, out, scratch, c, marked):
    """Rows as they are after `now` updates: into `out`, which has their weights as they lie, and of absent rows (0) the first ones; or,
    with `marked` >= 0, into the rows themselves, which get that mark."""
    words, dim, w_at, s_at, states = layout[WORDS], layout[DIM], layout[W_AT], layout[S_AT], layout[STATE]
    per = 8 // rc.itemsize
    how = numbers[HOW]
    w, m, v = scratch[:dim], scratch[dim : 2 * dim], scratch[2 * dim : 3 * dim]
    s, u = scratch[3 * dim : 4 * dim], scratch[4 * dim : 5 * dim]
    keys = np.full(_KEPT, -1, np.int64)
    spans = np.empty((_KEPT, 4))
    for i in range(where.shape[0]):
        row = where[i]
        mark = ri[row * words + words - 1] if row != 0 else 0
        if marked >= 0:
            ri[row * words + words - 1] = marked
        if mark >= now:
            continue
        at, state = row * words * per + w_at, row * words * per + s_at
        for j in range(dim):
            w[j] = rc[at + j] if marked >= 0 else out[i, j]
        for j in range(states):
            scratch[dim + j] = rc[state + j] if row != 0 else numbers[FIRST]
        a, b, p, q = 1.0, 0.0, 0.0, 1.0
        if how == LINEAR or (how == AVERAGES and numbers[DECAY] != 0):
            slot = mark & (_KEPT - 1)
            if keys[slot] != mark:
                keys[slot] = mark
                spans[slot, 0], spans[slot, 1], spans[slot, 2], spans[slot, 3] = _span(numbers, rates, nodes, mark, now)
            a, b, p, q = spans[slot, 0], spans[slot, 1], spans[slot, 2], spans[slot, 3]
        if how == LINEAR:
            c[0], c[1], c[2], c[3] = a, b, p, q
            wa, wb, ma, mb = c[0], c[1], c[2], c[3]
            if states:
                for j in range(dim):
                    old = w[j]
                    w[j] = wa * old + wb * m[j]
                    m[j] = ma * old + mb * m[j]
            else:
                for j in range(dim):
                    w[j] *= wa
        elif how == AVERAGES:
            busy = False
            for j in range(dim):
                busy |= m[j] != 0
            if busy:
                for j in range(dim):
                    s[j] = math.sqrt(v[j])
                    u[j] = 0
                ended = _averages(numbers, terms, rates, most, least, mark, now, m, s, u, c)
                c[1] = 1.0
                if ended < now and numbers[DECAY] != 0:
                    c[1] = _span(numbers, rates, nodes, ended, now)[0]
                c[0] = a
                keep, later = c[0], c[1]
                for j in range(dim):
                    w[j] = w[j] * keep - m[j] * (u[j] * later)
            elif numbers[DECAY] != 0:
                c[0] = a
                keep = c[0]
                for j in range(dim):
                    w[j] *= keep
            c[0], c[1] = power(numbers[B1], now - mark), power(numbers[B2], now - mark)
            less, lower = c[0], c[1]
            for j in range(dim):
                m[j] *= less
                v[j] *= lower
        elif how == COUPLED:
            c[0], c[1], c[2], c[3], c[4] = (
                numbers[DECAY],
                numbers[B1],
                1.0 - numbers[B1],
                numbers[B2],
                1.0 - numbers[B2],
            )
            decay, b1, b1c, b2, b2c = c[0], c[1], c[2], c[3], c[4]
            for t in range(mark, now):
                c[0], c[1] = terms[t, 0], terms[t, 1]
                rate, eps = c[0], c[1]
                for j in range(dim):
                    d = decay * w[j]
                    m[j] = b1 * m[j] + b1c * d
                    v[j] = b2 * v[j] + b2c * d * d
                    w[j] -= rate * m[j] / (math.sqrt(v[j]) + eps)
        else:
            c[0], c[1] = numbers[DECAY], numbers[EPS]
            decay, eps = c[0], c[1]
            for t in range(mark, now):
                c[2] = rates[t]
                rate = c[2]
                for j in range(dim):
                    d = decay * w[j]
                    m[j] += d * d
                    w[j] -= rate * d / (math.sqrt(m[j]) + eps)
        if marked >= 0:
            for j in range(dim):
                rc[at + j] = w[j]
            for j in range(states):
                rc[state + j] = scratch[dim + j]
        else:
            for j in range(dim):
                out[i, j] = w[j]
