"""A step under any plan of the data axis is the step of one process, whatever the job does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.engine.init_model import model_fingerprint
from echelon.engine.run import Run
from echelon.errors import PlanError
from echelon.plan.plan import Plan
from echelon.testing.rank_pool import RankPool
from echelon.world import World, usable_cores
from tests.engine.jobs import JOBS as JOBS_BY_NAME
from tests.engine.jobs import Averages, mlp, trained
from tests.sampling import pairs

BOUND = 1e-9
ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the host has its own threads and hears a step later"
)


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


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "name"), pairs(PLANS, JOBS, each=2))
def test_every_job_trains_as_on_one_device(ranks: RankPool, alone: Any, name: str, plan: str) -> None:
    one, many = alone(name), ranks.run(int(plan[3]), "tests.engine.jobs:trained", name, plan)
    assert many[0]["losses"] == pytest.approx(one["losses"], rel=BOUND)
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND
    assert many[0]["rates"] == one["rates"]
    # Every rank reports the one true value.
    assert all(rank["losses"] == many[0]["losses"] for rank in many)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["norm", "average"])
@pytest.mark.parametrize("plan", ["dp=2 micro=4", "dp=4 zero=3 micro=4", "dp=2 zero=1 micro=4"])
def test_batch_norm_statistics_are_those_of_one_device(ranks: RankPool, alone: Any, name: str, plan: str) -> None:
    one, many = alone(name, "dp=1 micro=4"), ranks.run(int(plan[3]), "tests.engine.jobs:trained", name, plan)
    assert difference(one["buffers"], many[0]["buffers"]) < BOUND
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND


def test_synchronised_batch_norm_is_that_of_the_whole_batch(ranks: RankPool, alone: Any) -> None:
    one, many = alone("norm"), ranks.run(4, "tests.engine.jobs:trained", "norm", "dp=4 batchnorm=sync")
    assert difference(one["buffers"], many[0]["buffers"]) < BOUND
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize("plan", ["dp=2", "dp=3", "dp=4 zero=1", "dp=2 zero=3"])
def test_buffers_of_any_kind_stay_equal_on_all_ranks(ranks: RankPool, plan: str) -> None:
    for found in ranks.run(int(plan[3]), "tests.engine.jobs:apart", "averages", plan):
        # Where the parts of a batch are unlike in length, so is the cache, which has their shape.
        assert all(names <= {"cache"} for names in found), found


@pytest.mark.parametrize("plan", ["dp=2", "dp=3", "dp=2 zero=3"])
def test_a_host_that_must_not_wait_brings_buffers_together_a_step_later(ranks: RankPool, plan: str) -> None:
    for answer in ranks.run(int(plan[3]), "tests.engine.jobs:apart_later", "averages", plan):
        first, second, third, _ = answer["found"]
        assert first <= {"cache"}  # what changes from the start is agreed on at once
        assert "lazy" in second  # is there from the second step on
        assert not third & {"late", "fresh", "lazy"}
        assert answer["last"] <= {"cache"}
        assert "table" not in answer["changing"]


@pytest.mark.parametrize("plan", ["dp=2", "dp=4 zero=3"])
def test_buffers_that_hold_averages_are_those_of_one_device(ranks: RankPool, plan: str) -> None:
    full = 3  # steps whose batch the ranks divide
    one = trained(World(), "averages", "dp=1", steps=full)
    many = ranks.run(int(plan[3]), "tests.engine.jobs:trained", "averages", plan, steps=full)[0]
    chosen = [{name: each["buffers"][name] for name in Averages.LINEAR} for each in (one, many)]
    assert difference(*chosen) < BOUND
    assert all(value.abs().max() > 0 for value in chosen[0].values())


@pytest.mark.parametrize("later", [False, True])
def test_whole_numbers_that_ranks_count_apart_need_no_warning(ranks: RankPool, later: bool) -> None:
    for said, sizes, calls in ranks.run(2, "tests.engine.jobs:counted", later):
        assert not [text for text in said if "share a GPU" not in text]
        assert calls == len(sizes)


def test_a_step_tells_the_learning_rates_it_used() -> None:
    run = Run(JOBS_BY_NAME["schedule"](), Plan(), World())
    for batch in run.batches():
        before = tuple(group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups)
        step = run.step(batch)
        assert step.learning_rates == before != tuple(run.optimizers[0].param_groups[0]["lr"] for _ in before)


def test_a_learning_rate_that_is_a_tensor_is_told_as_it_was() -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=torch.tensor(0.5), foreach=False)

    job = mlp(optimizer=optimizer, lr_schedule=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.5))
    run = Run(job, Plan(), World())
    steps = [run.step(batch) for batch in run.batches(3)]
    assert [step.learning_rates for step in steps] == [(0.5,), (0.25,), (0.125,)]


def test_a_plan_for_another_model_is_refused() -> None:
    known = model_fingerprint(JOBS_BY_NAME["mlp"]().model())
    other = model_fingerprint(JOBS_BY_NAME["lora"]().model())
    for dtype in (None, torch.float64):
        assert Run(mlp(), Plan(model=known), World(), dtype=dtype).precision == "fp32"
        with pytest.raises(PlanError, match=rf"another model.*{other}.*{known}"):
            Run(mlp(), Plan(model=other), World(), dtype=dtype)


def test_the_plan_may_leave_the_precision_to_the_job() -> None:
    plan = replace(Plan(), precision=None)
    assert Run(mlp(precision="bf16"), plan, World()).precision == "bf16"
    assert Run(mlp(precision="bf16"), plan, World(), dtype=torch.float64).precision == "fp32"
    assert Run(mlp(precision="bf16"), replace(plan, precision="tf32"), World()).precision == "tf32"


@ON_CPU
def test_threads_are_the_cores_that_a_rank_has() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(usable_cores() + 1)
        with Run(mlp(), Plan(), World()):
            assert torch.get_num_threads() == usable_cores()
        with Run(mlp(), Plan(threads=usable_cores() + 2), World()):
            assert torch.get_num_threads() == usable_cores() + 2
        assert torch.get_num_threads() == usable_cores() + 1
    finally:
        torch.set_num_threads(before)


def test_a_parameter_that_nobody_uses_is_left_alone(ranks: RankPool) -> None:
    found = ranks.run(2, "tests.engine.jobs:trained", "lonely", "dp=2")[0]
    assert not any("never" in name for name in found["optimizer"])
    assert any("left" in name for name in found["optimizer"])


def test_dropout_differs_between_ranks_and_repeats(ranks: RankPool) -> None:
    first, second = (ranks.run(2, "tests.engine.jobs:trained", "dropout", "dp=2")[0]["losses"] for _ in range(2))
    assert first == second
    assert first != trained(World(), "dropout", "dp=1")["losses"]


def test_zero_3_holds_a_quarter(ranks: RankPool, alone: Any) -> None:
    whole = sum(alone("mlp")["held"].values())
    parts = [sum(rank["held"].values()) for rank in ranks.run(4, "tests.engine.jobs:trained", "mlp", "dp=4 zero=3")]
    assert max(parts) < whole / 4 * 1.05


FAILURES = {
    "models differ": "model= returns different models per rank: 0.weight is (12, 8) on rank 0 and (13, 8) on rank 1",
    "data differ": "data= has 53 samples on rank 0 and 52 on rank 1",
    "stream ends": "the stream ended early on rank 0",
    "factory fails": "ZeroDivisionError",
    "nan": "no checkpoint holds that step; lower the learning rate, clip gradients (clip_norm=1.0), or look at its batch: "
    'next(echelon.parallelize(job, "dp=1").loader.steps(0, 1))',
    "few": "has 1 of 17 samples left for 2 data ranks",
    "fewer than ranks": "1 sample cannot feed 2 data ranks",
    "not scalar": "loss= gave a tensor of shape (8,), not a scalar",
    "detached": "the loss does not depend on any trainable parameter",
    "no items": "the loss counted no item in the whole batch",
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_cannot_train_is_told_on_every_rank(ranks: RankPool, name: str) -> None:
    messages = ranks.run(2, "tests.engine.jobs:failure", name)
    assert all(FAILURES[name] in message for message in messages), messages
