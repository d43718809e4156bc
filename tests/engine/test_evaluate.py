"""Metrics of any kind are averaged over samples in full precision, on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from echelon.engine.metrics import EvaluationPart, UnjoinableError, classify_metric, join_parts
from echelon.engine.run import Run
from echelon.errors import JobError
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import classes, mlp, numbers
from tests.sampling import some

METRICS = {
    "number": lambda output, batch: 3.5,
    "whole": lambda output, batch: 2,
    "pair": lambda output, batch: (7, 2.0),
    "mixed": lambda output, batch: (output.sum() * 0 + len(output), len(output)),
    "host": lambda output, batch: torch.tensor(1.5),
    "half": lambda output, batch: output.new_ones((), dtype=torch.bfloat16),
    "one": lambda output, batch: output.new_ones(1),
}
WANTED = {"number": 3.5, "whole": 2, "pair": 3.5, "mixed": 1, "host": 1.5, "half": 1, "one": 1}


def evaluated(device: str) -> dict[str, float]:
    """257 samples at once: one more than bfloat16 can count."""
    data = torch.utils.data.TensorDataset(numbers(257, 8), classes(257))
    job = mlp(data=data, eval_data=data, batch_size=257, metrics=METRICS)
    with Run(job, Plan(), World(), device=torch.device(device)) as run:
        return run.evaluate()


def test_metrics_may_be_numbers_or_tensors() -> None:
    found = evaluated("cpu")
    del found["loss"]
    assert found == WANTED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_metrics_may_be_numbers_or_tensors_on_a_gpu() -> None:
    found = evaluated("cuda")
    del found["loss"]
    assert found == WANTED


def test_a_metric_that_is_no_scalar_is_named() -> None:
    job = mlp(eval_data=mlp().data, metrics={"rows": lambda output, batch: output[:, 0]})
    with (
        Run(job, Plan(), World()) as run,
        pytest.raises(JobError, match=r"metric 'rows' gave a tensor of shape \(16,\)"),
    ):
        run.evaluate()


def auc(output: Tensor, batch: Any) -> float:
    """Of two classes; fails where there is one."""
    score, label = output[:, 1] - output[:, 0], batch[-1] % 2
    if label.min() == label.max():
        raise ValueError("only one class")
    above = (score[label == 1][:, None] > score[label == 0][None, :]).double()
    return above.mean().item()


def f1(output: Tensor, batch: Any) -> Tensor:
    found, label = output.argmax(1) % 2, batch[-1] % 2
    hits = (found & label).sum()
    return 2 * hits / (found.sum() + label.sum()).clamp(min=1)


def perplexity(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[-1]).exp()


def accuracy(output: Tensor, batch: Any) -> float:
    return (output.argmax(1) == batch[-1]).float().mean().item()


def recall(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """A batch without samples of the class counts one."""
    wanted = batch[-1] == 1
    return (wanted & (output.argmax(1) == 1)).sum(), wanted.sum().clamp(min=1)


def hits(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output.argmax(1) == batch[-1]).sum(), len(output)


UNEVEN = {"auc": auc, "f1": f1, "perplexity": perplexity, "accuracy": accuracy, "recall": recall, "hits": hits}
KINDS = {"auc": "whole", "f1": "whole", "perplexity": "whole", "accuracy": "mean", "recall": "whole", "hits": "pair"}


def number(value: Any) -> float:
    return float(value[0] / value[1] if isinstance(value, tuple) else value)


def judged() -> Any:
    """53 samples, and batches of 8: the last one has 5, and parts of one class come up."""
    data = torch.utils.data.TensorDataset(numbers(53, 8), classes(53).sort().values)
    return mlp(data=data, eval_data=data, batch_size=8, metrics=UNEVEN)


def exact() -> dict[str, float]:
    """The metrics of all outputs at once, by the model as it starts."""
    job = judged()
    with Run(job, Plan(), World()) as run, torch.no_grad():
        run.model.eval()
        values, labels = job.eval_data.tensors
        output = run.model(values)
        return {name: number(metric(output, (values, labels))) for name, metric in UNEVEN.items()}


def evaluate_under(world: World, plan: str) -> tuple[dict[str, float], dict[str, str]]:
    """On one rank: what an evaluation gives, twice."""
    job = judged()
    with Run(job, complete(from_text(plan), job), world) as run:
        found = run.evaluate()
        assert run.evaluate() == found  # now their kinds are known
        return found, dict(run.evaluator.metric_kinds)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=1", "dp=1 micro=3", "dp=2", "dp=2 zero=3 micro=2", "pp=2 micro=4", "tp=2"])
def test_metrics_that_are_no_means_are_exact_under_every_plan(ranks: RankPool, plan: str) -> None:
    """Also those that fail on parts of one class, and those that return Python numbers from a pipeline's last stage."""
    count = from_text(plan).ranks
    name = "tests.engine.test_evaluate:evaluate_under"
    for found, kinds in ranks.run(count, name, plan) if count > 1 else [evaluate_under(World(), plan)]:
        assert kinds == KINDS
        assert {name: found[name] for name in UNEVEN} == pytest.approx(exact(), rel=1e-6)


WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5])


def masked(output: Tensor, batch: Any) -> Tensor:
    """Whole batches count nothing."""
    counted = (batch[-1] == 1).to(output.dtype)
    return 2 * ((output[:, 0] ** 2) * counted).sum() / counted.sum().clamp(min=1)


def by_class(output: Tensor, batch: Any, wanted: int) -> Tensor:
    """A sum over all samples, divided by those of one class, which few batches have, or none."""
    return 2 * (output**2).sum() / (batch[-1] == wanted).sum().clamp(min=1)


LOSSES = {
    "weights": lambda output, batch: F.cross_entropy(output, batch[-1], weight=WEIGHTS),
    "smoothed": lambda output, batch: F.cross_entropy(
        output, batch[-1], weight=WEIGHTS, ignore_index=1, label_smoothing=0.1
    ),
    "masked": masked,
    "by one class": lambda output, batch: by_class(output, batch, 1),
    "by a class that is not there": lambda output, batch: by_class(output, batch, 9),
    "sum and count": lambda output, batch: (
        (output[:, 0] ** 2 * (batch[-1] == 1)).sum(),
        (batch[-1] == 1).sum().clamp(min=1),
    ),
    "sum over all and count": lambda output, batch: ((output**2).sum(), (batch[-1] == 1).sum().clamp(min=2)),
    "mean and 1": lambda output, batch: ((output**2).mean(), 1),
}


def weighed(loss: str) -> Any:
    data = torch.utils.data.TensorDataset(numbers(53, 8), classes(53).sort().values)
    return mlp(data=data, eval_data=data, batch_size=8, loss=LOSSES[loss])


def weighed_under(world: World, plan: str, loss: str) -> float:
    """On one rank: the loss of an evaluation."""
    job = weighed(loss)
    with Run(job, complete(from_text(plan), job), world) as run:
        return run.evaluate()["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", some("weighed losses", ["dp=1", "dp=1 micro=3", "dp=2", "pp=2 micro=4", "tp=2"], 3))
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_counts_by_its_own_weights(ranks: RankPool, plan: str, loss: str) -> None:
    job, count = weighed(loss), from_text(plan).ranks
    with Run(job, Plan(), World()) as run, torch.no_grad():
        run.model.eval()
        wanted = number(job.loss(run.model(job.data.tensors[0]), job.data.tensors))
    name = "tests.engine.test_evaluate:weighed_under"
    for found in ranks.run(count, name, plan, loss) if count > 1 else [weighed_under(World(), plan, loss)]:
        assert found == pytest.approx(wanted, rel=1e-6)


def test_a_metric_that_fails_on_the_whole_set_says_so() -> None:
    data = torch.utils.data.TensorDataset(numbers(53, 8), torch.ones(53, dtype=torch.long))
    with (
        Run(mlp(data=data, eval_data=data, metrics={"auc": auc}), Plan(), World()) as run,
        pytest.raises(ValueError, match="only one class") as caught,
    ):
        run.evaluate()
    assert caught.value.__notes__ == ["in metric 'auc', over the whole evaluation set"]


def test_a_metric_over_more_than_memory_holds_is_refused_and_the_rest_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.engine.evaluation_sums._MAX_COLLECTED_BYTES", 256)
    warnings: list[str] = []
    with Run(judged(), Plan(), World(), warn=warnings.append) as run:
        found = run.evaluate()
    assert math.isnan(found["auc"])
    assert found["accuracy"] == pytest.approx(exact()["accuracy"])
    (warning,) = warnings
    assert "auc, f1, perplexity, recall: not a mean over samples" in warning
    assert "(sum, count)" in warning


def part(output: Any, batch: Any, samples: int) -> EvaluationPart:
    return EvaluationPart(output, batch, samples)


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        (lambda output, batch: (output.argmax(1) == batch).float().mean(), "mean"),
        (lambda output, batch: output.float().square().mean().item(), "mean"),
        (lambda output, batch: 1.0, None),
        (lambda output, batch: ((output.argmax(1) == batch).sum(), len(batch)), "pair"),
        (lambda output, batch: output.square().mean().sqrt(), "whole"),
        (lambda output, batch: output[batch > 0].mean(), "whole"),
        (f1, "whole"),
        (lambda output, batch: torch.corrcoef(torch.stack([output[:, 0], batch.float()]))[0, 1], "whole"),
    ],
)
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_are_told_from_other_metrics(metric: Any, kind: str | None, right: bool, dtype: torch.dtype) -> None:
    """Also where every prediction is right, so that F1 is 1 on every part."""
    labels = classes(24) % 2
    output = (torch.eye(2)[labels] * 4 if right else numbers(24, 2)).to(dtype)
    wrapped = (lambda output, batch: metric(output, (batch,))) if metric is f1 else metric
    parts = [part(output[:16], labels[:16], 16), part(output[16:], labels[16:], 8)]
    assert classify_metric(wrapped, parts) == kind


@dataclass
class Answer:
    """What some models return."""

    loss: Tensor
    logits: Tensor


def test_a_metric_of_the_models_own_loss_is_seen_over_several_batches() -> None:
    parts = [
        part(Answer(torch.tensor(0.5 + place), numbers(4, 2)), {"x": numbers(4, 2), "text": ["a"] * 4}, 4)
        for place in range(2)
    ]
    assert classify_metric(lambda output, batch: output.loss, parts) == "mean"
    assert classify_metric(lambda output, batch: output.loss.exp(), parts) == "whole"
    assert classify_metric(lambda output, batch: output.loss.exp(), parts[:1]) == "whole"
    assert (
        classify_metric(lambda output, batch: output.logits.mean() * len(batch["text"]) / len(output.logits), parts)
        == "mean"
    )
    everything = join_parts(parts)
    assert (everything.sample_count, len(everything.batch["text"]), everything.output.loss) == (8, 8, 1.0)


def test_batches_of_different_lengths_do_not_fit_together() -> None:
    parts = [part(numbers(4, width), numbers(4, width), 4) for width in (2, 3)]
    with pytest.raises(UnjoinableError, match=r"\(4, 2\), \(4, 3\)"):
        join_parts(parts)
    assert classify_metric(lambda output, batch: output.sum(1).mean(), parts) == "mean"


def test_a_metric_that_looks_like_a_mean_at_first_is_found_out_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 0 are left out; the first batches have none."""
    monkeypatch.setattr("echelon.engine.evaluation_sums._SMALL_SET_BYTES", 0)

    def kept(output: Tensor, batch: Any) -> Tensor:
        some = batch[0][:, 0] != 0
        return output[some].mean()

    values = numbers(96, 8)
    values[70:78, 0] = 0
    data = torch.utils.data.TensorDataset(values, classes(96))
    with Run(mlp(data=data, eval_data=data, batch_size=8, metrics={"kept": kept}), Plan(), World()) as run:
        found = run.evaluate()
        run.model.eval()
        with torch.no_grad():
            assert found["kept"] == pytest.approx(float(kept(run.model(values), (values, None))), rel=1e-6)
        assert run.evaluator.metric_kinds == {"kept": "whole"}


def smoothed_in_training(output: Tensor, batch: Any) -> Tensor:
    """Asks whether gradients are wanted, as some losses do that smooth labels in training alone."""
    return F.cross_entropy(output, batch[-1], label_smoothing=0.3 if torch.is_grad_enabled() else 0.0)


def test_a_loss_that_asks_for_gradients_sees_an_evaluation() -> None:
    data = torch.utils.data.TensorDataset(numbers(53, 8), classes(53))
    job = mlp(data=data, eval_data=data, batch_size=8, loss=smoothed_in_training)
    with Run(job, Plan(), World()) as run, torch.no_grad():
        found = run.evaluate()["loss"]
        run.model.eval()
        assert found == pytest.approx(float(F.cross_entropy(run.model(data.tensors[0]), data.tensors[-1])), rel=1e-6)


def scaled_in_place(output: Tensor, batch: Any) -> Tensor:
    """Edits the model's output, which metrics then see."""
    return F.cross_entropy(output.div_(2.0), batch[-1])


def test_a_loss_that_edits_the_output_does_so_once() -> None:
    data = torch.utils.data.TensorDataset(numbers(53, 8), classes(53))
    job = mlp(
        data=data, eval_data=data, batch_size=8, loss=scaled_in_place, metrics={"size": lambda o, _: o.abs().mean()}
    )
    with Run(job, Plan(), World()) as run, torch.no_grad():
        found = run.evaluate()
        run.model.eval()
        output = run.model(data.tensors[0]) / 2
        assert found["loss"] == pytest.approx(float(F.cross_entropy(output, data.tensors[-1])), rel=1e-6)
        assert found["size"] == pytest.approx(float(output.abs().mean()), rel=1e-6)


def sometimes(output: Tensor, batch: Any) -> Tensor:
    """Averages over what a mask leaves, and over nothing readable where that is nothing."""
    counted = batch[-1] == 1
    return F.cross_entropy(output[counted], batch[-1][counted]) if counted.any() else (output * 0).sum()


def two_counts(output: Tensor, batch: Any) -> Tensor:
    """Two averages over unequal counts, the first of which is zero in some batches."""
    counted = (batch[-1] == 1).to(output.dtype)
    return (output[:, 0] * counted).sum() / counted.sum().clamp(min=1) + F.cross_entropy(output, batch[-1])


@pytest.mark.parametrize("loss", [sometimes, two_counts])
def test_a_loss_without_a_common_weight_counts_by_samples(loss: Any) -> None:
    data = torch.utils.data.TensorDataset(numbers(53, 8), classes(53).sort().values)
    job = mlp(data=data, eval_data=data, batch_size=8, loss=loss)
    with Run(job, Plan(), World()) as run, torch.no_grad():
        found = run.evaluate()["loss"]
        run.model.eval()
        total = 0.0
        for first in range(0, 53, 8):
            batch = [each[first : first + 8] for each in data.tensors]
            total += float(loss(run.model(batch[0]), batch)) * len(batch[0])
    assert found == pytest.approx(total / 53, rel=1e-5)


def edits_labels(output: Tensor, batch: Any) -> Tensor:
    batch[-1].add_(1).remainder_(4)
    return F.cross_entropy(output, batch[-1])


def test_a_loss_that_edits_the_batch_does_so_once() -> None:
    data = torch.utils.data.TensorDataset(numbers(53, 8), classes(53))
    job = mlp(
        data=data, eval_data=data, batch_size=8, loss=edits_labels, metrics={"label": lambda _, b: b[-1].float().mean()}
    )
    with Run(job, Plan(), World()) as run:
        found = run.evaluate()["label"]
    assert found == pytest.approx(float(((data.tensors[-1] + 1) % 4).float().mean()), rel=1e-6)
