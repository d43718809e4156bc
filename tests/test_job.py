"""How a job file is found, how a batch reaches the model, and what a model's own loss counts."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.engine.run import Run
from echelon.errors import JobError
from echelon.job import Job, call_loss, call_model, load_job, make_job, reading
from echelon.plan.text import from_text
from echelon.world import World

ROOT = Path(__file__).parents[1]
FILE = "import torch\nimport echelon\ndef job():\n    return echelon.Job(model=torch.nn.Identity, optimizer=print, data=[], batch=1, steps={steps})\n"


def written(path: Path, text: str = FILE.format(steps=1)) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.fixture(autouse=True)
def _tidy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("name", ["random", "math", "json"])
def test_a_job_file_may_not_replace_a_module_of_python(tmp_path: Path, name: str) -> None:
    before = sys.modules.get(name)
    with pytest.raises(JobError, match=f"`{name}` is a module of Python's own.*rename the file"):
        load_job(written(tmp_path / f"{name}.py"))
    assert sys.modules.get(name) is before
    assert random.random() >= 0


def test_a_job_file_may_not_replace_a_loaded_module(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="`pytest` is the name of a module that is loaded already"):
        load_job(written(tmp_path / "pytest.py"))
    assert sys.modules["pytest"] is pytest


def test_job_files_of_one_name_may_follow_each_other(tmp_path: Path) -> None:
    for steps in (1, 2):
        spec = written(tmp_path / str(steps) / "echelon_test_job.py", FILE.format(steps=steps))
        assert load_job(spec).steps == steps
        assert load_job(spec).steps == steps


def test_a_job_file_that_fails_leaves_no_half_module(tmp_path: Path) -> None:
    broken = written(tmp_path / "broken" / "echelon_half_job.py", "first = 1\nraise RuntimeError('second')\n")
    with pytest.raises(RuntimeError, match="second"):
        load_job(broken)
    assert "echelon_half_job" not in sys.modules
    load_job(written(tmp_path / "whole" / "echelon_half_job.py"))
    whole = sys.modules["echelon_half_job"]
    with pytest.raises(RuntimeError, match="second"):
        load_job(broken)
    assert sys.modules["echelon_half_job"] is whole


def test_a_job_needs_no_name(tmp_path: Path) -> None:
    assert load_job(written(tmp_path / "echelon_nameless.py")).name is None


class Tagger(nn.Module):
    """A model with a loss of its own, as HF's: a mean over the labels that are not -100."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.line(x)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, -2), labels.flatten()), logits=logits)


class Summing(Tagger):
    """Takes the number of items and divides by it; `passed` remembers it."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        self.passed = num_items_in_batch
        logits = self.line(x)
        total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        return SimpleNamespace(loss=total / num_items_in_batch, logits=logits)


class Keywords(Summing):
    """Takes anything by keyword, and says that it is for the loss."""

    accepts_loss_kwargs = True

    def forward(self, x: Tensor, labels: Tensor, **keywords: Any) -> Any:
        return super().forward(x, labels, **keywords)


class Other(Tagger):
    """Takes anything by keyword, and not for the loss."""

    def forward(self, x: Tensor, labels: Any, **keywords: Any) -> Any:
        assert not keywords
        return super().forward(x, labels)


class Boxes(nn.Module):
    """Labels as detection has them: a list, of unlike lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: list[Tensor]) -> dict[str, Tensor]:
        return {"loss": self.line(x).mean() + len(labels)}


def job(model: Any, **changes: Any) -> Job:
    data = [
        {"x": torch.randn(5, 8), "labels": torch.tensor([1, 2, -100, -100, -100][i % 3 :] + [3] * (i % 3))}
        for i in range(8)
    ]
    data[0]["labels"][:] = -100  # a sample, and with micro=1 a whole micro-batch, in which nothing counts
    settings = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "data": data, "batch": 8, "epochs": 1}
    return Job(model=model, **{**settings, **changes})


def one(made: Job, model: nn.Module, batch: Any) -> Any:
    return call_loss(made, call_model(made, model, batch), batch, model)


@pytest.mark.parametrize("kind", [Tagger, Summing, Keywords, Other])
def test_a_models_own_loss_is_a_sum_over_its_labels(kind: type[nn.Module]) -> None:
    made, model = job(kind), kind()
    labels = torch.tensor([[1, -100, 2], [-100, 3, 0]])
    batch = {"x": torch.randn(2, 3, 8), "labels": labels}
    total, count = one(made, model, batch)
    assert count.item() == 4
    wanted = F.cross_entropy(model.line(batch["x"]).flatten(0, 1), labels.flatten(), reduction="sum")
    assert total.item() == pytest.approx(wanted.item())
    assert getattr(model, "passed", 4) == 4


@pytest.mark.parametrize("kind", [Tagger, Summing, Keywords])
def test_a_batch_in_which_no_label_counts_is_nothing(kind: type[nn.Module]) -> None:
    made, model = job(kind), kind()
    total, count = one(made, model, {"x": torch.randn(2, 3, 8), "labels": torch.full((2, 3), -100)})
    assert (total.item(), count.item()) == (0, 0)
    total.backward()
    assert all(torch.equal(value.grad, torch.zeros_like(value)) for value in model.parameters())


@pytest.mark.parametrize("kind", [Tagger, Summing, Keywords])
def test_micro_batches_of_unlike_weight_add_up_to_the_batch(kind: type[nn.Module]) -> None:
    found = {}
    for plan in ("micro=8", "micro=1", "micro=3"):
        torch.manual_seed(1)
        with Run(job(kind), from_text(plan), World(), dtype=torch.float64) as run:
            loss = float(run.step(next(iter(run.batches()))).loss)
            found[plan] = [loss, *torch.cat([value.detach().flatten() for value in run.model.parameters()]).tolist()]
    assert found["micro=1"] == pytest.approx(found["micro=8"], rel=1e-12)
    assert found["micro=3"] == pytest.approx(found["micro=8"], rel=1e-12)


def test_labels_may_be_a_list() -> None:
    made, model = job(Boxes), Boxes()
    loss = one(made, model, {"x": torch.randn(2, 8), "labels": [torch.zeros(1), torch.zeros(3)]})
    assert loss.shape == ()
    assert loss.item() > 1


# A job file that does more, or less, than describe a job


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import sys\nsys.exit(0)\n",
            r"line 2 ended Python \(sys\.exit\(0\)\) while it was read; put that under if __name__",
        ),
        ("import sys\n\nsys.exit()\n", r"line 3 ended Python \(sys\.exit\(\)\) while it was read"),
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['--nope'])\n",
            r"line 2 ended Python \(sys\.exit\(2\)\) while it was read",
        ),
        (
            "def job():\n    raise SystemExit('done')\n",
            r"line 2 ended Python \(sys\.exit\('done'\)\) while .*:job was called",
        ),
    ],
)
def test_a_job_file_that_ends_python_is_no_success(tmp_path: Path, text: str, words: str) -> None:
    spec = written(tmp_path / "echelon_ending_job.py", text)
    with pytest.raises(JobError, match=f"{spec} {words}"):
        load_job(spec)
    assert reading() is None


RANDOM = """
import random
import numpy
import torch
import echelon

def drawn():
    return [random.random(), numpy.random.rand(), torch.rand(()).item()]

early = drawn()

def job():
    data = [*early, *drawn()]
    return echelon.Job(model=torch.nn.Identity, optimizer=print, data=data, batch=1, steps=1)
"""


def test_random_data_of_a_job_is_the_same_in_every_process(tmp_path: Path) -> None:
    spec = written(tmp_path / "echelon_random_job.py", RANDOM)
    found = []
    for other in (1, 2):
        torch.manual_seed(other), random.seed(other), numpy.random.seed(other)
        made = load_job(spec)
        torch.manual_seed(other), random.seed(other), numpy.random.seed(other)
        found.append([*made.data, *make_job(sys.modules["echelon_random_job"].job).data[3:]])
    assert found[0] == found[1]
    torch.manual_seed(made.seed)
    assert torch.rand(()).item() not in made.data  # the model's first weight is not a sample


def test_a_job_file_that_is_read_can_be_told(tmp_path: Path) -> None:
    text = FILE.format(steps=1) + "from echelon.job import reading\nseen = reading()\n"
    spec = written(tmp_path / "echelon_reading_job.py", text)
    load_job(spec)
    assert sys.modules["echelon_reading_job"].seen == Path(spec).resolve()
    assert reading() is None


NEEDED = {"model": nn.Identity, "optimizer": lambda params: None, "data": [1], "batch": 1, "steps": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": "abc"}, r"seed='abc': a whole number"),
        ({"seed": 2**64}, r"seed=18446744073709551616: a whole number of 64 bits"),
        ({"clip": "1.0"}, r"clip='1.0': a gradient norm, a number above 0"),
        ({"clip": True}, r"clip=True: a gradient norm"),
        ({"metrics": [print]}, r"metrics= is a list: give each a name, metrics=\{'accuracy': accuracy\}"),
        ({"metrics": {"accuracy": 0.5}}, r"metrics=\{'accuracy': 0.5\}: give text as the name and a function"),
        ({"metrics": {"loss": lambda output, batch: 0}}, r"the loss is always evaluated, under this name"),
        ({"name": 3}, r"name=3: text"),
        ({"weights": {"a": 1}}, r"weights= is a dict: give the path"),
        ({"evaluation": []}, r"evaluation= is empty \(list\): give at least one sample to evaluate on"),
        ({"modle": nn.Identity}, r"a Job has no modle=; did you mean model=\?"),
        ({"batch_size": 8}, r"a Job has no batch_size=; did you mean batch=\?"),
        ({"xyzzy": 8}, r"a Job has no xyzzy=; its fields are model, optimizer, data, batch, loss"),
        (
            {"loss": lambda output: 0},
            r"loss= is called as loss\(output, batch\), and .*test_job.py line \d+ takes \(output\)",
        ),
        ({"model": nn.Linear}, r"model= is called as model\(\), and Linear takes \(in_features"),
        (
            {"optimizer": lambda: 0},
            r"optimizer= is called as optimizer\(params\), and .*test_job.py line \d+ takes \(\)",
        ),
        ({"inputs": lambda: 0}, r"inputs= is called as inputs\(batch\)"),
        ({"collate": lambda a, b: 0}, r"collate= is called as collate\(samples\)"),
        (
            {"schedule": lambda: 0},
            r"schedule= is called as schedule\(optimizer\) or schedule\(optimizer, total_steps\)",
        ),
        ({"metrics": {"a": lambda output: 0}}, r"metrics\['a'\]= is called as metrics\['a'\]\(output, batch\)"),
    ],
)
def test_wrong_fields_are_told_at_once(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        Job(**{**NEEDED, **changes})


def test_right_fields_are_taken() -> None:
    made = Job(
        **NEEDED, loss=nn.CrossEntropyLoss(), clip=1, schedule=lambda optimizer, steps: None, evaluation=torch.zeros(1),
        metrics={"a": lambda output, batch, extra=0: 0}, collate=list, weights=Path("w"), seed=-1,
    )  # fmt: skip
    assert copy.copy(made) == made
    assert replace(made, model=nn.Linear(2, 2)).clip == 1


def test_what_a_job_lacks_is_named() -> None:
    with pytest.raises(JobError, match=r"a Job needs optimizer= and data=, which are not given"):
        Job(model=nn.Identity, batch=1, steps=1)  # type: ignore[call-arg]
    with pytest.raises(JobError, match=r"fields are given by name"):
        Job(nn.Identity)  # type: ignore[call-arg,misc]


def test_a_job_function_that_needs_arguments_is_told(tmp_path: Path) -> None:
    spec = written(tmp_path / "echelon_arguments_job.py", "\ndef job(size):\n    return size\n")
    with pytest.raises(JobError, match=r"takes \(size\) \(.*echelon_arguments_job.py line 2\): .* without arguments"):
        load_job(spec)


def test_a_job_file_may_not_replace_an_installed_module(tmp_path: Path) -> None:
    """In a process that has not loaded it yet."""
    written(tmp_path / "jobs" / "torch.py", "import torch\n")
    code = "from echelon.job import load_job; load_job('jobs/torch.py')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "`torch` is the name of an installed module" in done.stderr
    assert "rename the file" in done.stderr


SEVERAL = """
import torch
import echelon

def make(steps):
    return echelon.Job(model=torch.nn.Identity, optimizer=print, data=[1], batch=1, steps=steps)

def small():
    return make(1)

def plain():
    return echelon.Job(model=torch.nn.Identity, optimizer=print, data=[1], batch=1, steps=1)

def helper():
    return 3

def main():
    echelon.train(plain)

ready = make(2)
"""


def test_the_jobs_that_are_there_are_listed(tmp_path: Path) -> None:
    spec = written(tmp_path / "echelon_several_jobs.py", SEVERAL)
    with pytest.raises(JobError) as told:
        load_job(f"{spec}:nope")
    assert str(told.value).endswith(f"; it has {spec}:small, {spec}:plain, {spec}:ready")
    assert load_job(f"{spec}:small").steps == 1
    assert load_job(f"{spec}:ready").steps == 2


def test_what_is_no_job_file_is_named(tmp_path: Path) -> None:
    spec = written(tmp_path / "echelon_colon_job.py")
    with pytest.raises(JobError, match=f"names no function after the colon: give {spec}, or {spec}:name"):
        load_job(f"{spec}:")
    with pytest.raises(JobError, match=f"{tmp_path} is a folder: give a job file"):
        load_job(str(tmp_path))
