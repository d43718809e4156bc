"""Marks: equal for equal tensors, and far apart for any others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from echelon.verifier.compare import BOUND, BROKEN
from echelon.verifier.tensor_checksum import Place, copies, mark, starts
from echelon.verifier.tolerances import copied

VALUE = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize(
    "other",
    [VALUE * 2, -VALUE, VALUE.flip(0), VALUE.roll(1, 1), VALUE.roll(3, 0), VALUE + 1e-3, VALUE * 0],
    ids=["doubled", "sign", "flipped", "rolled", "halves exchanged", "shifted", "zero"],
)
def test_other_numbers_leave_another_mark(other: Tensor) -> None:
    assert mark(other).apart(mark(VALUE)) > 1e-4


def test_equal_numbers_leave_the_same_mark_up_to_rounding() -> None:
    assert mark(VALUE.clone()).apart(mark(VALUE)) == 0.0
    assert mark(VALUE * (1 + 1e-14)).apart(mark(VALUE)) < BOUND
    mask = torch.tensor([0.0, -math.inf])
    assert mark(mask.clone()).apart(mark(mask)) == 0.0
    assert mark(-mask).apart(mark(mask)) == BROKEN


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_equals_no_number(bad: float) -> None:
    for stand_in in (0.0, 3.0, 5.0, -7.0):
        odd, plain = torch.tensor([1.0, bad]), torch.tensor([1.0, stand_in])
        assert mark(odd).apart(mark(plain)) == mark(plain).apart(mark(odd)) == BROKEN


def test_nan_on_both_sides_does_not_pass() -> None:
    odd = mark(torch.tensor([1.0, math.nan]))
    assert odd.apart(odd) == odd.apart(mark(torch.tensor([1.0, math.nan]))) == BROKEN
    (found,) = copies([{Place("w", (0,), (2,)): odd}], 1)
    assert (found.value, found.why) == (BROKEN, "rank 0 holds NaN")
    (found,) = starts([{Place("w", (0,), (2,)): odd}], {"w": torch.tensor([1.0, math.nan])}, 0)
    assert (found.value, found.why) == (BROKEN, "rank 0 holds NaN")


def test_infinities_are_compared_by_their_places_and_signs() -> None:
    row = torch.tensor([math.inf, 1.0, -math.inf, 2.0])
    assert mark(row.clone()).apart(mark(row)) == 0.0
    for other in (row.flip(0), -row, row[[2, 1, 0, 3]], row[[1, 0, 2, 3]]):
        assert mark(other).apart(mark(row)) == BROKEN


def test_whole_numbers_are_exact() -> None:
    counts = torch.tensor([[1, 2, 1], [10**15, -7, 2**62]])
    assert mark(counts.clone()).apart(mark(counts)) == 0.0
    for other in (counts + 1, counts.flip(1), torch.tensor([[2, 0, 2], [10**15, -7, 2**62]])):
        assert mark(other).apart(mark(counts)) == 1.0
    assert mark(torch.tensor([True, False])).apart(mark(torch.tensor([False, True]))) == 1.0
    place = Place("seen", (), ())
    (off,) = copies([{place: mark(torch.tensor(3))}, {place: mark(torch.tensor(4))}], 0)
    assert (off.value, off.why) == (1.0, "rank 1 holds other numbers than rank 0")
    (good,) = starts([{place: mark(torch.tensor(3))}], copied({"seen": torch.tensor(3)}), 0)
    assert good.value == 0.0


def test_gradients_that_are_noise_are_no_difference_where_random_numbers_are_on() -> None:
    noise, plain = Place("key.bias", (0,), (6,)), Place("w", (0, 0), (6, 5))
    made = [{noise: mark(VALUE[:, 0] * size), plain: mark(VALUE)} for size in (1e-17, 3e-17)]
    assert max(each.value for each in copies(made, 0, "draw")) < BOUND
    assert max(each.value for each in copies(made, 0)) > BOUND


def test_another_shape_is_never_the_same() -> None:
    assert mark(VALUE.T).apart(mark(VALUE)) == BROKEN
    assert mark(VALUE.to(torch.complex128)).apart(mark(VALUE.to(torch.complex128) * 1j)) > BOUND


def test_copies_are_compared_where_ranks_hold_the_same_part() -> None:
    whole, top, bottom = Place("w", (0, 0), (6, 5)), Place("v", (0, 0), (3, 5)), Place("v", (3, 0), (3, 5))
    good = [{whole: mark(VALUE), top: mark(VALUE[:3])}, {whole: mark(VALUE), bottom: mark(VALUE[3:])}]
    assert {each.name: each.value for each in copies(good, 2)} == {"w": 0.0, "v": 0.0}
    assert all(not each.why for each in copies(good, 2))
    bad = copies([good[0], {whole: mark(VALUE * 2), bottom: mark(VALUE[3:])}], 2)
    (off,) = (each for each in bad if each.value > BOUND)
    assert (off.kind, off.name, off.step, off.why) == ("copy", "w", 2, "rank 1 holds other numbers than rank 0")


def test_every_rank_starts_from_its_part_of_the_reference() -> None:
    top, bottom = Place("w", (0, 0), (3, 5)), Place("w", (3, 0), (3, 5))
    assert [each.value for each in starts([{top: mark(VALUE[:3])}, {bottom: mark(VALUE[3:])}], {"w": VALUE}, 0)] == [
        0.0
    ]
    (off,) = starts([{top: mark(VALUE[:3])}, {bottom: mark(VALUE[:3])}], {"w": VALUE}, 0)
    assert off.value > BOUND
    assert off.why == "rank 1 starts from other numbers than one device does"
    assert starts([{top: mark(VALUE[:3])}], {}, 0) == []
