"""Duplicate ids on a worker: against numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.server.protocol.grouped_ids import group_by_route
from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.specs import StoreError


@given(
    st.lists(st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1), max_size=60),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_each_id_once_by_route_and_gradients_added(numbers, shards, routes, seed):
    random = np.random.default_rng(seed)
    ids = np.array(numbers, np.int64)
    route_of = random.choice([*range(routes), 65535], shards).astype(np.uint16)
    grads = random.integers(-1000, 1000, (len(ids), 3)).astype(np.float32)
    grouped = group_by_route(ids, route_of, routes)
    first_seen = list(dict.fromkeys(numbers))
    route = {i: min(int(route_of[shard_of(np.array([i]), shards)[0]]), routes) for i in first_seen}
    assert grouped.ids.tolist() == sorted(first_seen, key=route.__getitem__)
    edges = grouped.route_offsets
    assert [[route[i] for i in grouped.ids[a:b].tolist()] for a, b in itertools.pairwise(edges)] == [
        [r] * sum(route[i] == r for i in first_seen) for r in range(routes + 1)
    ]
    assert (edges[0], edges[-1]) == (0, len(first_seen))
    assert [(grouped.route_slice(r).start, grouped.route_slice(r).stop) for r in (*range(routes), 65535)] == list(
        itertools.pairwise(edges)
    )
    np.testing.assert_array_equal(grouped.ids[grouped.inverse], ids)
    sums = grouped.sum_gradients(grads)
    for at, i in enumerate(grouped.ids):
        np.testing.assert_array_equal(sums[at], grads[ids == i].sum(0))
    np.testing.assert_array_equal(grouped.expand(sums), sums[grouped.inverse])


def test_many_ids():
    random = np.random.default_rng(0)
    ids = random.zipf(1.2, 50_000) % 10_000
    grads = random.standard_normal((50_000, 2))
    grouped = group_by_route(ids, np.arange(256, dtype=np.uint16) % 5, 5)
    distinct, inverse = np.unique(ids, return_inverse=True)
    assert np.array_equal(np.sort(grouped.ids), distinct)
    expected = np.zeros((len(distinct), 2))
    np.add.at(expected, inverse, grads)
    np.testing.assert_allclose(grouped.expand(grouped.sum_gradients(grads)), expected[inverse], atol=1e-9)


def test_gradients_of_another_number_of_ids_are_refused():
    with pytest.raises(StoreError, match=r"shape \(2, 4\) for 3 ids"):
        group_by_route(np.arange(3), np.zeros(4, np.uint16), 1).sum_gradients(np.zeros((2, 4), np.float32))


def test_rows_of_another_number_of_ids_are_refused():
    with pytest.raises(StoreError, match="rows: 2 for 3 distinct ids"):
        group_by_route(np.arange(3), np.zeros(4, np.uint16), 1).expand(np.zeros((2, 4), np.float32))
