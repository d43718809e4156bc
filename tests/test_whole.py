"""Samples of long tables change with the commit and can be drawn again; tiers part the tests."""

from __future__ import annotations

import pytest

from tests.conftest import SLICE, in_tier, pytest_report_header
from tests.sampling import SEED, WHOLE, drawing, one_of_each, pairs, seed_of

CELLS = range(945)


def test_every_cell_has_its_turn_and_a_seed_repeats_its_own() -> None:
    def drawn(seed: str) -> list[int]:
        return drawing("axes", seed).sample(CELLS, 3)

    assert drawn("1f2e") == drawn("1f2e")
    assert len({cell for number in range(5000) for cell in drawn(f"{number:x}")}) == len(CELLS)


def test_the_seed_is_the_commits_unless_one_is_asked_for_and_is_told() -> None:
    assert seed_of({"ECHELON_SEED": "1f2e"}) == "1f2e"
    assert set(seed_of({})) <= set("0123456789abcdef")
    assert f"ECHELON_SEED={SEED} draws these again" in pytest_report_header()


def test_each_draw_has_every_kind_and_every_row_its_turn() -> None:
    rows = ["tp a", "tp b", "pp a", "pp b", "pp c"]
    draws = [one_of_each("rows", rows, lambda row: row[:2], f"{number:x}") for number in range(100)]
    assert all({row[:2] for row in drawn} == {"tp", "pp"} for drawn in draws)
    assert all(len(drawn) == (5 if WHOLE else 2) for drawn in draws)
    assert {row for drawn in draws for row in drawn} == set(rows)


def test_each_draw_of_pairs_has_every_row_and_column_and_every_pair_its_turn() -> None:
    rows, columns = ["1", "2", "3", "4"], ["a", "b", "c"]
    draws = [pairs(rows, columns, each=1, table="pairs", seed=f"{number:x}") for number in range(100)]
    assert all({row for row, _ in drawn} == set(rows) for drawn in draws)
    assert all({column for _, column in drawn} == set(columns) for drawn in draws)
    assert len({pair for drawn in draws for pair in drawn}) == len(rows) * len(columns)


class Item:
    """A collected test, as far as tiers look at it."""

    def __init__(self, number: int, *marks: str) -> None:
        self.nodeid, self.marks = f"tests/test_it.py::test_{number}", marks

    def iter_markers(self) -> list[pytest.Mark]:
        return [getattr(pytest.mark, name).mark for name in self.marks]


def test_every_test_is_quick_or_may_be_drawn() -> None:
    quick = [Item(number, *marks) for number in range(20) for marks in ((), ("journey",), ("slow", "journey"))]
    others = [Item(number, "slow" if number % 2 else "extra") for number in range(1000)]
    assert all(in_tier(item, "quick") and in_tier(item, "all") and not in_tier(item, "slice") for item in quick)
    assert not any(in_tier(item, "quick") for item in others)
    assert all(in_tier(item, "all") for item in others)
    assert 0.8 * SLICE < sum(in_tier(item, "slice") for item in others) / len(others) < 1.2 * SLICE
