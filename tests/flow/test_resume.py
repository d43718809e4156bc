"""A run folder belongs to one job: another job gets another folder, and a changed setting is refused or applied, never ignored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import TensorDataset

from echelon.engine.run import Run
from echelon.errors import JobError
from echelon.flow.job_source import JobSource
from echelon.flow.train import train
from echelon.flow.train_result import TrainResult
from echelon.observer import read_events
from echelon.plan.plan import Plan
from echelon.world import World
from tests.flow.jobs import STEPS, make, samples

quick: Callable[..., TrainResult] = partial(train, plan="dp=1", quiet=True, verify=False)


def rated(rate: float, **settings: Any) -> Callable[[Any], Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, **settings)


def warnings_of(folder: Path) -> list[str]:
    return [event.data["message"] for event in read_events(folder) if event.kind == "warning"]


def rates_of(folder: Path) -> list[float]:
    return [event.data["rate"] for event in read_events(folder) if event.kind == "step"]


SCRIPT = """
import argparse
import echelon, torch
from tests.flow.jobs import make

arguments = argparse.ArgumentParser()
arguments.add_argument("--lr", type=float)
arguments.add_argument("--epochs", type=int, default=1)
given = arguments.parse_args()

if __name__ == "__main__":
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=given.lr)
    trained = echelon.train(make(optimizer=optimizer, epochs=given.epochs), "dp=1", quiet=True, verify=False)
    print(trained.folder, trained.steps, trained.loss)
"""


@pytest.mark.slow
def test_a_script_with_other_arguments_has_another_run_folder(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    def launch(*arguments: str) -> tuple[str, int, float]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
        command = [sys.executable, "script.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        folder, step, loss = done.stdout.split()[-3:]
        return folder, int(step), float(loss)

    slow, fast = launch("--lr", "0.001"), launch("--lr", "0.05")
    assert (slow[:2], fast[:2]) == (("runs/small", STEPS), ("runs/small-2", STEPS))
    assert slow[2] != fast[2]
    assert any("argument --lr: 0.001 then, 0.05 now" in line for line in warnings_of(tmp_path / "runs/small-2"))
    assert launch("--lr", "0.05", "--epochs", "1") in (fast, ("runs/small-3", *fast[1:]))
    assert launch("--lr", "0.001") == slow  # finished


def test_more_epochs_by_an_argument_are_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given: list[str] = []
    monkeypatch.setattr(JobSource, "arguments", lambda self: tuple(given))

    def launch(rate: str, epochs: int) -> TrainResult:
        given[:] = ["--lr", rate, "--epochs", str(epochs)]
        return quick(make(optimizer=rated(float(rate)), epochs=epochs))

    assert launch("0.01", 1).folder.name == "small"
    longer = launch("0.01", 2)
    assert (longer.folder.name, longer.steps) == ("small", 2 * STEPS)
    assert launch("0.02", 2).folder.name == "small-2"
    assert launch("0.01", 2).folder.name == "small"


def test_a_variable_that_was_read_decides_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "by_variable.py").write_text(
        "import os\nfrom tests.flow.jobs import make\nfrom tests.flow.test_resume import rated\n"
        "def job():\n    return make(name=None, epochs=1, optimizer=rated(float(os.environ['RATE_OF_TEST'])))\n"
    )
    monkeypatch.setenv("RATE_OF_TEST", "0.01")
    first = quick("by_variable.py")
    monkeypatch.setenv("RATE_OF_TEST", "0.05")
    second = quick("by_variable.py")
    assert (first.folder.name, second.folder.name) == ("by_variable", "by_variable-2")
    assert first.loss != second.loss
    monkeypatch.setenv("RATE_OF_TEST", "0.01")
    assert quick("by_variable.py").folder == first.folder


def test_a_variable_that_the_loss_reads_decides_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "when_called.py").write_text(
        "import os\nfrom tests.flow.jobs import make\n"
        "def loss(output, batch):\n    return (output - batch[-1]).square().mean() * float(os.environ.get('SCALE_OF_TEST', 1))\n"
        "def job():\n    return make(name=None, epochs=1, loss=loss)\n"
    )
    first = quick("when_called.py")
    monkeypatch.setenv("SCALE_OF_TEST", "2")
    second = quick("when_called.py")
    assert (first.folder.name, second.folder.name) == ("when_called", "when_called-2")
    assert second.loss != first.loss
    with pytest.raises(JobError, match=r"inputs: environment SCALE_OF_TEST: .* then, 2 now\n.*--override inputs"):
        quick("when_called.py", out=first.folder)
    monkeypatch.delenv("SCALE_OF_TEST")
    assert quick("when_called.py").folder == first.folder


def test_a_changed_rate_is_refused_and_applied_where_it_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    quick(make(optimizer=rated(0.01), epochs=1), out=folder)
    with pytest.raises(JobError, match=r"optimizer\.lr: 0\.01 then, 0\.04 now\n.*--override optimizer\.lr.*--fresh"):
        quick(make(optimizer=rated(0.04), epochs=2), out=folder)
    with pytest.raises(JobError, match=r"no such setting; did you mean optimizer\.lr"):
        quick(make(optimizer=rated(0.04), epochs=2), out=folder, override=["optimiser.lr"])
    quick(make(optimizer=rated(0.04), epochs=2), out=folder, override=["optimizer.lr"])
    assert rates_of(folder) == [0.01] * STEPS + [0.04] * STEPS
    assert any(
        f"override: optimizer.lr is 0.04 from step {STEPS} on, 0.01 before" in line for line in warnings_of(folder)
    )
    # Once applied it stays, also where the checkpoint is older than the change.
    quick(make(optimizer=rated(0.04), epochs=3), out=folder)
    assert rates_of(folder)[2 * STEPS :] == [0.04] * STEPS


def test_a_finished_run_never_returns_another_jobs_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(JobSource, "arguments", lambda self: ("--alpha", "1"))
    first = quick(make(), out=folder)
    assert quick(make(), out=folder).loss == first.loss
    with pytest.raises(JobError, match=r"optimizer\.lr: 0\.05 then, 0\.01 now"):
        quick(make(optimizer=rated(0.01)), out=folder)
    with pytest.raises(JobError, match=r"loss: \w+ then"):
        quick(make(loss=lambda output, batch: (output - batch[-1]).abs().mean()), out=folder)
    with pytest.raises(JobError, match=r"data: \w+ then"):
        quick(make(data=samples(opposite=True)), out=folder)
    monkeypatch.setattr(JobSource, "arguments", lambda self: ("--alpha", "2"))
    with pytest.raises(JobError, match=r"inputs: argument --alpha: 1 then, 2 now\n.*--override inputs"):
        quick(make(), out=folder)
    assert quick(make(), out=folder, override=["inputs"]).loss == first.loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("clip_norm", {"clip_norm": 0.5}),
        ("precision", {"precision": "bf16"}),
        ("optimizer.momentum", {"optimizer": rated(0.05, momentum=0.5)}),
        ("model", {"model": lambda: nn.Linear(8, 1).requires_grad_()}),
        ("collate", {"collate": lambda samples: torch.utils.data.default_collate(samples)}),
    ],
)
def test_every_setting_is_compared(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    quick(make(epochs=1), out=folder)
    with pytest.raises(JobError, match=rf"{name}: .* then, .* now"):
        quick(make(epochs=2, **fields), out=folder)
    assert quick(make(epochs=2, **fields), out=folder, override=[name]).steps == 2 * STEPS


def test_another_kind_of_optimizer_is_another_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    quick(make(epochs=1), out=folder)
    adam = make(epochs=2, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05))
    with pytest.raises(JobError, match="optimizer: SGD then, Adam now") as caught:
        quick(adam, out=folder, override=["optimizer"])
    assert "optimizer cannot change within a run" in str(caught.value)


def onecycle(optimizer: Optimizer, total: int) -> Any:
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=total)


def cosine(optimizer: Optimizer, total: int) -> Any:
    return CosineAnnealingLR(optimizer, T_max=total)


@pytest.mark.parametrize("schedule", [onecycle, cosine])
def test_schedules_are_rebuilt_for_a_new_length(tmp_path: Path, schedule: Any) -> None:
    """A run that finished goes on along the curve of the new length: no step too many, no rate that climbs again."""
    folder = tmp_path / "run"
    quick(make(epochs=1, lr_schedule=schedule), out=folder)
    quick(make(epochs=3, lr_schedule=schedule), out=folder)
    with Run(make(epochs=3, lr_schedule=schedule), Plan(), World()) as whole:
        wanted = [whole.step(batch).learning_rates[0] for batch in whole.batches()]
    assert rates_of(folder)[STEPS:] == pytest.approx(wanted[STEPS:])
    assert any(f"rebuilt for {3 * STEPS} steps ({STEPS} before)" in line for line in warnings_of(folder))


def test_an_overridden_rate_moves_the_whole_schedule(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    quick(make(epochs=2, lr_schedule=cosine), out=folder, every=2)
    for path in sorted((folder / "checkpoints").glob("step-*"))[-2:]:
        (path / "checkpoint.json").unlink()  # as if it had been killed at step 4
    quick(make(epochs=2, lr_schedule=cosine, optimizer=rated(0.5)), out=folder, override=["optimizer.lr"])
    with Run(make(epochs=2, lr_schedule=cosine, optimizer=rated(0.5)), Plan(), World()) as whole:
        wanted = [whole.step(batch).learning_rates[0] for batch in whole.batches()]
    assert rates_of(folder)[-STEPS:] == pytest.approx(wanted[STEPS:])


def test_groups_that_differ_have_names_of_their_own(tmp_path: Path) -> None:
    def grouped(bias: float) -> Callable[[Any], Optimizer]:
        def made(parameters: Any) -> Optimizer:
            weight, rest = list(parameters)
            return torch.optim.SGD([{"params": [weight], "lr": 0.01}, {"params": [rest], "lr": bias}])

        return made

    folder = tmp_path / "run"
    quick(make(epochs=1, optimizer=grouped(0.02)), out=folder)
    settings = json.loads((folder / "job.json").read_text())["settings"]
    assert sorted(settings[f"optimizer.lr[{place}]"] for place in (0, 1)) == [0.01, 0.02]
    with pytest.raises(JobError, match=r"optimizer\.lr\[0\]: 0\.02 then, 0\.04 now"):
        quick(make(epochs=2, optimizer=grouped(0.04)), out=folder)
    quick(make(epochs=2, optimizer=grouped(0.04)), out=folder, override=["optimizer.lr"])
    with Run(make(epochs=2, optimizer=grouped(0.02)), Plan(), World()) as run:
        run.load(sorted((folder / "checkpoints").glob("step-*"))[-1])
        assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.01, 0.04]


def test_data_of_another_content_is_another_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    quick(make(epochs=1), out=folder)
    values = torch.zeros(8 * STEPS, 8)
    with pytest.raises(JobError, match="--override data"):
        quick(make(epochs=2, data=TensorDataset(values, values[:, :1])), out=folder)


class _Config:
    """A config as transformers has it: building the model writes into it."""

    def __init__(self) -> None:
        self.width, self.built = 8, 0


def _configured() -> Any:
    config = _Config()

    def model() -> nn.Module:
        config.built += 1
        return nn.Linear(config.width, 1)

    return model


def test_a_config_that_building_the_model_changes_is_no_change_of_the_job() -> None:
    before, after = JobSource(make(model=_configured())), JobSource(make(model=_configured()))
    model: Any = after.job.model
    model()
    assert after.identity.digest == before.identity.digest
