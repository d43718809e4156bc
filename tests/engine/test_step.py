"""A step under any plan of the data axis is the step of one process, whatever the job does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.testing.ranks import Pool
from echelon.world import World
from tests.engine.jobs import trained

BOUND = 1e-9


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    scale = max(value.abs().max().item() for value in left.values())
    return max((left[name] - right[name]).abs().max().item() for name in left) / scale


@pytest.fixture(scope="module")
def alone() -> Any:
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def get(name: str, plan: str = "dp=1") -> dict[str, Any]:
        if (name, plan) not in known:
            known[name, plan] = trained(World(), name, plan)
        return known[name, plan]

    return get


PLANS = [
    "dp=2",
    "dp=2 zero=1 micro=2",
    "dp=2 zero=2 micro=3",
    "dp=4 zero=3",
    "dp=4 zero=3 micro=2 keep",
    "dp=3 micro=2",
]
JOBS = ["clip", "tokens", "tied", "lonely", "lora", "two", "groups", "schedule", "stream"]


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_job_trains_as_on_one_device(ranks: Pool, alone: Any, name: str, plan: str) -> None:
    one, many = alone(name), ranks.run(int(plan[3]), "tests.engine.jobs:trained", name, plan)
    assert many[0]["losses"] == pytest.approx(one["losses"], rel=BOUND)
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND
    assert many[0]["rates"] == one["rates"]
    # Every rank reports the one true value.
    assert all(rank["losses"] == many[0]["losses"] for rank in many)


@pytest.mark.parametrize("name", ["norm", "average"])
@pytest.mark.parametrize("plan", ["dp=2 micro=4", "dp=4 zero=3 micro=4", "dp=2 zero=1 micro=4"])
def test_batch_norm_statistics_are_those_of_one_device(ranks: Pool, alone: Any, name: str, plan: str) -> None:
    one, many = alone(name, "dp=1 micro=4"), ranks.run(int(plan[3]), "tests.engine.jobs:trained", name, plan)
    assert difference(one["buffers"], many[0]["buffers"]) < BOUND
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND


def test_synchronised_batch_norm_is_that_of_the_whole_batch(ranks: Pool, alone: Any) -> None:
    one, many = alone("norm"), ranks.run(4, "tests.engine.jobs:trained", "norm", "dp=4 batchnorm=sync")
    assert difference(one["buffers"], many[0]["buffers"]) < BOUND
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND


def test_a_parameter_that_nobody_uses_is_left_alone(ranks: Pool) -> None:
    found = ranks.run(2, "tests.engine.jobs:trained", "lonely", "dp=2")[0]
    assert not any("never" in name for name in found["optimizer"])
    assert any("left" in name for name in found["optimizer"])


def test_dropout_differs_between_ranks_and_repeats(ranks: Pool) -> None:
    first, second = (ranks.run(2, "tests.engine.jobs:trained", "dropout", "dp=2")[0]["losses"] for _ in range(2))
    assert first == second
    assert first != trained(World(), "dropout", "dp=1")["losses"]


def test_zero_3_holds_a_quarter(ranks: Pool, alone: Any) -> None:
    whole = sum(alone("mlp")["held"].values())
    parts = [sum(rank["held"].values()) for rank in ranks.run(4, "tests.engine.jobs:trained", "mlp", "dp=4 zero=3")]
    assert max(parts) < whole / 4 * 1.05


FAILURES = {
    "models differ": "model= returns different models per rank: 0.weight is (12, 8) on rank 0 and (13, 8) on rank 1",
    "data differ": "data= has 53 samples on rank 0 and 52 on rank 1",
    "stream ends": "the stream ended early on rank 0",
    "factory fails": "ZeroDivisionError",
    "nan": "the loss is nan at step 0",
    "few": "has 1 of 17 samples left for 2 data ranks",
    "fewer than ranks": "1 samples cannot feed 2 data ranks",
    "not scalar": "loss= gave a tensor of shape (8,), not a scalar",
    "detached": "the loss does not depend on any trainable parameter",
    "no items": "the loss counted no item in the whole batch",
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_cannot_train_is_told_on_every_rank(ranks: Pool, name: str) -> None:
    messages = ranks.run(2, "tests.engine.jobs:failure", name)
    assert all(FAILURES[name] in message for message in messages), messages
