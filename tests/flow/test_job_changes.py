"""A run folder and its checkpoints belong to one job: whatever field of it changes is noticed, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, TensorDataset, default_collate

import echelon
from echelon.errors import IncompatibleCheckpointError, JobError
from echelon.events import Event
from echelon.flow import job_identity
from echelon.flow.job_code import digest_value
from echelon.flow.job_source import JobSource
from echelon.flow.train import train
from echelon.flow.train_result import TrainResult
from tests.flow.jobs import STEPS, make, samples
from tests.flow.test_resume import rated, rates_of, warnings_of

quick: Callable[..., TrainResult] = partial(train, plan="dp=1", quiet=True, verify=False)


class Interruption(Exception):  # noqa: N818 (no error)
    pass


def interrupted(job: echelon.Job, folder: Path, *, at: int, **settings: Any) -> None:
    """Train up to the checkpoint of step `at`."""

    def stop(event: Event) -> None:
        if event.kind == "checkpoint" and event.step == at:
            raise Interruption

    with pytest.raises(Interruption):
        quick(job, out=folder, listeners=[stop], **settings)


def linear(seed: int) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(8, 1)


class Decaying(SGD):
    """Changes its own rate."""

    scale = 1.0

    def __init__(self, parameters: Any, rate: float = 0.05, factor: float = 0.9) -> None:
        super().__init__(parameters, lr=rate)
        self.factor = factor

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= self.factor * self.scale
        return done


def scaled(scale: float) -> type[Optimizer]:
    """Optimizers whose classes differ in an attribute, not in their names."""

    class Scaled(Decaying):
        pass

    Scaled.scale = scale
    return Scaled


def hooked(limit: float) -> Callable[[Any], Optimizer]:
    def clamp(optimizer: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for value in (value for group in optimizer.param_groups for value in group["params"]):
                value.clamp_(-limit, limit)

    def made(parameters: Any) -> Optimizer:
        optimizer = SGD(parameters, lr=0.05)
        optimizer.register_step_post_hook(clamp)
        return optimizer

    return made


class Slotted(Dataset[Any]):
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, place: int) -> Any:
        values, target = samples()[place]
        return values * self.scale, target


class Weighed(nn.Module):
    """A loss with a buffer."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([weight]))

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(output, batch[-1]) * self.weight.mean()


def saved(folder: Path, seed: int) -> str:
    path = folder / f"{seed}.pt"
    torch.save(linear(seed).state_dict(), path)
    return str(path)


CHANGES: dict[str, tuple[str, Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]]] = {
    "weights": ("weights", lambda at: ({"weights": saved(at, 1)}, {"weights": saved(at, 2)})),
    "an instance": (r"model\.values", lambda at: ({"model": linear(1)}, {"model": linear(2)})),
    "an attribute of the optimizer": (
        r"optimizer\.factor",
        lambda at: ({"optimizer": Decaying}, {"optimizer": lambda each: Decaying(each, factor=0.5)}),
    ),
    "a class of the optimizer": (
        r"optimizer\.code",
        lambda at: ({"optimizer": scaled(1.0)}, {"optimizer": scaled(0.5)}),
    ),
    "a hook": (r"optimizer\.code", lambda at: ({"optimizer": hooked(1.0)}, {"optimizer": hooked(0.01)})),
    "slots": ("data", lambda at: ({"data": Slotted(1.0)}, {"data": Slotted(2.0)})),
    "a buffer of the loss": ("loss", lambda at: ({"loss": Weighed(1.0)}, {"loss": Weighed(2.0)})),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_finished_run_is_not_returned_for_another_job(tmp_path: Path, name: str) -> None:
    setting, fields = CHANGES[name]
    one, other = fields(tmp_path)
    folder = tmp_path / "run"
    quick(make(epochs=1, **one), out=folder)
    with pytest.raises(JobError, match=rf"{setting}: .* then, .* now"):
        quick(make(epochs=1, **other), out=folder)


def test_weights_count_by_content(tmp_path: Path) -> None:
    folder, path = tmp_path / "run", saved(tmp_path, 1)
    first = quick(make(epochs=1, weights=path), out=folder)
    shutil.copy(path, tmp_path / "copy.pt")
    assert quick(make(epochs=1, weights=tmp_path / "copy.pt"), out=folder).loss == first.loss
    shutil.copy(saved(tmp_path, 2), path)
    with pytest.raises(JobError, match=r"weights: .* then, .* now"):
        quick(make(epochs=1, weights=path), out=folder)
    second = quick(make(epochs=1, weights=folder), out=tmp_path / "second")
    quick(make(epochs=2, weights=saved(tmp_path, 1)), out=folder)
    with pytest.raises(JobError, match=r"weights: .* then, .* now"):
        quick(make(epochs=1, weights=folder), out=second.folder)


def test_an_unfinished_run_goes_on_with_an_instance_that_nobody_seeded(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = linear(1)
    interrupted(make(model=first), folder, at=STEPS)
    values = json.loads((folder / "job.json").read_text())["settings"]["model.values"]
    assert quick(make(model=linear(2)), out=folder).steps == 3 * STEPS
    assert any("began from other values of model=" in line for line in warnings_of(folder))
    assert json.loads((folder / "job.json").read_text())["settings"]["model.values"] == values
    with pytest.raises(JobError, match=r"model\.values: .*set a seed before the module is built"):
        quick(make(model=linear(2)), out=folder)
    assert quick(make(model=linear(1)), out=folder).steps == 3 * STEPS
    assert quick(make(model=linear(2)), out=folder, override=["model.values"]).steps == 3 * STEPS


def test_every_field_of_a_job_counts_or_is_exempt() -> None:
    """A new field counts by its code; one that does not has a reason."""
    fields = {each.name for each in dataclasses.fields(echelon.Job)}
    assert fields >= {*job_identity.SETTING_FIELDS, *job_identity.DATA_FIELDS, *job_identity.EXEMPT_FIELDS}
    job = make(
        inputs=lambda batch: (batch[:-1], {}), collate=default_collate, eval_data=samples(), warmup_data=0.5, weights="absent",
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), metrics={"mean": lambda output, batch: output.mean()},
    )  # fmt: skip
    found = {
        part.removeprefix("code ").removeprefix("setting ").partition(".")[0]
        for part in JobSource(job).identity.digests
    }
    assert fields - found == job_identity.EXEMPT_FIELDS.keys()


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(40_000, 16),
        torch.zeros(40_000, 16).T,
        np.zeros((40_000, 16)),
        [0] * 100_000,
        [(torch.zeros(2), 0) for _ in range(1000)],
        dict.fromkeys(range(5000), 0),
        bytes(3 << 20),
        torch.zeros(100, 100).to_sparse(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_data_counts_whole(values: Any) -> None:
    """Up to the documented bound one number anywhere makes other data."""

    def changed(place: int) -> Any:
        if isinstance(values, Tensor) and values.is_sparse:
            return torch.eye(100).to_sparse() * place
        if isinstance(values, Tensor | np.ndarray):
            other: Any = values.clone() if isinstance(values, Tensor) else values.copy()
            other[place, 3] = 1
            return other
        if isinstance(values, bytes):
            return values[:place] + b"x" + values[place + 1 :]
        other = dict(values) if isinstance(values, dict) else list(values)
        other[place] = 1 if not isinstance(other[place], tuple) else (torch.ones(2), 0)
        return other

    found = [digest_value(each, include_length=True).code for each in (values, changed(7), changed(11))]
    assert len(set(found)) == 3
    assert found[0] == digest_value(values, include_length=True).code


@pytest.mark.slow
def test_a_new_process_finds_the_same_digests(tmp_path: Path) -> None:
    (tmp_path / "described.py").write_text(
        "import random, torch\nfrom torch import nn\nfrom echelon.flow.job_code import digest_value\n"
        "torch.manual_seed(1)\nmodel = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))\nscale = 2.0\n"
        "model.register_forward_hook(lambda module, args, output: output * scale)\n"
        "texts = [f'{i} text' for i in range(1000)] + ['scale']\n"
        "class Held:\n    def __init__(self): self.words = {str(i) for i in range(2000)}; self.by = {w: len(w) for w in self.words}\n"
        "    def __call__(self, samples): return samples\n"
        "held = Held()\nfunction = lambda p: torch.optim.SGD(p, lr=scale)\n"
        "print([digest_value(each, is_model=True) for each in (model, texts, held, function)])\n"
    )
    found = set()
    for seed in ("1", "2", "3"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "described.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1, found


class Counting:
    """Keeps state that training changes."""

    def __init__(self, scale: float = 1.0) -> None:
        self.calls, self.scale = 0, scale

    def __call__(self, given: list[Any], *_: Any) -> Any:
        self.calls += 1
        return default_collate(given)


def test_objects_that_training_changed_are_the_jobs_own(tmp_path: Path) -> None:
    """In one process: a counter in collate, a trained module. A change by the user between two trainings still counts."""
    folder, collate, model = tmp_path / "run", Counting(), linear(1)
    interrupted(make(collate=collate, model=model), folder, at=STEPS)
    assert collate.calls
    quick(make(collate=collate, model=model), out=folder)
    assert quick(make(collate=collate, model=model), out=folder).steps == 3 * STEPS
    assert not any("began from other values" in line for line in warnings_of(folder))
    collate.scale = 2.0
    with pytest.raises(JobError, match=r"collate: .* then"):
        quick(make(collate=collate, model=model), out=folder)


def test_modules_count_by_hooks_and_tensors_that_they_hold() -> None:
    def held(hook: float) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_forward_hook(lambda module, args, output: output * hook)
        return model

    assert digest_value(held(1.0), is_model=True).code == digest_value(held(1.0), is_model=True).code
    assert digest_value(held(1.0), is_model=True).code != digest_value(held(2.0), is_model=True).code


# The folder's record, and the checkpoints' own


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    interrupted(make(optimizer=rated(0.05)), one, at=STEPS)
    interrupted(make(optimizer=rated(0.01)), other, at=STEPS)
    name = f"checkpoints/step-{STEPS:08d}"
    shutil.rmtree(other / name)
    shutil.copytree(one / name, other / name)
    with pytest.raises(IncompatibleCheckpointError, match=r"another run's.*\n.*optimizer\.lr: 0\.05 then, 0\.01 now"):
        quick(make(optimizer=rated(0.01)), out=other)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "cut", "list", "empty"])
def test_a_lost_record_is_restored_from_a_checkpoint(tmp_path: Path, how: str) -> None:
    folder, path = tmp_path / "run", tmp_path / "run" / "job.json"
    quick(make(epochs=1), out=folder)
    if how == "missing":
        path.unlink()
    else:
        path.write_text({"cut": path.read_text()[:100], "list": "[]", "empty": "{}"}[how])
    with pytest.raises(JobError, match=r"optimizer\.lr: 0\.05 then, 0\.5 now"):
        quick(make(epochs=1, optimizer=rated(0.5)), out=folder)
    assert quick(make(epochs=1), out=folder).steps == STEPS
    assert any("job.json is" in line and "restored" in line for line in warnings_of(folder))
    assert json.loads(path.read_text())["settings"]["optimizer.lr"] == 0.05


def test_a_step_number_is_ascii(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(make(), folder, at=STEPS)
    there = folder / "checkpoints"
    (there / "step-²").mkdir()
    shutil.copy(there / f"step-{STEPS:08d}" / "checkpoint.json", there / "step-²")
    assert quick(make(), out=folder).steps == 3 * STEPS


# Overrides


def grouped(weight: float, bias: float, last: float) -> Callable[[Any], Optimizer]:
    def made(parameters: Any) -> Optimizer:
        one, two, three, four = parameters
        rates = [([one, two], weight), ([three], bias), ([four], last)]
        return SGD([{"params": each, "lr": rate} for each, rate in rates])

    return made


def test_a_parameter_that_moves_to_another_group_is_a_change(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model = partial(nn.Sequential, nn.Linear(8, 2), nn.Linear(2, 1))
    build = {"model": lambda: model()}
    interrupted(make(optimizer=grouped(0.05, 0.01, 0.05), **build), folder, at=STEPS)
    changed = make(optimizer=grouped(0.05, 0.01, 0.01), **build)
    with pytest.raises(JobError, match=r"optimizer\.lr\[1\.bias\]: 0\.05 then, 0\.01 now"):
        quick(changed, out=folder)
    quick(changed, out=folder, override=["optimizer.lr[1.bias]"])
    stored = json.loads(sorted(folder.glob("checkpoints/step-*/checkpoint.json"))[-1].read_text())
    rates = {name: group["settings"]["lr"] for group in stored["optimizers"][0]["groups"] for name in group["names"]}
    assert rates == {"0.weight": 0.05, "0.bias": 0.05, "1.weight": 0.01, "1.bias": 0.01}


@pytest.mark.slow
def test_an_override_is_applied_once(tmp_path: Path) -> None:
    """An optimizer that changes its own rate goes on from where it was, not from the overridden rate again."""
    before, after = make(optimizer=Decaying), make(optimizer=lambda each: Decaying(each, 0.2))
    for name in ("whole", "broken"):
        interrupted(before, tmp_path / name, at=STEPS)
    quick(after, out=tmp_path / "whole", override=["optimizer.lr"])
    interrupted(after, tmp_path / "broken", at=2 * STEPS, override=["optimizer.lr"])
    quick(after, out=tmp_path / "broken")
    assert rates_of(tmp_path / "broken") == pytest.approx(rates_of(tmp_path / "whole"))
    # To a checkpoint from before the override it is applied again.
    for path in sorted((tmp_path / "broken" / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(path)
    quick(after, out=tmp_path / "broken")
    assert rates_of(tmp_path / "broken") == pytest.approx(rates_of(tmp_path / "whole"))


def test_an_overridden_attribute_of_the_optimizer_is_applied(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(make(optimizer=Decaying), folder, at=STEPS)
    quick(make(optimizer=lambda each: Decaying(each, factor=1.0)), out=folder, override=["optimizer.factor"])
    assert len(set(rates_of(folder)[STEPS:])) == 1


def test_samples_of_another_row_are_noticed(tmp_path: Path) -> None:
    values = torch.randn(8 * STEPS, 16_384, generator=torch.Generator().manual_seed(0))
    other = values.clone()
    other[5, 100] += 1
    job = partial(make, epochs=1, model=lambda: nn.Linear(16_384, 1), optimizer=rated(1e-6))
    quick(job(data=TensorDataset(values, values[:, :1])), out=tmp_path / "run")
    with pytest.raises(JobError, match=r"data: .* then"):
        quick(job(data=TensorDataset(other, values[:, :1])), out=tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["set", "dict"])
def test_ids_of_parameters_in_closures_are_no_change(kind: str) -> None:
    def optimizer() -> Any:
        own = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        held: Any = {id(each) for each in own} if kind == "set" else {id(each): 0.1 for each in own}
        kept.append(own)
        return lambda params: SGD([each for each in params if id(each) not in held], lr=0.1)

    kept: list[Any] = []
    assert digest_value(optimizer(), is_model=True).code == digest_value(optimizer(), is_model=True).code
