"""What a job may say, how a batch reaches the model, and what a model's own loss counts."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.engine.run import Run
from echelon.errors import JobError
from echelon.job import Job, call_loss, call_model
from echelon.plan.text import from_text
from echelon.world import World


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
    settings = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "data": data, "batch_size": 8, "epochs": 1}
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


NEEDED = {"model": nn.Identity, "optimizer": lambda params: None, "data": [1], "batch_size": 1, "steps": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": "abc"}, r"seed='abc': an integer"),
        ({"drop_last": 1}, r"drop_last=1: True leaves out the short last batch"),
        ({"seed": 2**64}, r"seed=18446744073709551616: an integer of at most 64 bits"),
        ({"clip_norm": "1.0"}, r"clip_norm='1.0': a gradient norm, a number above 0"),
        ({"clip_norm": True}, r"clip_norm=True: a gradient norm"),
        ({"metrics": [print]}, r"metrics= is a list: give each a name, metrics=\{'accuracy': accuracy\}"),
        ({"metrics": {"accuracy": 0.5}}, r"metrics=\{'accuracy': 0.5\}: give text as the name and a function"),
        ({"metrics": {"loss": lambda output, batch: 0}}, r"the loss is always evaluated, under this name"),
        ({"name": 3}, r"name=3: text"),
        ({"weights": {"a": 1}}, r"weights= is a dict: give the path"),
        ({"eval_data": []}, r"eval_data= is empty \(list\): give at least one sample, or leave it out"),
        ({"modle": nn.Identity}, r"a Job has no modle=; did you mean model=\?"),
        ({"batch": 8}, r"a Job has no batch=; did you mean batch_size=\?"),
        ({"evaluation": [1]}, r"a Job has no evaluation=; did you mean eval_data=\?"),
        ({"max_grad_norm": 1.0}, r"a Job has no max_grad_norm=; did you mean clip_norm=\?"),
        ({"xyzzy": 8}, r"a Job has no xyzzy=; known names: model=, optimizer=, data=, batch_size=, loss="),
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
            {"lr_schedule": lambda: 0},
            r"lr_schedule= is called as lr_schedule\(optimizer\) or lr_schedule\(optimizer, total_steps\)",
        ),
        ({"metrics": {"a": lambda output: 0}}, r"metrics\['a'\]= is called as metrics\['a'\]\(output, batch\)"),
    ],
)
def test_wrong_fields_are_told_at_once(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        Job(**{**NEEDED, **changes})


def test_right_fields_are_taken() -> None:
    made = Job(
        **NEEDED, loss=nn.CrossEntropyLoss(), clip_norm=1, lr_schedule=lambda optimizer, steps: None, eval_data=torch.zeros(1),
        metrics={"a": lambda output, batch, extra=0: 0}, collate=list, weights=Path("w"), seed=-1,
    )  # fmt: skip
    assert copy.copy(made) == made
    assert replace(made, model=nn.Linear(2, 2)).clip_norm == 1


def test_what_a_job_lacks_is_named() -> None:
    with pytest.raises(JobError, match=r"a Job needs optimizer= and data=, which are not given"):
        Job(model=nn.Identity, batch_size=1, steps=1)  # type: ignore[call-arg]
    with pytest.raises(JobError, match=r"fields are given by name"):
        Job(nn.Identity)  # type: ignore[call-arg,misc]
