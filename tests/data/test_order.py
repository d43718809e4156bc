"""The order of samples: each exactly once per epoch, the same whatever cuts it, the same for ever."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data.order import Order
from echelon.errors import DataError

QUICK = settings(deadline=None, max_examples=100)  # no deadline: the machine may be busy

orders = st.builds(
    Order,
    samples=st.integers(1, 300),
    batch=st.integers(1, 400),
    seed=st.integers(-(2**63), 2**64),
    shuffle=st.booleans(),
)


def batch(order: Order, step: int) -> list[int]:
    return order.ids(step, 0, order.batch_size(step)).tolist()


def epoch(order: Order, number: int) -> list[int]:
    steps = order.steps_per_epoch
    return [sample for step in range(number * steps, (number + 1) * steps) for sample in batch(order, step)]


@QUICK
@given(orders, st.integers(0, 5))
def test_each_sample_once_per_epoch(order: Order, number: int) -> None:
    assert sorted(epoch(order, number)) == list(range(order.samples))


@QUICK
@given(orders, st.integers(0, 5))
def test_only_the_last_batch_is_short(order: Order, number: int) -> None:
    first = number * order.steps_per_epoch
    sizes = [order.batch_size(first + step) for step in range(order.steps_per_epoch)]
    assert sizes[:-1] == [order.batch] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= order.batch
    assert {order.epoch_of(first + step) for step in range(len(sizes))} == {number}


@QUICK
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 3))
def test_drop_last_leaves_whole_batches_of_the_same_order(samples: int, size: int, number: int) -> None:
    size = min(size, samples)
    kept = Order(samples=samples, batch=size, drop_last=True)
    assert {kept.batch_size(step) for step in range(3 * kept.steps_per_epoch)} == {size}
    assert epoch(kept, number) == epoch(Order(samples=samples, batch=size), number)[: samples // size * size]


@QUICK
@given(orders, st.integers(0, 2000), st.data())
def test_positions_cut_the_batch(order: Order, step: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, order.batch_size(step)), max_size=5)))
    bounds = [0, *cuts, order.batch_size(step)]
    parts = [order.ids(step, start, stop).tolist() for start, stop in itertools.pairwise(bounds)]
    assert list(itertools.chain(*parts)) == batch(order, step)


@QUICK
@given(orders)
def test_a_new_order_continues_where_an_old_one_stopped(order: Order) -> None:
    fresh = Order(samples=order.samples, batch=order.batch, seed=order.seed, shuffle=order.shuffle)
    late = 3 * order.steps_per_epoch
    for step in range(late):  # the old one has other epochs in its memory
        batch(order, step)
    assert batch(fresh, late) == batch(order, late)


def test_epochs_and_seeds_differ() -> None:
    def shuffled(seed: int, number: int) -> list[int]:
        return epoch(Order(samples=100, batch=10, seed=seed), number)

    assert len({tuple(shuffled(seed, number)) for seed in (0, 1, -1) for number in range(4)}) == 12


def test_the_order_is_the_same_for_ever() -> None:
    """Checkpoints hold a step number, not the order: another order would train on some samples twice."""
    order = Order(samples=10, batch=10, seed=7)
    assert [batch(order, step) for step in (0, 1)] == [[0, 6, 7, 1, 2, 9, 3, 8, 4, 5], [2, 5, 8, 0, 9, 3, 1, 6, 7, 4]]


def test_the_shuffle_is_uniform() -> None:
    """Where sample 0 lands over 4000 epochs of 8 samples: chi-squared, 7 degrees of freedom, far below one in a million."""
    order = Order(samples=8, batch=8)
    places = np.bincount([batch(order, number).index(0) for number in range(4000)], minlength=8)
    assert ((places - 500) ** 2 / 500).sum() < 42


def test_old_epochs_are_forgotten() -> None:
    order = Order(samples=100_000, batch=50_000)
    tracemalloc.start()
    for step in range(20):
        order.ids(step, 0, 1)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 3 * 8 * order.samples


def test_without_shuffle_the_order_is_the_data_sets() -> None:
    assert epoch(Order(samples=7, batch=3, shuffle=False), 2) == list(range(7))


def test_ids_cannot_spoil_the_order() -> None:
    order = Order(samples=10, batch=10)
    assert order.ids(0, 0, 10).dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        order.ids(0, 0, 10)[0] = 3


@pytest.mark.parametrize(("step", "start", "stop"), [(0, 0, 5), (-1, 0, 1), (0, -1, 2), (0, 3, 2), (2, 0, 3)])
def test_positions_outside_the_batch(step: int, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="outside its batch of"):
        Order(samples=10, batch=4).ids(step, start, stop)


@pytest.mark.parametrize(
    "values", [{"samples": 0, "batch": 4}, {"samples": 4, "batch": 0}, {"samples": 4, "batch": 2.0}]
)
def test_numbers_that_make_no_order(values: dict[str, int]) -> None:
    with pytest.raises(DataError, match="expected an integer of at least 1"):
        Order(**values)


def test_drop_last_that_leaves_nothing() -> None:
    with pytest.raises(DataError, match=r"3 samples do not fill one batch of 8.*use a batch of at most 3"):
        Order(samples=3, batch=8, drop_last=True)


def test_the_order_needs_no_torch() -> None:
    code = "import sys; from echelon.data import Order; Order(samples=9, batch=2).ids(0, 0, 2); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
