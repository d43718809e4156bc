"""Data ranks with unequal shares of the batch train as one device does, whatever the job does with its samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import trained
from tests.engine.test_step import BOUND, difference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("tokens", "dp=2 shares=3:1"),  # (sum, count), and samples of unequal numbers of tokens
        ("clip", "dp=2 zero=3 shares=1:4 micro=4"),  # clipped by the norm over all ranks; the last batch has 5 samples
        ("stream", "dp=2 zero=1 shares=3:1"),  # its epochs end with 6
    ],
)
def test_unequal_shares_train_as_one_device(ranks: RankPool, name: str, plan: str) -> None:
    one, many = trained(World(), name, "dp=1"), ranks.run(2, "tests.engine.jobs:trained", name, plan)
    assert many[0]["losses"] == pytest.approx(one["losses"], rel=BOUND)
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND
    assert many[1]["losses"] == many[0]["losses"]


def test_a_run_goes_on_with_other_shares(ranks: RankPool, tmp_path: Path) -> None:
    folder, steps = str(tmp_path / "here"), 2
    unbroken = ranks.run(2, "tests.engine.jobs:trained", "clip", "dp=2 zero=3 shares=3:1", double=False)[0]
    before = ranks.run(2, "tests.engine.jobs:saved", "clip", "dp=2 zero=3 shares=3:1", folder, steps)[0]
    same = ranks.run(2, "tests.engine.jobs:resumed", "clip", "dp=2 zero=3 shares=3:1", folder)[0]
    other = ranks.run(2, "tests.engine.jobs:resumed", "clip", "dp=2 shares=1:3", folder)[0]
    assert before + same["losses"] == unbroken["losses"]
    assert all(torch.equal(value, same["last"].parameters[name]) for name, value in unbroken["parameters"].items())
    # Other shares add up in another order: the same run but for the last digits.
    assert other["begin"] == steps
    assert before + other["losses"] == pytest.approx(unbroken["losses"], rel=1e-4)
