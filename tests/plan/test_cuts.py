"""How a model is cut, told with what repeats folded; stages that are as even as they can be."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.plan.describe import cut_fraction, group_cuts, summarize_stages
from echelon.plan.placement import Placement, ReplicatedModule, TensorSlice
from echelon.plan.profile import ParameterProfile, PipelineUnit
from echelon.plan.stages import balance_stages, find_stages, stage_count, stage_ranges
from echelon.plan.text import from_text
from tests.plan.test_check import PROFILE


def test_repeated_blocks_are_folded() -> None:
    blocks = [
        (
            Placement(
                path=f"blocks.{i}.qkv", cut="column", slices=(TensorSlice("weight", 0, (4, 4, 4)),), source="pair"
            ),
            Placement(path=f"blocks.{i}.out", cut="row", source="pair"),
        )
        for i in range(3)
    ]
    plan = from_text("tp=2").replace(
        placements=(*chain.from_iterable(blocks), Placement(path="head", cut="gather")),
        replicated=(
            *(ReplicatedModule(path=f"blocks.{i}.norm", reason="no rule") for i in range(3)),
            ReplicatedModule(path="", reason="not called"),
        ),
    )
    assert [str(each) for each in group_cuts(plan)] == [
        "blocks.*.qkv x 3: column in 3 parts (pair)",
        "blocks.*.out x 3: row (pair)",
        "head: gather (universal)",
        "blocks.*.norm x 3: whole, no rule",
        "the model itself: whole, not called",
    ]


def test_the_share_that_is_cut_is_told_of_all_cuts_or_of_some() -> None:
    parameters = (
        ParameterProfile(name="up.weight", shape=(6, 4), aliases=("tied.weight",)),
        ParameterProfile(name="head.weight", shape=(2, 4)),
        ParameterProfile(name="norm.weight", shape=(8,)),
    )
    plan = from_text("tp=2").replace(
        placements=(
            Placement(path="tied", cut="column", slices=(TensorSlice("weight", 0),)),
            Placement(path="head", cut="gather", slices=(TensorSlice("weight", 0),)),
        ),
    )
    known = replace(PROFILE, parameters=parameters)
    assert cut_fraction(plan, known) == 0.8
    assert cut_fraction(plan, known, "column", "row") == 0.6
    assert cut_fraction(plan, known, "stored") == 0


def test_stages_are_told_with_their_units_and_their_work() -> None:
    names = ("embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head")
    visits = [PipelineUnit(path=path, cost=1.0) for path in names]
    first, second = summarize_stages(from_text("pp=2").replace(stages=(3,)), visits)
    assert str(first) == "stage 0 on rank 0 of pp (50% of the work): embed, blocks.0-1"
    assert second.units == ("blocks.2", "norm", "head")


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.data())
def test_no_other_division_has_a_lighter_heaviest_stage(weights: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(weights)))

    def heaviest(bounds: tuple[int, ...]) -> float:
        return max(sum(weights[a:b]) for a, b in pairwise((0, *bounds, len(weights))))

    found = balance_stages(weights, count)
    assert found is not None
    assert len(found) == count - 1
    assert all(a < b for a, b in pairwise((0, *found, len(weights))))
    best = min(heaviest(each) for each in combinations(range(1, len(weights)), count - 1))
    assert heaviest(found) == pytest.approx(best)


def test_every_visit_is_in_one_stage() -> None:
    plan = from_text("pp=2 schedule=interleaved").replace(stages=(1, 2, 5))
    assert [place for places in stage_ranges(plan, 7) for place in places] == list(range(7))
    assert stage_count(plan) == 4
    assert stage_count(from_text("pp=3")) == 3
    assert stage_count(from_text("pp=3 schedule=zero-bubble")) == 6


def test_no_stage_begins_within_a_pair() -> None:
    visits = [PipelineUnit(path=path, cost=1.0) for path in ("up", "act", "down", "head")]
    columns = (Placement(path="up", cut="column"), Placement(path="down", cut="row"))
    plan = from_text("tp=2 pp=2")
    assert find_stages(plan, visits) == (2,)
    assert find_stages(plan.replace(placements=columns), visits) == (3,)
    assert find_stages(plan.replace(placements=columns), visits[:3]) is None


def test_no_stage_begins_within_a_pair_whose_modules_lie_inside_units() -> None:
    """Blocks of one layer each: a block is called as a whole, its layer is cut."""
    visits = [PipelineUnit(path=f"layers.{i}", cost=1.0) for i in range(4)]
    cuts = ("column", "row", "column", "row")
    placements = [Placement(path=f"layers.{i}.linear", cut=cut) for i, cut in enumerate(cuts)]  # type: ignore[arg-type]
    plan = from_text("tp=2 pp=2").replace(placements=tuple(placements))
    heavy = [replace(visits[0], cost=3.0), *visits[1:]]
    assert find_stages(plan.replace(placements=()), heavy) == (1,)
    assert find_stages(plan, heavy) == (2,)
