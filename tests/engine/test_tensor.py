"""What is cut over the tensor axis computes what one device computes, in float64, and keeps a part only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.planner.tp_selection import inseparable_modules, replicate_modules
from echelon.profiler import profile
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import JOBS, losses_of
from tests.engine.tp_models import CASES, Compared, compare, load, save, strange
from tests.zoo.prove import completed


@pytest.fixture(scope="module", params=[2, 3])
def compared(ranks: RankPool, request: pytest.FixtureRequest) -> list[dict[str, Compared]]:
    """By rank, every case."""
    return ranks.run(request.param, compare, list(CASES), timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_device(compared: list[dict[str, Compared]], name: str) -> None:
    found = [each[name] for each in compared]
    for each in found:
        assert all(difference < 1e-11 for difference in each.worst.values()), each
        assert CASES[name].cuts.items() <= each.cuts.items()
        assert each.share < 0.9
    assert sum(each.share for each in found) > 0.999


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("logits")])
def test_logits_are_put_together_only_where_they_must_be(compared: list[dict[str, Compared]], name: str) -> None:
    whole = {"logits with weights", "logits in part", "logits turned", "logits scaled", "logits kept"}
    assert [each[name].gathers for each in compared] == [int(name in whole)] * len(compared)


@pytest.mark.slow
def test_whatever_the_planner_leaves_whole_trains_as_one_device(ranks: RankPool) -> None:
    """A tied table and its logits, heads, the feed-forward part: each of them whole, the others cut."""
    job = JOBS["tied"]()
    plan, known = complete(from_text("tp=2"), job), profile(job, device="cpu")
    together = inseparable_modules(plan, known)
    assert {"tokens", "head"} <= next(group for group in together if "head" in group)
    assert len(together) > 1
    one = losses_of(World(), "tied", [Plan().to_json()])[0]
    for found in ranks.run(2, losses_of, "tied", [replicate_modules(plan, group).to_json() for group in together]):
        for losses in found:
            assert losses == pytest.approx(one, rel=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "tagger", "dlrm"])
def test_what_was_saved_in_parts_is_loaded_whole_and_back(ranks: RankPool, name: str, tmp_path: Path) -> None:
    """Pairs with batch norm between, weights that are cut at rest, tables cut by rows."""
    parted, whole = completed(name, "tp=2"), completed(name, "dp=1")
    saved = ranks.run(2, save, name, parted, str(tmp_path / "parted"))[0]
    loaded = ranks.run(1, load, name, whole, str(tmp_path / "parted"))[0]
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(value, loaded[key]) for key, value in saved.items())
    alone = ranks.run(1, save, name, whole, str(tmp_path / "whole"))[0]
    again = ranks.run(2, load, name, parted, str(tmp_path / "whole"))[0]
    assert all(torch.equal(value, again[key]) for key, value in alone.items())


def test_ids_and_targets_out_of_range_are_refused_as_on_one_device(ranks: RankPool) -> None:
    for told in ranks.run(2, strange):
        assert told == {
            "id": "Embedding: index 11 is out of range of 0 to 10",
            "negative id": "Embedding: index -1 is out of range of 0 to 10",
            "bag": "EmbeddingBag: index 11 is out of range of 0 to 10",
            "target": "target of a cross entropy: index 7 is out of range of 0 to 6",
            "negative target": "target of a cross entropy: index -1 is out of range of 0 to 6",
        }


def test_a_cut_model_is_not_copied(ranks: RankPool) -> None:
    """The copy would compute with the weights of the first."""
    assert all(
        "tp: a tensor-parallel model cannot be copied" in each for each in ranks.run(2, "tests.engine.jobs:copied")
    )
