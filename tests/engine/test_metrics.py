"""Metrics that keep state, edit their arguments, or are means of most batches only: the same number under every plan."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from echelon.engine.run import Run
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import classes, mlp, numbers
from tests.sampling import one_of_each


class Running:
    """Accuracy over every sample since the start, and the best of an evaluation so far."""

    def __init__(self) -> None:
        self.right = self.seen = 0
        self.best = 0.0

    def __call__(self, output: Tensor, batch: Any) -> float:
        self.right += int((output.argmax(1) == batch[-1]).sum())
        self.seen += len(output)
        return self.right / self.seen

    def highest(self, output: Tensor, batch: Any) -> float:
        self.best = max(self.best, float((output.argmax(1) == batch[-1]).float().mean()))
        return self.best

    def total(self, output: Tensor, batch: Any) -> tuple[int, int]:
        self(output, batch)
        return self.right, self.seen


def remembered() -> tuple[Any, Running]:
    data = torch.utils.data.TensorDataset(numbers(53, 8), classes(53))
    best, mean, pair = Running(), Running(), Running()
    return mlp(
        data=data, eval_data=data, batch_size=8, metrics={"best": best.highest, "mean": mean, "pair": pair.total}
    ), mean


def remembered_under(world: World, plan: str, folder: str) -> tuple[list[dict[str, float]], int]:
    """On one rank: what evaluations after each of four steps return, the last two after a resume; and how many samples a metric counted."""
    job, _ = remembered()
    found = []
    with Run(job, complete(from_text(plan), job), world) as run:
        for _, batch in zip(range(2), run.batches(), strict=False):
            run.step(batch)
            found.append(run.evaluate())
        run.save(Path(folder) / "here")
    job, counted = remembered()
    with Run(job, complete(from_text(plan), job), world) as run:
        run.load(Path(folder) / "here")
        for _, batch in zip(range(2), run.batches(), strict=False):
            run.step(batch)
            found.append(run.evaluate())
    return found, counted.seen


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=1", "dp=1 micro=3", "dp=2", "dp=2 zero=3", "pp=2 micro=4", "tp=2"])
def test_metrics_that_keep_state_are_called_once_per_evaluation_and_resume(
    ranks: RankPool, plan: str, tmp_path: Path
) -> None:
    job, _ = remembered()
    wanted = []
    with Run(job, Plan(), World()) as run:
        for _, batch in zip(range(4), run.batches(), strict=False):
            run.step(batch)
            with torch.no_grad():
                run.model.eval()
                output = run.model(job.data.tensors[0])
                run.model.train()
            best, mean, pair = (metric(output, job.data.tensors) for metric in job.metrics.values())
            wanted.append({"best": best, "mean": mean, "pair": pair[0] / pair[1]})
    count = from_text(plan).ranks
    name = "tests.engine.test_metrics:remembered_under"
    given = (plan, str(tmp_path))
    everyone = ranks.run(count, name, *given) if count > 1 else [remembered_under(World(), *given)]
    for found, _ in everyone:
        assert [{name: each[name] for name in job.metrics} for each in found] == [
            pytest.approx(each, rel=1e-6) for each in wanted
        ]
    assert max(seen for _, seen in everyone) == 4 * 53


def token_accuracy(output: Tensor, batch: Any) -> Tensor:
    counted = batch[-1] >= 0
    return ((output[:, :2] > 0) & counted).sum() / counted.sum()


def macro_recall(output: Tensor, batch: Any) -> float:
    found = batch[-1][:, 1].unique()
    return sum(float((output[batch[-1][:, 1] == each, 0] > 0).float().mean()) for each in found) / len(found)


#: Rows of 88 without their second item, or of another class: those of the last batch, of one in the middle, of one rank.
ODD_ROWS = {"last": range(84, 88), "middle": range(44, 46), "rank": range(44, 88)}


def unequal_tokens(odd: str) -> Any:
    labels = torch.ones(88, 2, dtype=torch.long)
    labels[ODD_ROWS[odd], 1] = -1
    data = torch.utils.data.TensorDataset(numbers(88, 8), labels)
    metrics = {"tokens": token_accuracy, "recall": macro_recall, "mean": lambda output, _: output[:, 0].mean()}
    return mlp(
        data=data, eval_data=data, batch_size=8, metrics=metrics, loss=lambda output, batch: output.square().mean()
    )


def tokens_under(world: World, plan: str, odd: str, small: int) -> tuple[dict[str, float], dict[str, str]]:
    """On one rank: what the second evaluation gives, where sets of up to `small` bytes are small."""
    job = unequal_tokens(odd)
    with Run(job, complete(from_text(plan), job), world) as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr("echelon.engine.evaluation_sums._SMALL_SET_BYTES", small)
        run.evaluate()
        return run.evaluate(), dict(run.evaluator.metric_kinds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "odd", "small"),
    one_of_each(
        "odd rows",
        itertools.product(["dp=1", "dp=2", "dp=1 micro=1", "tp=2"], ODD_ROWS, [0, 2**24]),
        kind=lambda row: (row[0], row[2]),
    ),
)
def test_a_few_odd_samples_anywhere_show_what_is_no_mean(ranks: RankPool, plan: str, odd: str, small: int) -> None:
    job, count = unequal_tokens(odd), from_text(plan).ranks
    with Run(job, Plan(), World()) as run, torch.no_grad():
        run.model.eval()
        output = run.model(job.data.tensors[0])
        wanted = {name: float(metric(output, job.data.tensors)) for name, metric in job.metrics.items()}
    name = "tests.engine.test_metrics:tokens_under"
    for found, kinds in (
        ranks.run(count, name, plan, odd, small) if count > 1 else [tokens_under(World(), plan, odd, small)]
    ):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
        assert kinds["mean"] == "mean"


EDITS: dict[str, Any] = {
    "first": lambda output, _: output.mean(),
    "output": lambda output, _: output.sigmoid_().mean(),
    "labels": lambda _, batch: batch[-1].clamp_(max=1).float().mean(),
    "numpy": lambda output, _: float(np.negative(output.numpy(), out=output.numpy()).mean()),
    "median": lambda output, _: output.sub_(1).median(),
    "last": lambda output, batch: (output.argmax(1) == batch[-1]).float().mean(),
}


def late_edit(output: Tensor, batch: Any) -> Tensor:
    """Edits batches with a large input only."""
    return output.zero_().mean() if batch[0].max() > 9 else output.mean()


def edited_under(world: World, plan: str, late: bool) -> dict[str, float]:
    job = editing(late)
    with Run(job, complete(from_text(plan), job), world) as run:
        found = run.evaluate()
        assert run.evaluate() == pytest.approx(found, rel=1e-6)
        return found


def editing(late: bool) -> Any:
    values = numbers(53, 8)
    values[30, 0] = 10.0
    data = torch.utils.data.TensorDataset(values, classes(53))
    metrics = {"late": late_edit, "last": EDITS["last"]} if late else EDITS
    return mlp(data=data, eval_data=data, batch_size=8, metrics=metrics)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "pp=2 micro=4", "tp=2"])
@pytest.mark.parametrize("late", [False, True])
def test_every_metric_sees_the_output_and_the_batch_unedited(ranks: RankPool, plan: str, late: bool) -> None:
    job, count = editing(late), from_text(plan).ranks
    with Run(job, Plan(), World()) as run, torch.no_grad():
        run.model.eval()
        wanted = {
            name: float(metric(run.model(job.data.tensors[0]), [each.clone() for each in job.data.tensors]))
            for name, metric in job.metrics.items()
            if name != "late"
        }
    name = "tests.engine.test_metrics:edited_under"
    for found in ranks.run(count, name, plan, late) if count > 1 else [edited_under(World(), plan, late)]:
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


STEERING = {"accuracy": 0.0}
LAST = 0.0


def steering(output: Tensor, batch: Any) -> float:
    global LAST
    STEERING["accuracy"] = float((output.argmax(1) == batch[-1]).float().mean())
    LAST = STEERING["accuracy"] / 2
    return STEERING["accuracy"]


def steered(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[-1]) * (1 + STEERING["accuracy"] + LAST)


def steered_under(world: World, plan: str) -> list[float]:
    """On one rank: losses of two epochs, with an evaluation between them."""
    global LAST
    STEERING["accuracy"] = LAST = 0.0
    data = torch.utils.data.TensorDataset(numbers(48, 8), classes(48))
    job = mlp(data=data, eval_data=data, batch_size=16, metrics={"accuracy": steering}, loss=steered)
    found = []
    with Run(job, complete(from_text(plan), job), world) as run:
        for step, batch in enumerate(run.batches(6)):
            found.append(float(run.step(batch).loss))
            if step == 2:
                run.evaluate()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2 zero=3", "pp=2", "tp=2"])
def test_what_a_metric_leaves_for_the_loss_is_that_of_the_whole_set(ranks: RankPool, plan: str) -> None:
    global LAST
    STEERING["accuracy"] = LAST = 0.0
    data = torch.utils.data.TensorDataset(numbers(48, 8), classes(48))
    job = mlp(data=data, batch_size=16, loss=steered)
    wanted = []
    with Run(job, Plan(), World()) as run:
        for step, batch in enumerate(run.batches(6)):
            wanted.append(float(run.step(batch).loss))
            if step == 2:
                with torch.no_grad():
                    steering(run.model.eval()(data.tensors[0]), data.tensors)
                    run.model.train()
    count = from_text(plan).ranks
    name = "tests.engine.test_metrics:steered_under"
    for found in ranks.run(count, name, plan) if count > 1 else [steered_under(World(), plan)]:
        assert found == pytest.approx(wanted, rel=1e-5)
