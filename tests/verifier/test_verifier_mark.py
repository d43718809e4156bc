"""Marks: equal for equal tensors, and far apart for any others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from echelon.verifier.compare import FLOAT64_BOUND, NOT_COMPARABLE
from echelon.verifier.tensor_checksum import TensorRegion, compare_replicas, compare_start_values, compute_checksum
from echelon.verifier.tolerances import copy_to_float64

VALUE = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize(
    "other",
    [VALUE * 2, -VALUE, VALUE.flip(0), VALUE.roll(1, 1), VALUE.roll(3, 0), VALUE + 1e-3, VALUE * 0],
    ids=["doubled", "sign", "flipped", "rolled", "halves exchanged", "shifted", "zero"],
)
def test_other_numbers_leave_another_mark(other: Tensor) -> None:
    assert compute_checksum(other).relative_difference(compute_checksum(VALUE)) > 1e-4


def test_equal_numbers_leave_the_same_mark_up_to_rounding() -> None:
    assert compute_checksum(VALUE.clone()).relative_difference(compute_checksum(VALUE)) == 0.0
    assert compute_checksum(VALUE * (1 + 1e-14)).relative_difference(compute_checksum(VALUE)) < FLOAT64_BOUND
    mask = torch.tensor([0.0, -math.inf])
    assert compute_checksum(mask.clone()).relative_difference(compute_checksum(mask)) == 0.0
    assert compute_checksum(-mask).relative_difference(compute_checksum(mask)) == NOT_COMPARABLE


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_equals_no_number(bad: float) -> None:
    for stand_in in (0.0, 3.0, 5.0, -7.0):
        odd, plain = torch.tensor([1.0, bad]), torch.tensor([1.0, stand_in])
        assert (
            compute_checksum(odd).relative_difference(compute_checksum(plain))
            == compute_checksum(plain).relative_difference(compute_checksum(odd))
            == NOT_COMPARABLE
        )


def test_nan_on_both_sides_does_not_pass() -> None:
    odd = compute_checksum(torch.tensor([1.0, math.nan]))
    assert (
        odd.relative_difference(odd)
        == odd.relative_difference(compute_checksum(torch.tensor([1.0, math.nan])))
        == NOT_COMPARABLE
    )
    (found,) = compare_replicas([{TensorRegion("w", (0,), (2,)): odd}], 1)
    assert (found.value, found.reason) == (NOT_COMPARABLE, "rank 0 holds NaN")
    (found,) = compare_start_values([{TensorRegion("w", (0,), (2,)): odd}], {"w": torch.tensor([1.0, math.nan])}, 0)
    assert (found.value, found.reason) == (NOT_COMPARABLE, "rank 0 holds NaN")


def test_infinities_are_compared_by_their_places_and_signs() -> None:
    row = torch.tensor([math.inf, 1.0, -math.inf, 2.0])
    assert compute_checksum(row.clone()).relative_difference(compute_checksum(row)) == 0.0
    for other in (row.flip(0), -row, row[[2, 1, 0, 3]], row[[1, 0, 2, 3]]):
        assert compute_checksum(other).relative_difference(compute_checksum(row)) == NOT_COMPARABLE


def test_whole_numbers_are_exact() -> None:
    counts = torch.tensor([[1, 2, 1], [10**15, -7, 2**62]])
    assert compute_checksum(counts.clone()).relative_difference(compute_checksum(counts)) == 0.0
    for other in (counts + 1, counts.flip(1), torch.tensor([[2, 0, 2], [10**15, -7, 2**62]])):
        assert compute_checksum(other).relative_difference(compute_checksum(counts)) == 1.0
    assert (
        compute_checksum(torch.tensor([True, False])).relative_difference(compute_checksum(torch.tensor([False, True])))
        == 1.0
    )
    place = TensorRegion("seen", (), ())
    (off,) = compare_replicas(
        [{place: compute_checksum(torch.tensor(3))}, {place: compute_checksum(torch.tensor(4))}], 0
    )
    assert (off.value, off.reason) == (1.0, "rank 1 holds other numbers than rank 0")
    (good,) = compare_start_values(
        [{place: compute_checksum(torch.tensor(3))}], copy_to_float64({"seen": torch.tensor(3)}), 0
    )
    assert good.value == 0.0


def test_gradients_that_are_noise_are_no_difference_where_random_numbers_are_on() -> None:
    noise, plain = TensorRegion("key.bias", (0,), (6,)), TensorRegion("w", (0, 0), (6, 5))
    made = [{noise: compute_checksum(VALUE[:, 0] * size), plain: compute_checksum(VALUE)} for size in (1e-17, 3e-17)]
    assert max(each.value for each in compare_replicas(made, 0, "draw")) < FLOAT64_BOUND
    assert max(each.value for each in compare_replicas(made, 0)) > FLOAT64_BOUND


def test_another_shape_is_never_the_same() -> None:
    assert compute_checksum(VALUE.T).relative_difference(compute_checksum(VALUE)) == NOT_COMPARABLE
    assert (
        compute_checksum(VALUE.to(torch.complex128)).relative_difference(
            compute_checksum(VALUE.to(torch.complex128) * 1j)
        )
        > FLOAT64_BOUND
    )


def test_copies_are_compared_where_ranks_hold_the_same_part() -> None:
    whole, top, bottom = (
        TensorRegion("w", (0, 0), (6, 5)),
        TensorRegion("v", (0, 0), (3, 5)),
        TensorRegion("v", (3, 0), (3, 5)),
    )
    good = [
        {whole: compute_checksum(VALUE), top: compute_checksum(VALUE[:3])},
        {whole: compute_checksum(VALUE), bottom: compute_checksum(VALUE[3:])},
    ]
    assert {each.name: each.value for each in compare_replicas(good, 2)} == {"w": 0.0, "v": 0.0}
    assert all(not each.reason for each in compare_replicas(good, 2))
    bad = compare_replicas([good[0], {whole: compute_checksum(VALUE * 2), bottom: compute_checksum(VALUE[3:])}], 2)
    (off,) = (each for each in bad if each.value > FLOAT64_BOUND)
    assert (off.kind, off.name, off.step, off.reason) == ("copy", "w", 2, "rank 1 holds other numbers than rank 0")


def test_every_rank_starts_from_its_part_of_the_reference() -> None:
    top, bottom = TensorRegion("w", (0, 0), (3, 5)), TensorRegion("w", (3, 0), (3, 5))
    assert [
        each.value
        for each in compare_start_values(
            [{top: compute_checksum(VALUE[:3])}, {bottom: compute_checksum(VALUE[3:])}], {"w": VALUE}, 0
        )
    ] == [0.0]
    (off,) = compare_start_values(
        [{top: compute_checksum(VALUE[:3])}, {bottom: compute_checksum(VALUE[:3])}], {"w": VALUE}, 0
    )
    assert off.value > FLOAT64_BOUND
    assert off.reason == "rank 1 starts from other numbers than one device does"
    assert compare_start_values([{top: compute_checksum(VALUE[:3])}], {}, 0) == []
