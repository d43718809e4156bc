"""The comparison: what counts as a difference, and what never passes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echelon.verifier.compare import (
    NOT_COMPARABLE,
    RELATIVE_FLOOR,
    Bounds,
    compare_tensors,
    relative_difference,
    summarize_differences,
)

BOUNDS = Bounds()
QUICK = settings(deadline=None, max_examples=60)  # no deadline: the machine may be busy
#: No smaller than any gradient in float64 is: below, products lose their digits.
numbers = st.just(0.0) | st.floats(1e-18, 1e6) | st.floats(-1e6, -1e-18)
vectors = st.lists(numbers, min_size=1, max_size=8).map(lambda values: torch.tensor(values, dtype=torch.float64))


def one(kind: str, mine: Tensor | None, true: Tensor | None) -> float:
    (difference,) = compare_tensors(kind, {"w": mine}, {"w": true}, step=0)
    return difference.value


@QUICK
@given(vectors, numbers)
def test_relative_is_the_definition(true: Tensor, shift: float) -> None:
    largest = 2e6
    mine = true + shift
    expected = float((mine - true).abs().max()) / max(float(true.abs().max()), 1e-6 * largest)
    assert relative_difference(mine, true, largest=largest) == pytest.approx(expected)


@QUICK
@given(vectors)
def test_equal_tensors_do_not_differ(true: Tensor) -> None:
    assert relative_difference(true.clone(), true, largest=0.0) == 0.0


@QUICK
@given(vectors, st.floats(2.0, 100.0), st.floats(0.1, 10.0))
def test_the_unit_of_measure_does_not_matter(true: Tensor, factor: float, unit: float) -> None:
    mine = true * factor
    here = relative_difference(mine, true, largest=float(true.abs().max()))
    there = relative_difference(mine * unit, true * unit, largest=float((true * unit).abs().max()))
    assert there == pytest.approx(here, rel=1e-9)


@QUICK
@given(vectors, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 7))
def test_what_is_not_finite_never_passes(true: Tensor, bad: float, index: int) -> None:
    mine = true.clone()
    mine[index % len(mine)] = bad
    assert relative_difference(mine, true, largest=1.0) == NOT_COMPARABLE
    assert not summarize_differences(compare_tensors("loss", {"w": mine}, {"w": true}, step=0), BOUNDS)[
        0
    ].is_within_bound


def test_nan_on_both_sides_does_not_pass() -> None:
    assert one("gradient", torch.tensor([math.nan]), torch.tensor([math.nan])) == NOT_COMPARABLE


def test_equal_infinities_are_equal() -> None:
    mask = torch.tensor([0.0, -math.inf])
    assert one("buffer", mask.clone(), mask) == 0.0
    assert one("buffer", -mask, mask) == NOT_COMPARABLE


def test_a_gradient_that_is_truly_zero_is_measured_against_the_largest() -> None:
    true = {"big": torch.tensor([1.0], dtype=torch.float64), "zero": torch.tensor([0.0], dtype=torch.float64)}
    noisy = {"big": true["big"], "zero": torch.tensor([1e-17], dtype=torch.float64)}
    assert {each.name: each.value for each in compare_tensors("gradient", noisy, true, step=0)} == {
        "big": 0.0,
        "zero": pytest.approx(1e-17 / RELATIVE_FLOOR),
    }


def test_optimizer_states_of_another_meaning_do_not_raise_the_floor() -> None:
    true = {"0/w/step": torch.tensor(1e6), "0/w/exp_avg_sq": torch.tensor([1e-9], dtype=torch.float64)}
    wrong = true | {"0/w/exp_avg_sq": true["0/w/exp_avg_sq"] * 2}
    assert max(each.value for each in compare_tensors("optimizer", wrong, true, step=0)) == pytest.approx(1.0)


def test_whole_numbers_are_exact() -> None:
    true = torch.tensor([10**12])
    assert one("buffer", true + 1, true) == 1.0
    assert one("buffer", true.clone(), true) == 0.0


def test_a_gradient_that_is_none_reads_as_zero() -> None:
    assert one("gradient", None, torch.zeros(3)) == 0.0
    assert one("gradient", torch.zeros(3), None) == 0.0
    assert one("gradient", None, None) == 0.0
    assert one("gradient", None, torch.ones(3)) == 1.0
    assert one("gradient", torch.ones(3), None) == NOT_COMPARABLE


@pytest.mark.parametrize(
    ("mine", "true", "why"),
    [
        ({}, {"w": torch.ones(2)}, "missing from the plan's run"),
        ({"w": torch.ones(2)}, {}, "only in the plan's run"),
        ({"w": torch.ones(2)}, {"w": torch.ones(3)}, "shape (2,), the reference has (3,)"),
    ],
)
def test_what_does_not_match_is_found_by_name(mine: dict[str, Tensor], true: dict[str, Tensor], why: str) -> None:
    (difference,) = compare_tensors("parameter", mine, true, step=1)
    assert difference.value == NOT_COMPARABLE
    assert str(difference) == f"w (step 1, {why})"


def test_findings_hold_the_worst_of_each_kind() -> None:
    made = [
        *compare_tensors("gradient", {"a": torch.tensor(1.1), "b": torch.tensor(1.5)}, {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}, step=0),
        *compare_tensors("gradient", {"a": torch.tensor(1.2), "b": torch.tensor(1.0)}, {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}, step=1),
        *compare_tensors("loss", {"loss": torch.tensor(1.0)}, {"loss": torch.tensor(1.0)}, step=0),
    ]  # fmt: skip
    gradient, loss = summarize_differences(made, BOUNDS)
    assert (gradient.kind, gradient.tensors, gradient.where, gradient.is_within_bound) == (
        "gradient",
        2,
        "b (step 0)",
        False,
    )
    assert gradient.max_difference == pytest.approx(0.5)
    assert (loss.kind, loss.max_difference, loss.is_within_bound) == ("loss", 0.0, True)


def test_slack_is_granted_element_by_element() -> None:
    true = torch.zeros(2, dtype=torch.float64)
    mine, slack = torch.tensor([1e-3, 0.0]).double(), torch.tensor([1e-3, 0.0]).double()
    assert relative_difference(mine, true, largest=1.0, tolerance=slack) == 0.0
    assert relative_difference(mine.flip(0), true, largest=1.0, tolerance=slack) == pytest.approx(1e-3 / RELATIVE_FLOOR)


def test_a_tensor_with_a_bound_of_its_own_is_judged_by_it() -> None:
    true = {"a": torch.tensor(1.0).double(), "b": torch.tensor(1.0).double()}
    made = compare_tensors("gradient", {"a": true["a"] + 1e-7, "b": true["b"] + 1e-10}, true, step=0)
    (finding,) = summarize_differences(made, Bounds(by_tensor={("gradient", "a"): 1e-5}))
    assert (finding.where, finding.bound, finding.is_within_bound) == ("b (step 0)", 1e-9, True)
    (finding,) = summarize_differences(made, Bounds(by_tensor={("gradient", "a"): 1e-8}))
    assert (finding.where, finding.bound, finding.is_within_bound) == ("a (step 0)", 1e-8, False)
