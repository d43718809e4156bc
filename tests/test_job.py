"""How a job file is found, how a batch reaches the model, and what a model's own loss counts."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.engine.run import Run
from echelon.errors import JobError
from echelon.job import Job, call_loss, call_model, load_job
from echelon.plan.text import from_text
from echelon.world import World

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
