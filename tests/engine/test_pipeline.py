"""What stages could get wrong without a word: random numbers between units, statistics, norms, evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from echelon.engine.parallel.placeholder_tensor import make_placeholder
from echelon.engine.run import Run
from echelon.errors import PlanError
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankError, RankPool
from echelon.world import World
from tests.engine.jobs import DATA, JOBS, trained

BOUND = 1e-9


def close(one: dict[str, Any], many: dict[str, Any]) -> None:
    assert many["losses"] == pytest.approx(one["losses"], rel=BOUND)
    for kind in ("parameters", "buffers"):
        for name, value in one[kind].items():
            torch.testing.assert_close(many[kind][name], value, rtol=BOUND, atol=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["pp=2 micro=8", "pp=3 micro=4", "dp=2 pp=2 micro=4"])
def test_what_several_stages_draw_is_one(ranks: RankPool, plan: str) -> None:
    for found in ranks.run(from_text(plan).ranks, "tests.engine.jobs:trained", "noise", plan):
        assert max(found["losses"]) < 1e-20


@pytest.mark.parametrize("plan", ["pp=2 micro=4", "pp=2 micro=4 schedule=interleaved"])
def test_a_generator_of_the_model_draws_the_same_on_every_stage(ranks: RankPool, plan: str) -> None:
    for found in ranks.run(2, "tests.engine.jobs:trained", "own noise", plan):
        assert max(found["losses"]) < 1e-20


@pytest.mark.slow
def test_units_draw_the_same_wherever_they_lie(ranks: RankPool) -> None:
    two = ranks.run(2, "tests.engine.jobs:trained", "dropping", "pp=2 micro=4")[0]
    four = ranks.run(4, "tests.engine.jobs:trained", "dropping", "pp=4 micro=4")[0]
    close(two, four)


def test_a_stage_that_holds_only_what_all_hold_clips_with_the_others(ranks: RankPool) -> None:
    """The head of a tied model alone on its stage: it has nothing that others have not."""
    one = trained(World(), "bare head", "dp=1")
    close(one, ranks.run(2, "tests.engine.jobs:trained", "bare head", "pp=2 micro=4", timeout=60)[0])


def test_a_stage_without_gradients_clips_with_the_others(ranks: RankPool) -> None:
    """In float64, which a stage that has nothing to tell by cannot know."""
    one = trained(World(), "frozen below", "dp=1")
    close(one, ranks.run(2, "tests.engine.jobs:trained", "frozen below", "pp=2 micro=4", timeout=60)[0])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["pp=4 micro=2", "dp=2 pp=3 zero=1 micro=2"])
def test_one_stage_shares_weights_with_each_other_one(ranks: RankPool, plan: str) -> None:
    one = trained(World(), "read last", "dp=1")
    close(one, ranks.run(from_text(plan).ranks, "tests.engine.jobs:trained", "read last", plan, timeout=120)[0])


def test_a_stage_that_thaws_is_named(ranks: RankPool) -> None:
    """torch's own words are that a stage's backward failed."""
    with pytest.raises(RankError, match=r"step 2: layers.0.weight requires a gradient from now on"):
        ranks.run(2, "tests.engine.jobs:trained", "thawing below", "pp=2 micro=8", timeout=60)


@pytest.mark.slow
def test_zero_under_tensor_and_pipeline_axes_is_one_device(ranks: RankPool) -> None:
    plan = "dp=2 tp=2 pp=2 zero=1 micro=2"
    one, many = trained(World(), "tied", "dp=1"), ranks.run(8, "tests.engine.jobs:trained", "tied", plan, timeout=240)
    close(one, many[0])
    whole = sum(value.numel() * 8 for value in one["parameters"].values())
    assert max(rank["held"]["parameters"] for rank in many) < 0.5 * whole


def test_a_module_with_statistics_stays_on_one_stage_though_it_is_called_twice(ranks: RankPool) -> None:
    plan = complete(from_text("pp=2"), JOBS["twice"]())
    assert plan.pipeline.stages >= (4,)  # layer and norm, twice
    close(trained(World(), "twice", "dp=1"), ranks.run(2, "tests.engine.jobs:trained", "twice", "pp=2")[0])


def test_stages_that_part_the_calls_of_statistics_are_refused(ranks: RankPool) -> None:
    messages = ranks.run(2, "tests.engine.jobs:failure_of_stages", "twice", (2,))
    assert all("keeps statistics of its calls and is called on stages 0 and 1" in message for message in messages)


@pytest.mark.parametrize("name", ["counting", "watched"])
def test_a_buffer_that_changes_between_modules_or_is_read_there_keeps_a_model_whole(name: str) -> None:
    words = "changes a buffer between modules, or reads one there that a module changes; use dp=2 zero=3"
    with pytest.raises(PlanError, match=words):
        complete(from_text("pp=2"), JOBS[name]())


def test_what_is_read_turned_is_there_on_every_stage_that_reads_it(ranks: RankPool) -> None:
    close(trained(World(), "turned", "dp=1"), ranks.run(2, "tests.engine.jobs:trained", "turned", "pp=2 micro=4")[0])


def test_nobody_computes_with_what_another_stage_holds() -> None:
    """torch itself returns memory that nobody wrote."""
    weight, table = (
        make_placeholder(nn.Parameter(torch.ones(3, 3), requires_grad=False)),
        make_placeholder(torch.ones(3, 3)),
    )
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert not isinstance(table, nn.Parameter)
    for value in (weight, table):
        assert value.is_meta
        assert value.shape == (3, 3)
        assert len(value) == 3
        assert torch.empty_like(value, device="cpu").shape == (3, 3)
        for compute in (
            lambda v=value: torch.ones(2, 3) @ v.T,
            lambda v=value: F.linear(torch.ones(2, 3), v),
            lambda v=value: v + torch.ones(3),
        ):
            with pytest.raises(PlanError, match="another stage holds"):
                compute()


def test_a_model_that_evaluates_in_another_way_is_refused_before_it_trains(ranks: RankPool) -> None:
    messages = ranks.run(2, "tests.engine.jobs:failure_of_evaluation", "auxiliary", "pp=2")
    assert all("calls 3 units in training and 2 in evaluation" in message for message in messages)
    job = replace(JOBS["auxiliary"](), eval_data=DATA)
    Run(job, from_text("dp=1"), World()).close()
