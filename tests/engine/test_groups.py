"""A parameter goes on with its own settings, whatever stage it was on and whatever group it is in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.engine.run import Run
from echelon.errors import IncompatibleCheckpointError, JobError
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import JOBS, rates, saved, trained

STEPS = 2


@pytest.mark.slow
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
    ranks: RankPool, tmp_path: Path, name: str, writer: str, reader: str
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
    with pytest.raises(IncompatibleCheckpointError, match=r"0\.weight and .* share a group of this job's optimizer"):
        Run(job, Plan(), World()).load(tmp_path / "here")


def test_optimizers_of_other_parameters_are_refused(tmp_path: Path) -> None:
    saved(World(), "two", "dp=1", str(tmp_path / "here"), STEPS)
    job = replace(JOBS["two"](), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    with pytest.raises(IncompatibleCheckpointError, match="its optimizers train other parameters"):
        Run(job, Plan(), World()).load(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing for the head", "other optimizers", "groups by order"])
def test_stages_make_the_optimizers_of_the_whole_model(ranks: RankPool, name: str) -> None:
    """Though a stage has none of an optimizer's parameters, or others are the first there."""
    alone, found = trained(World(), name, "dp=1"), ranks.run(2, trained, name, "pp=2 micro=2")
    assert all(each["rates"] == alone["rates"] for each in found)
    assert all(torch.allclose(found[0]["parameters"][n], value, 1e-9) for n, value in alone["parameters"].items())


def test_an_optimizer_without_parameters_is_told() -> None:
    job = replace(JOBS["layers"](), optimizer=lambda named: torch.optim.SGD([v for n, v in named if n == "none"]))
    with pytest.raises(JobError, match=r"one of the optimizers is given no parameter of the model's \(0\.weight"):
        Run(job, Plan(), World())


def test_groups_by_size_are_those_of_whole_parameters_under_tp(ranks: RankPool) -> None:
    alone = trained(World(), "groups by size", "dp=1")
    found = ranks.run(2, trained, "groups by size", "tp=2")[0]
    assert found["rates"] == alone["rates"]
    assert all(torch.allclose(found["parameters"][name], value, 1e-9) for name, value in alone["parameters"].items())
