"""The order over lanes: each sample once, the same on any number of ranks, each rank from its own part, in little memory."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data import order as orders_module
from echelon.data.order import Order
from echelon.data.shuffle import FeistelPermutation, random_permutation
from echelon.errors import DataError
from echelon.plan.batch_split import split_batch

QUICK = settings(deadline=None, max_examples=100)  # no deadline: the machine may be busy


@st.composite
def orders(draw: st.DrawFn) -> Order:
    lanes = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 64]))
    files = lanes * draw(st.integers(1, 4))
    return Order(
        samples=draw(st.integers(1, 300)),
        batch=draw(st.integers(1, 130)),
        seed=draw(st.integers(0, 5)),
        lanes=lanes,
        files=files,
        window=draw(st.none() | st.integers(1, 5)),
        shuffle=draw(st.integers(0, 5)) > 0,
    )


def step_ids(order: Order, step: int, ranks: int = 1) -> list[int]:
    """The batch of a step, put together from what each rank asks for."""
    size = order.batch_size(step)
    shares = split_batch(size, min(ranks, size))
    return [sample for share in shares for sample in order.ids(step, share[0].start, share[-1].stop).tolist()]


@QUICK
@given(orders(), st.integers(1, 64), st.integers(0, 2))
def test_each_sample_once_per_epoch_on_any_number_of_ranks(order: Order, ranks: int, epoch: int) -> None:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    alone = [step_ids(order, step) for step in steps]
    assert sorted(itertools.chain(*alone)) == list(range(order.samples))
    assert [step_ids(order, step, ranks) for step in steps] == alone


@QUICK
@given(orders(), st.data())
def test_resumed_anywhere_on_other_ranks_it_is_the_tail(order: Order, data: st.DataObject) -> None:
    total = 2 * order.steps_per_epoch
    whole = [step_ids(order, step) for step in range(total)]
    start = data.draw(st.integers(0, total - 1))
    fresh = Order(
        **{name: getattr(order, name) for name in ("samples", "batch", "seed", "lanes", "files", "window", "shuffle")}
    )
    ranks = data.draw(st.integers(1, 64))
    assert [step_ids(fresh, step, ranks) for step in range(start, total)] == whole[start:]


@QUICK
@given(orders(), st.integers(0, 1))
def test_as_a_formula_it_visits_each_sample_once_as_well(order: Order, epoch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders_module, "_MAX_TABLE_SAMPLES", 0)
        patch.setattr(orders_module, "_IDS_PER_CHUNK", 50)
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        assert sorted(itertools.chain(*(step_ids(order, step, 3) for step in steps))) == list(range(order.samples))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_that_divide_the_lanes_read_their_own_files_only(ranks: int) -> None:
    order = Order(samples=1003, batch=32, lanes=8)
    bounds = [file * 1003 // 8 for file in range(9)]
    for rank, share in enumerate(split_batch(32, ranks)):
        mine = range(bounds[rank * 8 // ranks], bounds[(rank + 1) * 8 // ranks])
        for step in range(31):
            assert set(order.ids(step, share[0].start, share[-1].stop).tolist()) <= set(mine)


def test_a_window_keeps_few_files_in_use() -> None:
    order = Order(samples=1600, batch=10, lanes=2, files=32, window=2)
    at_once = [
        len({sample // 50 for step in range(first, first + 10) for sample in step_ids(order, step)})
        for first in range(0, 160, 10)
    ]
    assert max(at_once) <= 2 * 2  # two lanes, two files each; a hundred samples are one window of both


def test_the_lanes_order_is_the_same_for_ever() -> None:
    """Checkpoints hold a step number, not the order."""
    order = Order(samples=16, batch=8, seed=7, lanes=4)
    assert [step_ids(order, step) for step in range(2)] == [[2, 0, 4, 6, 8, 11, 12, 15], [1, 3, 7, 5, 10, 9, 14, 13]]
    assert FeistelPermutation(1000, 7, 1).at(np.arange(8)).tolist() == [19, 609, 276, 44, 34, 243, 435, 698]


def test_a_thousand_million_samples_need_little_memory() -> None:
    order = Order(samples=10**9, batch=1024, lanes=64)
    order.ids(0, 0, 1)
    tracemalloc.start()
    seen = [order.ids(step, 16, 32) for step in range(0, 900_000, 45_000)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6
    found = np.concatenate(seen)
    assert len(np.unique(found)) == len(found)
    assert found.min() >= 10**9 // 64
    assert found.max() < 2 * 10**9 // 64


@pytest.mark.parametrize("lanes", [1, 16])
def test_a_rank_of_many_works_out_its_own_share_only(lanes: int) -> None:
    """Of 256 ranks one asks for a 256th of each batch: whole batches would be 256 times as many numbers."""
    order = Order(samples=10**9, batch=4096, lanes=lanes)
    order.ids(0, 0, 1)
    tracemalloc.start()
    found = order.ids(7, 16 * 200, 16 * 201)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6
    assert found.tolist() == order.ids(7, 0, 4096)[16 * 200 : 16 * 201].tolist()


@QUICK
@given(st.integers(1, 3000), st.integers(0, 100))
def test_the_formula_is_a_permutation(samples: int, key: int) -> None:
    assert sorted(FeistelPermutation(samples, key).at(np.arange(samples)).tolist()) == list(range(samples))


def test_the_formula_mixes() -> None:
    """Over 10^9 numbers: where 2^18 neighbours land is even (chi-squared), and unlike where their neighbours and other keys land."""
    places = np.arange(2**18)
    found = FeistelPermutation(10**9, 3).at(places).astype(float)
    even = np.bincount((found * 1e-9 * 1000).astype(int), minlength=1000)
    expected = len(places) / 1000
    assert ((even - expected) ** 2 / expected).sum() < 1000 + 5 * np.sqrt(2000)
    for other in (
        np.roll(found, 1),
        FeistelPermutation(10**9, 4).at(places),
        places,
        random_permutation(len(places), 1),
    ):
        assert abs(np.corrcoef(found, other)[0, 1]) < 5 / np.sqrt(len(places))


def test_pairs_meet_in_a_batch_as_often_as_chance_has_it() -> None:
    """Of a lane's samples any two share a batch equally often: seen over many epochs for one sample and all others."""
    met = np.zeros(64)
    for epoch in range(3000):
        order = Order(samples=64, batch=16, lanes=4, seed=epoch)
        batch = next(b for b in (step_ids(order, s) for s in range(4)) if 5 in b)
        met[batch] += 1
    own, others = np.delete(met[:16], 5), met[16:]
    assert abs(own.mean() / 3000 - 3 / 15) < 0.01
    assert abs(others.mean() / 3000 - 4 / 16) < 0.01
    assert np.ptp(others) < 8 * np.sqrt(3000 * 0.25 * 0.75)


@pytest.mark.parametrize("values", [{"lanes": 0}, {"files": 0}, {"window": 0}, {"window": 2, "files": 3, "lanes": 2}])
def test_numbers_that_make_no_lanes(values: dict[str, int]) -> None:
    with pytest.raises(DataError, match=r"expected an integer of at least 1|shuffle at least one file at a time"):
        Order(samples=10, batch=2, **values)
