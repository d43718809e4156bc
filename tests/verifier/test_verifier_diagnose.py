"""Which tensor went wrong first."""

from __future__ import annotations

import pytest
import torch

from echelon.verifier.compare import Bounds, Difference, compare_tensors
from echelon.verifier.first_divergence import (
    TensorPair,
    describe,
    equals_candidate_tensor,
    exact_ratio,
    find_first_divergence,
    forward_position,
    scalar_multiple,
)
from echelon.verifier.tolerances import ParameterTolerance

ORDER = {"": 0, "stem": 1, "blocks.0": 2, "blocks.0.up": 3, "blocks.1": 4}
TRUE = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def off(kind: str, name: str, step: int = 0) -> Difference:
    return Difference(kind=kind, name=name, step=step, value=0.5)


def test_a_tensor_stands_where_forward_enters_its_module() -> None:
    names = ["stem.weight", "blocks.0.up.bias", "blocks.0.unknown.deep.weight", "token", "blocks.1.x"]
    assert [forward_position(name, ORDER) for name in names] == [1, 3, 2, 0, 4]
    assert forward_position("loss", {}) == 0


@pytest.mark.parametrize(
    ("differences", "name"),
    [
        ([off("gradient", "blocks.1.w"), off("gradient", "blocks.0.up.w")], "blocks.0.up.w"),
        ([off("loss", "loss"), off("gradient", "blocks.1.w")], "blocks.1.w"),
        ([off("gradient", "stem.w", 1), off("optimizer", "0/blocks.1.w/exp_avg", 0)], "0/blocks.1.w/exp_avg"),
        ([off("optimizer", "0/blocks.1.w/exp_avg"), off("optimizer", "0/stem.w/exp_avg")], "0/stem.w/exp_avg"),
        ([off("buffer", "blocks.1.mean"), off("parameter", "stem.w")], "blocks.1.mean"),
    ],
)
def test_the_first_is_by_step_then_kind_then_forward_order(differences: list[Difference], name: str) -> None:
    found = find_first_divergence(differences, Bounds(), ORDER)
    assert found is not None
    assert found.name == name
    assert find_first_divergence(differences, Bounds(default=0.5), ORDER) is None


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("gradient", "stem.w", "gradient of stem.w at step 3: relative difference 5.0e-01, bound 1e-09"),
        ("loss", "loss", "loss at step 3: "),
        ("norm", "gradient norm", "gradient norm at step 3: "),
        ("optimizer", "0/stem.w/exp_avg", "exp_avg of stem.w (optimizer state) at step 3: "),
        ("start", "stem.w", "stem.w before the first step: "),
        ("copy", "stem.w", "stem.w after step 3: "),
    ],
)
def test_what_is_off_is_told_with_its_place_and_size(kind: str, name: str, words: str) -> None:
    assert describe(off(kind, name, 3), Bounds()).startswith(words)


def test_what_has_no_number_says_why() -> None:
    made = compare_tensors("buffer", {}, {"mean": TRUE}, step=3)
    assert describe(made[0], Bounds()) == "buffer of mean at step 3: missing from the plan's run"


def test_another_value_explains_a_tensor_only_if_the_reference_does_not() -> None:
    assert equals_candidate_tensor(TRUE * 3, TensorPair(actual=TRUE * 3, expected=TRUE))
    assert not equals_candidate_tensor(TRUE, TensorPair(actual=TRUE, expected=TRUE))
    assert not equals_candidate_tensor(TRUE * 2.9, TensorPair(actual=TRUE * 3, expected=TRUE))
    assert not equals_candidate_tensor(TRUE * torch.nan, TensorPair(actual=TRUE * 3, expected=TRUE))


def test_a_proportion_may_be_one() -> None:
    assert scalar_multiple(TRUE, TRUE) == pytest.approx(1.0)
    assert scalar_multiple(TRUE + 1, TRUE) is None


def test_no_ratio_where_there_is_none() -> None:
    assert exact_ratio(TensorPair(actual=TRUE, expected=TRUE * 0)) is None
    assert exact_ratio(TensorPair(actual=TRUE * torch.nan, expected=TRUE)) is None
    assert exact_ratio(TensorPair(actual=TRUE[:2], expected=TRUE)) is None
    little = TRUE * (1 + 1e-7 * torch.arange(TRUE.numel(), dtype=TRUE.dtype).view_as(TRUE))
    assert exact_ratio(TensorPair(actual=little, expected=TRUE)) is None
    assert exact_ratio(TensorPair(actual=TRUE * (1 + 1e-7), expected=TRUE)) == pytest.approx(1 + 1e-7, rel=1e-9)


def test_slack_follows_the_error_of_the_gradient_element_by_element() -> None:
    slack = ParameterTolerance({"w": torch.zeros(4)})
    slack.add_gradients({"w": torch.tensor([1.0, 1.0 + 1e-3, 1e-17, 0.0])}, {"w": torch.tensor([1.0, 1.0, 0.0, 0.0])})
    slack.add_gradients({"w": torch.ones(4)}, {"w": torch.ones(4)})
    granted = slack.compute_tolerances({"w": torch.tensor([0.0, 0.5, 0.0, 0.0])}, {})["w"]
    torch.testing.assert_close(granted, torch.tensor([0.0, 4e-3, 2.0, 0.0]).double() * 0.5, rtol=1e-3, atol=0.0)
