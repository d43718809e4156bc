"""The words for what went wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.verifier.compare import Bounds, Difference, compare
from echelon.verifier.diagnose import Pair, describe, first, place, ratio
from echelon.verifier.noise import Slack

ORDER = {"": 0, "stem": 1, "blocks.0": 2, "blocks.0.up": 3, "blocks.1": 4}
TRUE = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
PLAN = Plan(mesh=Mesh(dp=2), micro=1)  # 8 samples: 4 rounds


def off(kind: str, name: str, step: int = 0) -> Difference:
    return Difference(kind=kind, name=name, step=step, value=0.5)


def test_a_tensor_stands_where_forward_enters_its_module() -> None:
    names = ["stem.weight", "blocks.0.up.bias", "blocks.0.unknown.deep.weight", "token", "blocks.1.x"]
    assert [place(name, ORDER) for name in names] == [1, 3, 2, 0, 4]
    assert place("loss", {}) == 0


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
    found = first(differences, Bounds(), ORDER)
    assert found is not None
    assert found.name == name
    assert first(differences, Bounds(least=0.5), ORDER) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (TRUE * 2, "dp = 2 times the reference: summed over the data ranks"),
        (TRUE / 2, "1/dp = 1/2 of the reference: averaged over the data ranks once too often"),
        (TRUE * 4, "micro-batches = 4 times the reference"),
        (TRUE / 8, "1/dp x micro-batches = 1/8 of the reference"),
        (TRUE * 0, "it is zero"),
        (-TRUE, "the sign is wrong"),
        (TRUE * 1.5, "1.5 times the reference exactly"),
        (TRUE + 1, "by no common factor"),
    ],
)
def test_a_clean_factor_is_named(value: Tensor, words: str) -> None:
    made = compare("gradient", {"w": value}, {"w": TRUE}, step=0)
    text = describe(made[0], made, Bounds(), Pair(plan=value, true=TRUE), PLAN, 8)
    assert text.startswith("gradient of w at step 0: relative difference")
    assert words in text


def test_a_number_is_a_multiple_of_any_other_so_only_known_factors_count() -> None:
    made = compare("norm", {"gradient norm": TRUE[2] * 1.3}, {"gradient norm": TRUE[2]}, step=0)
    text = describe(made[0], made, Bounds(), Pair(plan=TRUE[2] * 1.3, true=TRUE[2]), PLAN, 8)
    assert "times the reference" not in text
    assert "the gradients agree" in text


def test_what_has_no_number_says_why() -> None:
    made = compare("buffer", {}, {"mean": TRUE}, step=3)
    assert describe(made[0], made, Bounds(), None, PLAN, 8) == "buffer of mean at step 3: missing from the plan's run"


def test_no_ratio_where_there_is_none() -> None:
    assert ratio(Pair(plan=TRUE, true=TRUE * 0)) is None
    assert ratio(Pair(plan=TRUE * torch.nan, true=TRUE)) is None
    assert ratio(Pair(plan=TRUE[:2], true=TRUE)) is None
    little = TRUE * (1 + 1e-7 * torch.arange(TRUE.numel(), dtype=TRUE.dtype).view_as(TRUE))
    assert ratio(Pair(plan=little, true=TRUE)) is None
    assert ratio(Pair(plan=TRUE * (1 + 1e-7), true=TRUE)) == pytest.approx(1 + 1e-7, rel=1e-9)


def test_slack_follows_the_error_of_the_gradient_element_by_element() -> None:
    slack = Slack({"w": torch.zeros(4)})
    slack.note({"w": torch.tensor([1.0, 1.0 + 1e-3, 1e-17, 0.0])}, {"w": torch.tensor([1.0, 1.0, 0.0, 0.0])})
    slack.note({"w": torch.ones(4)}, {"w": torch.ones(4)})
    granted = slack.grant({"w": torch.tensor([0.0, 0.5, 0.0, 0.0])})["w"]
    torch.testing.assert_close(granted, torch.tensor([0.0, 4e-3, 2.0, 0.0]).double() * 0.5, rtol=1e-3, atol=0.0)
