"""On parts of the sequence a model computes what one device computes, in float64, and keeps less for backward."""

from __future__ import annotations

from itertools import product

import pytest

from echelon.plan.certificate import Certificate
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from tests.engine.sequences import CASES, Compared, compare
from tests.sampling import only_whole, some
from tests.zoo.prove import completed, prove_plan


@pytest.fixture(scope="module", params=some("sequence", product((2, 3), CASES), 3), ids=str)
def compared(ranks: RankPool, request: pytest.FixtureRequest) -> list[Compared]:
    ways, name = request.param
    return ranks.run(ways, compare, name, timeout=120)


@pytest.mark.slow
def test_equal_to_one_device_at_every_length(compared: list[Compared]) -> None:
    for each in compared:
        assert each.units == 3
        assert all(difference < 1e-11 for difference in each.worst.values()), each


def test_a_norms_gradient_is_a_part_until_it_is_added_up(compared: list[Compared]) -> None:
    assert all(each.unsummed > 1e-3 for each in compared)


def test_less_is_kept_for_backward(compared: list[Compared]) -> None:
    assert all(each.kept < 0.95 for each in compared)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt-untied", "dp=2 tp=2 zero=1 micro=2 sequence"),
        pytest.param("transformer", "dp=2 tp=2 zero=3 sequence", marks=only_whole),
        ("gpt-tied", "tp=2 micro=3 sequence recompute=block"),
    ],
)
def test_with_zero_accumulation_and_clipping_it_is_one_device(ranks: RankPool, name: str, plan: str) -> None:
    document = completed(name, plan)
    certificate = Certificate.from_json(ranks.run(from_text(plan).ranks, prove_plan, name, document, timeout=150)[0])
    assert certificate.verified, certificate.divergent
