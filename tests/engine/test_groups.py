"""A parameter goes on with its own settings, whatever stage it was on and whatever group it is in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.engine.run import Run
from echelon.errors import ForeignCheckpoint, JobError
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.ranks import Pool
from echelon.world import World
from tests.engine.jobs import JOBS, rates, saved

STEPS = 2


@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    [
        ("layers", "pp=2 micro=2", "pp=2 micro=2"),
        ("uneven layers", "pp=2 micro=2", "dp=1"),
        ("uneven layers", "dp=1", "pp=2 micro=2"),
        ("warmed layers", "pp=2 micro=2", "pp=2 micro=2"),
        ("warmed layers", "dp=1", "dp=1"),
    ],
)
def test_rates_of_layers_go_on_under_any_stages(
    ranks: Pool, tmp_path: Path, name: str, writer: str, reader: str
) -> None:
    def call(plan: str, function: Any, *arguments: Any) -> list[Any]:
        count = from_text(plan).ranks
        if count == 1:
            return [function(World(), name, plan, *arguments)]
        return ranks.run(count, f"tests.engine.jobs:{function.__name__}", name, plan, *arguments)

    folder = str(tmp_path / "here")
    unbroken = rates(World(), name, "dp=1")
    call(writer, saved, folder, STEPS)
    stages = call(reader, rates, folder)
    assert {each for stage in stages for each in stage[0]} == unbroken[0].keys()
    for stage in stages:
        for now, then in zip(stage, unbroken[STEPS:], strict=True):
            assert now == pytest.approx({each: then[each] for each in now}, rel=1e-12)


def test_groups_that_had_different_settings_cannot_become_one(tmp_path: Path) -> None:
    saved(World(), "layers", "dp=1", str(tmp_path / "here"), STEPS)
    job = replace(JOBS["layers"](), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    with pytest.raises(ForeignCheckpoint, match=r"0\.weight and .* are in one group of this job's optimizer"):
        Run(job, Plan(), World()).load(tmp_path / "here")


def test_optimizers_of_other_parameters_are_refused(tmp_path: Path) -> None:
    saved(World(), "two", "dp=1", str(tmp_path / "here"), STEPS)
    job = replace(JOBS["two"](), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    with pytest.raises(ForeignCheckpoint, match="its optimizers cover other parameters"):
        Run(job, Plan(), World()).load(tmp_path / "here")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing for the head", "this stage has no parameter for one of the optimizers (it trains 0.weight, 0.bias, 2.weight, ...): use one"),
        ("other optimizers", "optimizer= gives AdamW on rank 0 and SGD, AdamW on rank 1, whose stage has other parameters"),
    ],
)  # fmt: skip
def test_a_stage_without_parameters_for_an_optimizer_is_told_on_every_rank(ranks: Pool, name: str, words: str) -> None:
    found = ranks.run(2, "tests.engine.jobs:failure", name, "pp=2 micro=2")
    assert all(each.startswith("JobError") and words in each for each in found), found


@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("groups by order", "pp=2 micro=2", "has lr=0.1 under this plan, and lr=0.01 on one device"),
        ("groups by size", "tp=2", "or optimizer= chooses groups by the parameters' sizes"),
    ],
)
def test_groups_that_a_part_of_the_model_would_change_are_refused(
    ranks: Pool, name: str, plan: str, words: str
) -> None:
    assert all(words in each for each in ranks.run(2, "tests.engine.jobs:failure", name, plan))


def test_an_optimizer_without_parameters_is_told() -> None:
    job = replace(JOBS["layers"](), optimizer=lambda named: torch.optim.SGD([v for n, v in named if n == "none"]))
    with pytest.raises(JobError, match=r"one of the optimizers is given no parameter of the model's \(0\.weight"):
        Run(job, Plan(), World())
