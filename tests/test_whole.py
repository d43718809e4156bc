"""Samples of long tables change with the commit and can be drawn again."""

from __future__ import annotations

from tests.conftest import pytest_report_header
from tests.whole import SEED, drawing, seed_of

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
