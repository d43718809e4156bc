"""Schedules over an interruption and in a longer run: the rates are those of an uninterrupted one, or the run is refused."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from echelon.errors import JobError
from tests.flow.jobs import STEPS, make, samples
from tests.flow.test_job_changes import Decaying, interrupted, quick
from tests.flow.test_resume import rated, rates_of, warnings_of
from tests.sampling import some

SCHEDULES: dict[str, Callable[..., Any]] = {
    "ChainedScheduler": lambda each: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(each, 0.1, 3), lr_scheduler.ExponentialLR(each, 0.9)]
    ),
    "ConstantLR": lambda each: lr_scheduler.ConstantLR(each, 0.1, 6),
    "CosineAnnealingLR": lambda each, total: lr_scheduler.CosineAnnealingLR(each, total),
    "CosineAnnealingWarmRestarts": lambda each: lr_scheduler.CosineAnnealingWarmRestarts(each, 3, 2),
    "CyclicLR": lambda each: lr_scheduler.CyclicLR(each, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "ExponentialLR": lambda each: lr_scheduler.ExponentialLR(each, 0.9),
    "LambdaLR": lambda each, total: lr_scheduler.LambdaLR(each, lambda step: 1 - step / (total + 1)),
    "LinearLR": lambda each: lr_scheduler.LinearLR(each, 0.1, 1.0, 7),
    "MultiStepLR": lambda each: lr_scheduler.MultiStepLR(each, [2, 6], 0.5),
    "MultiplicativeLR": lambda each: lr_scheduler.MultiplicativeLR(each, lambda step: 0.95),
    "OneCycleLR": lambda each, total: lr_scheduler.OneCycleLR(each, 0.1, total),
    "PolynomialLR": lambda each, total: lr_scheduler.PolynomialLR(each, total),
    "ReduceLROnPlateau": lambda each: lr_scheduler.ReduceLROnPlateau(each, patience=0, threshold=0.9),
    "SWALR": lambda each: SWALR(each, swa_lr=0.01, anneal_epochs=7),
    "SequentialLR": lambda each, total: lr_scheduler.SequentialLR(
        each, [lr_scheduler.LinearLR(each, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(each, total - 3)], [3]
    ),
    "StepLR": lambda each: lr_scheduler.StepLR(each, 3, 0.5),
}


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


def test_every_schedule_of_torch_is_here() -> None:
    kinds = [each for each in vars(lr_scheduler).values() if inspect.isclass(each) and issubclass(each, LRScheduler)]
    named = {each.__name__ for each in kinds if not each.__name__.startswith("_")} - {"LRScheduler"}
    assert named <= SCHEDULES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", some("schedules", SCHEDULES, 4))
def test_an_interrupted_run_has_the_rates_of_an_unbroken_one(tmp_path: Path, name: str) -> None:
    job = make(lr_schedule=SCHEDULES[name], optimizer=momentum, eval_data=samples(opposite=True))
    whole = quick(job, out=tmp_path / "whole")
    interrupted(job, tmp_path / "broken", at=STEPS)
    broken = quick(job, out=tmp_path / "broken")
    assert rates_of(tmp_path / "broken") == rates_of(tmp_path / "whole")
    assert broken.loss == whole.loss


@pytest.mark.slow
@pytest.mark.parametrize("name", some("longer schedules", SCHEDULES, 4))
def test_a_longer_run_has_the_rates_of_an_unbroken_one(tmp_path: Path, name: str) -> None:
    fields = {"lr_schedule": SCHEDULES[name], "optimizer": momentum, "eval_data": samples(opposite=True)}
    quick(make(epochs=3, **fields), out=tmp_path / "whole")
    quick(make(epochs=2, **fields), out=tmp_path / "longer")
    quick(make(epochs=3, **fields), out=tmp_path / "longer")
    assert rates_of(tmp_path / "longer")[2 * STEPS :] == pytest.approx(rates_of(tmp_path / "whole")[2 * STEPS :])


class Decay(LRScheduler):
    """Moves the weight decay, not the rate."""

    begun = False

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        for group in self.optimizer.param_groups if self.begun else ():
            group["weight_decay"] *= 1.3
        self.begun = True
        super().step(epoch)


def decayed(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, weight_decay=0.01)


def halving(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 3, 0.5)


def tenth(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 3, 0.1)


def drawn(optimizer: Optimizer) -> Any:
    generator = random.Random(0)
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + generator.random())


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"lr_schedule": Decay, "optimizer": decayed},
        {"lr_schedule": halving, "optimizer": Decaying},
        {"lr_schedule": drawn, "optimizer": rated(0.05)},
    ],
    ids=["weight decay", "own decay", "drawn"],
)
def test_a_longer_run_keeps_what_does_not_follow_from_the_length(tmp_path: Path, fields: dict[str, Any]) -> None:
    whole = quick(make(epochs=3, **fields), out=tmp_path / "whole")
    quick(make(epochs=2, **fields), out=tmp_path / "longer")
    assert quick(make(epochs=3, **fields), out=tmp_path / "longer").loss == whole.loss
    assert rates_of(tmp_path / "longer") == rates_of(tmp_path / "whole")


def test_a_schedule_of_the_length_over_rates_that_the_optimizer_changes_is_refused(tmp_path: Path) -> None:
    fields = {"lr_schedule": SCHEDULES["CosineAnnealingLR"], "optimizer": Decaying}
    interrupted(make(epochs=2, **fields), tmp_path / "run", at=STEPS)
    with pytest.raises(JobError, match=r"cannot be rebuilt for 12 steps \(8 before\): at step 4 it gives lr="):
        quick(make(epochs=3, **fields), out=tmp_path / "run")


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": STEPS}])
def test_a_changed_schedule_is_refused_at_another_length(tmp_path: Path, length: dict[str, int]) -> None:
    folder = tmp_path / "run"
    quick(make(epochs=1, lr_schedule=halving), out=folder)
    changed = make(**{"epochs": None, "lr_schedule": tenth} | length)
    with pytest.raises(JobError, match=r"schedule\.gamma: 0\.5 then, 0\.1 now"):
        quick(changed, out=folder)
    assert quick(make(**{"epochs": None, "lr_schedule": halving} | length), out=folder).steps >= STEPS


def test_a_schedule_that_computes_its_length_itself_goes_on(tmp_path: Path) -> None:
    def cosine(epochs: int) -> Any:
        return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * STEPS)

    quick(make(epochs=3, lr_schedule=cosine(3)), out=tmp_path / "whole")
    quick(make(epochs=2, lr_schedule=cosine(2)), out=tmp_path / "longer")
    with pytest.raises(JobError, match="lr_schedule"):
        quick(make(epochs=3, lr_schedule=tenth), out=tmp_path / "longer")
    assert quick(make(epochs=3, lr_schedule=cosine(3)), out=tmp_path / "longer").steps == 3 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), [(None, halving), (halving, None)])
def test_a_schedule_can_be_added_and_removed(tmp_path: Path, then: Any, now: Any) -> None:
    folder = tmp_path / "run"
    interrupted(make(lr_schedule=then), folder, at=STEPS)
    with pytest.raises(JobError, match="--override lr_schedule"):
        quick(make(lr_schedule=now), out=folder)
    interrupted(make(lr_schedule=now), folder, at=2 * STEPS, override=["lr_schedule"])
    quick(make(lr_schedule=now), out=folder)
    quick(make(lr_schedule=now), out=tmp_path / "whole")
    assert rates_of(folder)[STEPS:] == rates_of(tmp_path / "whole")[STEPS:]


def test_a_schedule_of_a_metric_keeps_its_state(tmp_path: Path) -> None:
    """With an override of the optimizer, and with more epochs."""
    fields = {"lr_schedule": SCHEDULES["ReduceLROnPlateau"], "eval_data": samples(opposite=True)}
    quick(make(epochs=3, **fields), out=tmp_path / "whole")
    interrupted(make(epochs=2, **fields), tmp_path / "run", at=STEPS)
    heavier = rated(0.05, weight_decay=1e-9)
    quick(make(epochs=3, optimizer=heavier, **fields), out=tmp_path / "run", override=["optimizer.weight_decay"])
    assert rates_of(tmp_path / "run") == rates_of(tmp_path / "whole")
    assert len(set(rates_of(tmp_path / "run"))) > 1
    assert any("weight_decay is 1e-09" in line for line in warnings_of(tmp_path / "run"))


def test_rates_that_are_tensors_are_rebuilt_in_place(tmp_path: Path) -> None:
    def adam(parameters: Any) -> Optimizer:
        return torch.optim.Adam(parameters, lr=torch.tensor(0.01))

    fields = {"lr_schedule": SCHEDULES["CosineAnnealingLR"], "optimizer": adam}
    quick(make(epochs=3, **fields), out=tmp_path / "whole")
    quick(make(epochs=2, **fields), out=tmp_path / "longer")
    quick(make(epochs=3, **fields), out=tmp_path / "longer")
    assert rates_of(tmp_path / "longer")[2 * STEPS :] == pytest.approx(rates_of(tmp_path / "whole")[2 * STEPS :])
