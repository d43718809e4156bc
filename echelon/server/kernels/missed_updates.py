"""Apply the updates that rows missed: see `store.lazy_updates`."""

from __future__ import annotations

import math

import numpy as np

from echelon.server.kernels.intrinsics import integer_power
from echelon.server.kernels.jit_cache import compiled, inlined

#: How missed updates are applied.
LINEAR, ADAM, ADAM_COUPLED, ADAGRAD = range(4)
#: Indices into a rule's numbers.
METHOD, MU, GRAD_WEIGHT, NESTEROV, DECAY, B1, B2, EPS, STATE_INIT = range(9)
#: Indices into a layout.
WORDS, DIM, WEIGHT_OFFSET, STATE_OFFSET, STATE_SIZE = range(5)
#: Updates per leaf of the product tree; each node above has the product of its two children.
UPDATES_PER_LEAF = 16
#: Updates between checks whether the rest of Adam's sum is below rounding.
_CONVERGENCE_INTERVAL = 16
_CACHED_PRODUCTS = 256


@inlined
def _compose(late, early):
    """The product of two 2x2 matrices: `early` is applied first."""
    a, b, c, d = late
    e, f, g, h = early
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


@inlined
def _update_matrix(rule_numbers, t, rate):
    """The matrix of update t (from 0) on a row's weight and momentum where the gradient is zero."""
    decay = rule_numbers[DECAY]
    if rule_numbers[METHOD] != LINEAR:
        return 1.0 - rate * decay, 0.0, 0.0, 1.0
    mu = rule_numbers[MU]
    grad_weight = 1.0 if t == 0 else rule_numbers[GRAD_WEIGHT]  # torch's first momentum is the gradient itself
    momentum_gain = grad_weight * decay
    if rule_numbers[NESTEROV]:
        return 1.0 - rate * (decay + mu * momentum_gain), -rate * mu * mu, momentum_gain, mu
    return 1.0 - rate * momentum_gain, -rate * mu, momentum_gain, mu


@inlined
def _load_node(products, i):
    return products[i, 0], products[i, 1], products[i, 2], products[i, 3]


@inlined
def _store_node(products, i, product):
    products[i, 0], products[i, 1], products[i, 2], products[i, 3] = product


@compiled
def extend_products(rule_numbers, rates, adam_terms, product_tree, first, last):
    """Extend the product tree and Adam's terms by the updates first .. last - 1."""
    leaves = product_tree.shape[0] // 2
    for t in range(first, last):
        if adam_terms.shape[0]:
            root = math.sqrt(1.0 - integer_power(rule_numbers[B2], t + 1))
            adam_terms[t, 0] = rates[t] * root / (1.0 - integer_power(rule_numbers[B1], t + 1))
            adam_terms[t, 1] = rule_numbers[EPS] * root
        if t % UPDATES_PER_LEAF == UPDATES_PER_LEAF - 1 and leaves:
            product = _update_matrix(rule_numbers, t - UPDATES_PER_LEAF + 1, rates[t - UPDATES_PER_LEAF + 1])
            for s in range(t - UPDATES_PER_LEAF + 2, t + 1):
                product = _compose(_update_matrix(rule_numbers, s, rates[s]), product)
            i = leaves + t // UPDATES_PER_LEAF
            while True:
                _store_node(product_tree, i, product)
                if i & 1 == 0:
                    break
                product = _compose(product, _load_node(product_tree, i - 1))
                i >>= 1


@compiled
def _range_product(rule_numbers, rates, product_tree, t, last):
    """The product of the updates t .. last - 1."""
    product = 1.0, 0.0, 0.0, 1.0
    while t < last and t % UPDATES_PER_LEAF != 0:
        product = _compose(_update_matrix(rule_numbers, t, rates[t]), product)
        t += 1
    if t < last:
        leaves = product_tree.shape[0] // 2
        low, high = leaves + t // UPDATES_PER_LEAF, leaves + last // UPDATES_PER_LEAF
        late_product = 1.0, 0.0, 0.0, 1.0
        while low < high:
            if low & 1:
                product = _compose(_load_node(product_tree, low), product)
                low += 1
            if high & 1:
                high -= 1
                late_product = _compose(late_product, _load_node(product_tree, high))
            low >>= 1
            high >>= 1
        product = _compose(late_product, product)
        t = last // UPDATES_PER_LEAF * UPDATES_PER_LEAF
    while t < last:
        product = _compose(_update_matrix(rule_numbers, t, rates[t]), product)
        t += 1
    return product


@inlined
def _sum_adam_updates(
    rule_numbers, adam_terms, rates, max_rate, min_decay_factor, t, update_count, m, root_v, weight_delta, cast
):
    """Sum what the updates t .. update_count - 1 of Adam add to the weights, divided by `m`, into `weight_delta`; `root_v`: the roots of
    the second moments. Returns the update from which on the rest is below rounding.

    Each term is at most `shrink` times the one before it, but for its rate, which is at most `max_rate`.
    """
    n = m.shape[0]
    decay, b1, root = rule_numbers[DECAY], rule_numbers[B1], math.sqrt(rule_numbers[B2])
    shrink = b1 / (root * min_decay_factor) if min_decay_factor > 0 and root > 0 else 1.0
    tolerance = 2.0**-27 if cast.itemsize == 4 else 2.0**-56
    tail_bound = shrink / (1.0 - shrink) * max_rate if shrink < 1 else 0.0
    m_decay, root_v_decay = 1.0, 1.0
    next_check = t + _CONVERGENCE_INTERVAL
    while t < update_count:
        m_decay *= b1
        root_v_decay *= root
        cast[0], cast[1], cast[2] = adam_terms[t, 0] * m_decay, root_v_decay, adam_terms[t, 1]
        cast[3] = 1.0 - rates[t] * decay
        rate, root_factor, eps, keep = cast[0], cast[1], cast[2], cast[3]
        for j in range(n):
            weight_delta[j] = weight_delta[j] * keep + rate / (root_v[j] * root_factor + eps)
        t += 1
        if t == next_check and shrink < 1:
            next_check += _CONVERGENCE_INTERVAL
            cast[0] = tail_bound * m_decay
            tail = cast[0]
            for j in range(n):
                if m[j] != 0 and not tail / (root_v[j] * root_factor + eps) <= tolerance * abs(weight_delta[j]):
                    break
            else:
                break
    return t


@compiled
def apply_missed_updates(
    rule_numbers, rates, adam_terms, product_tree, max_rate, min_decay_factor, update_count, layout, row_numbers, int64_view,
    float_view, out, scratch, cast, stored_update_count,
):  # fmt: skip
    """Rows as they are after `update_count` updates: into `out`, which holds their stored weights and the initial ones of absent rows (0);
    or, with `stored_update_count` >= 0, into the rows themselves, which get that count."""
    words, dim, state_size = layout[WORDS], layout[DIM], layout[STATE_SIZE]
    floats_per_word = 8 // float_view.itemsize
    method = rule_numbers[METHOD]
    w, m, v = scratch[:dim], scratch[dim : 2 * dim], scratch[2 * dim : 3 * dim]
    root_v, weight_delta = scratch[3 * dim : 4 * dim], scratch[4 * dim : 5 * dim]
    cached_update_counts = np.full(_CACHED_PRODUCTS, -1, np.int64)
    cached_products = np.empty((_CACHED_PRODUCTS, 4))
    for i in range(row_numbers.shape[0]):
        row = row_numbers[i]
        row_update_count = int64_view[row * words + words - 1] if row != 0 else 0
        if stored_update_count >= 0:
            int64_view[row * words + words - 1] = stored_update_count
        if row_update_count >= update_count:
            continue
        weight_start = row * words * floats_per_word + layout[WEIGHT_OFFSET]
        state_start = row * words * floats_per_word + layout[STATE_OFFSET]
        for j in range(dim):
            w[j] = float_view[weight_start + j] if stored_update_count >= 0 else out[i, j]
        for j in range(state_size):
            scratch[dim + j] = float_view[state_start + j] if row != 0 else rule_numbers[STATE_INIT]
        a, b, p, q = 1.0, 0.0, 0.0, 1.0
        if method == LINEAR or (method == ADAM and rule_numbers[DECAY] != 0):
            slot = row_update_count & (_CACHED_PRODUCTS - 1)
            if cached_update_counts[slot] != row_update_count:
                cached_update_counts[slot] = row_update_count
                product = _range_product(rule_numbers, rates, product_tree, row_update_count, update_count)
                _store_node(cached_products, slot, product)
            a, b, p, q = _load_node(cached_products, slot)
        if method == LINEAR:
            cast[0], cast[1], cast[2], cast[3] = a, b, p, q
            w_from_w, w_from_m, m_from_w, m_from_m = cast[0], cast[1], cast[2], cast[3]
            if state_size:
                for j in range(dim):
                    old_weight = w[j]
                    w[j] = w_from_w * old_weight + w_from_m * m[j]
                    m[j] = m_from_w * old_weight + m_from_m * m[j]
            else:
                for j in range(dim):
                    w[j] *= w_from_w
        elif method == ADAM:
            has_momentum = False
            for j in range(dim):
                has_momentum |= m[j] != 0
            if has_momentum:
                for j in range(dim):
                    root_v[j] = math.sqrt(v[j])
                    weight_delta[j] = 0
                converged_at = _sum_adam_updates(
                    rule_numbers, adam_terms, rates, max_rate, min_decay_factor, row_update_count, update_count, m, root_v,
                    weight_delta, cast,
                )  # fmt: skip
                cast[1] = 1.0
                if converged_at < update_count and rule_numbers[DECAY] != 0:
                    cast[1] = _range_product(rule_numbers, rates, product_tree, converged_at, update_count)[0]
                cast[0] = a
                decay_factor, late_decay_factor = cast[0], cast[1]
                for j in range(dim):
                    w[j] = w[j] * decay_factor - m[j] * (weight_delta[j] * late_decay_factor)
            elif rule_numbers[DECAY] != 0:
                cast[0] = a
                decay_factor = cast[0]
                for j in range(dim):
                    w[j] *= decay_factor
            cast[0] = integer_power(rule_numbers[B1], update_count - row_update_count)
            cast[1] = integer_power(rule_numbers[B2], update_count - row_update_count)
            m_decay, v_decay = cast[0], cast[1]
            for j in range(dim):
                m[j] *= m_decay
                v[j] *= v_decay
        elif method == ADAM_COUPLED:
            cast[0], cast[1], cast[2] = rule_numbers[DECAY], rule_numbers[B1], 1.0 - rule_numbers[B1]
            cast[3], cast[4] = rule_numbers[B2], 1.0 - rule_numbers[B2]
            decay, b1, b1c, b2, b2c = cast[0], cast[1], cast[2], cast[3], cast[4]
            for t in range(row_update_count, update_count):
                cast[0], cast[1] = adam_terms[t, 0], adam_terms[t, 1]
                rate, eps = cast[0], cast[1]
                for j in range(dim):
                    d = decay * w[j]
                    m[j] = b1 * m[j] + b1c * d
                    v[j] = b2 * v[j] + b2c * d * d
                    w[j] -= rate * m[j] / (math.sqrt(v[j]) + eps)
        else:
            cast[0], cast[1] = rule_numbers[DECAY], rule_numbers[EPS]
            decay, eps = cast[0], cast[1]
            for t in range(row_update_count, update_count):
                cast[2] = rates[t]
                rate = cast[2]
                for j in range(dim):
                    d = decay * w[j]
                    m[j] += d * d
                    w[j] -= rate * d / (math.sqrt(m[j]) + eps)
        if stored_update_count >= 0:
            for j in range(dim):
                float_view[weight_start + j] = w[j]
            for j in range(state_size):
                float_view[state_start + j] = scratch[dim + j]
        else:
            for j in range(dim):
                out[i, j] = w[j]
