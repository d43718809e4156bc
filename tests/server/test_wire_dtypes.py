"""Narrow rows: how far off, and that what is stored is right in the mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from echelon.server.protocol.specs import Init, Rule, StoreError, Table
from echelon.server.protocol.wire_dtypes import dequantize, quantize
from echelon.server.store.store import ParameterStore

values = arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 19)), elements=st.floats(-1e4, 1e4, width=32))


@given(values, st.sampled_from(["i2", "i1"]), st.sampled_from(["f4", "f8"]))
@example(np.array([[1e-31, 0, 0, 0, 0, 0, 0, 0, 2e-33, 1e-40]], np.float32), "i2", "f4")
def test_integers_are_within_half_a_step(rows, wire, dtype):
    numbers, scales = quantize(rows.astype(dtype), wire)
    assert numbers.dtype == wire
    largest = np.abs(rows).max(1)
    steps = np.iinfo(wire).max
    assert (np.abs(numbers.astype(int)) <= steps).all()
    np.testing.assert_allclose(scales, largest / steps, rtol=1e-6, atol=1e-36)  # below that a row is zeros
    error = np.abs(dequantize([numbers, scales], dtype) - rows)
    assert (error <= largest[:, None] / steps * 0.5 * (1 + 1e-5) + largest[:, None] * 5e-7 + 1e-32).all()


@given(values)
def test_halves_are_numpys(rows):
    (halves,) = quantize(rows, "f2")
    np.testing.assert_array_equal(halves, rows.astype(np.float16))
    np.testing.assert_array_equal(dequantize([halves]), rows.astype(np.float16).astype(np.float32))


def test_what_is_not_finite_stays_so():
    rows = np.ones((3, 10), np.float32)
    rows[0, 9], rows[1, 2] = np.nan, np.inf
    back = dequantize(quantize(rows, "i1"))
    assert np.isnan(back[:2]).all()
    np.testing.assert_allclose(back[2], 1, rtol=1e-6)
    assert np.isinf(quantize(np.full((1, 2), 1e9), "f2")[0]).all()


def test_unknown_kinds_are_refused():
    with pytest.raises(StoreError, match="wire: 'i4'"):
        quantize(np.ones((1, 1), np.float32), "i4")
    with pytest.raises(StoreError, match="one scale per row"):
        dequantize([np.ones((2, 2), np.int8)])


@pytest.mark.parametrize(("stored", "step"), [("f2", 1e-3 / 8), ("i2", 2.0 / 32767 / 8), ("i1", 2.0 / 127 / 8)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_updates_smaller_than_a_step_count_in_the_mean(stored, step, dtype):
    store = ParameterStore(num_shards=2, memory=64 << 20)
    dim = 64
    store.declare(
        Table(
            name="t",
            dim=dim,
            rule=Rule(kind="sgd", lr=1.0),
            init=Init(kind="constant", value=1.5),
            dtype=dtype,
            stored=stored,
        )
    )
    ids = np.arange(50)
    grads = np.full((50, dim), -step)
    grads[:, 0] = 0
    store.assign("t", ids, np.where(np.arange(dim) == 0, 2.0, 1.5) * np.ones((50, 1)), lsn=np.zeros(2, np.int64))
    for lsn in range(1, 101):
        store.apply("t", ids, grads, lsn=np.full(2, lsn))
    mean = store.read("t", ids, "f8")[0][:, 1:].mean()
    assert mean == pytest.approx(1.5 + 100 * step, abs=3 * step)


def test_stored_halves_reach_from_the_smallest_to_the_largest():
    store = ParameterStore(num_shards=1, memory=64 << 20)
    store.declare(Table(name="t", dim=6, rule=Rule(kind="sgd", lr=1.0), stored="f2"))
    row = np.array([[6e-8, -3e-5, 1.0, 65504.0, -1e9, np.inf]], np.float32)
    store.assign("t", np.array([1]), row, lsn=np.zeros(1, np.int64))
    row[0, 4] = -65504  # stored values never become infinite: nothing would bring them back
    np.testing.assert_array_equal(store.read("t", np.array([1]))[0], row.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("stored", ["f4", "f2", "i2", "i1"])
def test_an_absent_row_reads_as_it_would_be_created(stored):
    store = ParameterStore(num_shards=4, memory=64 << 20)
    store.declare(Table(name="t", dim=11, rule=Rule(kind="sgd"), init=Init(kind="normal", scale=1.0), stored=stored))
    ids = np.arange(20)
    before = store.read("t", ids)[0]
    store.assign("t", ids, before, lsn=np.zeros(4, np.int64))
    np.testing.assert_allclose(store.read("t", ids)[0], before, rtol=1e-6, atol=1e-7 if stored[0] == "f" else 1e-4)
    assert before.std() == pytest.approx(1.0, abs=0.2)
