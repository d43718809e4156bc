"""Jobs whose losses average over unequal counts, and a plain loop that trains each on whole batches. Runs inside rank processes too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.engine.run import Run
from echelon.errors import EchelonError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.testing.models import MLP
from echelon.world import World


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _labels(count: int, *, void: float, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count, 3), generator=draw)
    return labels.masked_fill(torch.rand(count, 3, generator=draw) < void, -100)


def _rare() -> Tensor:
    """Void labels in one sample of the second batch only."""
    labels = _labels(40, void=0.0)
    labels[21, 1:] = -100
    return labels


class Tagger(nn.Module):
    """Three labels for each sample. `loss` is its own, as HF models have one."""

    def __init__(self, own: Callable[[Tensor, Tensor], Tensor] | None = None, norm: bool = False) -> None:
        super().__init__()
        self.body = MLP(width=12, layers=2, inputs=8, classes=12, norm=norm)
        self.own = own

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.body(x).view(len(x), 3, 4)
        return scores if self.own is None or labels is None else SimpleNamespace(loss=self.own(scores, labels))


def _rows(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")


def _mean(scores: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), **options)


def _ctc(scores: Tensor, labels: Tensor) -> Tensor:
    lengths = (labels != -100).sum(1)
    time = scores.new_zeros(7, len(scores), 4) + scores.mean(1)
    scores = F.pad(time, (0, 1)).log_softmax(-1)
    return F.ctc_loss(scores, labels.clamp(min=0), torch.full((len(labels),), 7), lengths, blank=4, zero_infinity=True)


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5])


def _job(loss: Callable[[Tensor, Tensor], Any] | None = None, *, labels: Tensor | None = None, **changes: Any) -> Job:
    labels = _labels(40, void=0.3) if labels is None else labels
    job = Job(
        model=Tagger,
        loss=None if loss is None else lambda output, batch: loss(output, batch[-1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9),
        data=TensorDataset(_numbers(40, 8), labels),
        batch_size=16,
        epochs=1,
    )
    return replace(job, **changes)


class Rows(TensorDataset):
    """Samples as dicts, for models that have their own loss."""

    def __getitem__(self, index: int) -> Any:
        x, labels = super().__getitem__(index)
        return {"x": x, "labels": labels}


def _own(loss: Callable[[Tensor, Tensor], Tensor], labels: Tensor | None = None) -> Job:
    labels = _labels(40, void=0.3) if labels is None else labels
    return _job(model=lambda: Tagger(loss), data=Rows(_numbers(40, 8), labels))


class Penalised(Tagger):
    """Adds a penalty on a parameter, which does not depend on the counts, to its own loss."""

    def __init__(self) -> None:
        super().__init__(_mean)
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.body(x).view(len(x), 3, 4) + self.shift
        return SimpleNamespace(loss=_mean(scores, labels) + 0.1 * self.shift.square().sum())


def _nothing(scores: Tensor, labels: Tensor) -> Any:
    """(sum, count) with plain zeros where there is nothing to count."""
    counted = labels != -100
    return (_rows(scores, labels).sum(), counted.sum()) if counted.any() else (0, 0)


def _one_sided() -> Tensor:
    labels = _labels(40, void=0.3)
    labels[torch.arange(40) % 5 > 0] = -100
    return labels


def _few_positives() -> Tensor:
    """Positives in two samples: many parts, and at least one whole batch, have none."""
    labels = torch.zeros(40, 3, dtype=torch.int64)
    labels[7, 1], labels[30] = 1, 1
    return labels


def _few_missing() -> Tensor:
    """Nearly all labels count, but in a few samples of the second batch."""
    labels = _labels(40, void=0.0)
    labels[[5, 17, 21, 22, 28, 33], :] = -100
    return labels


def _by_positives(scores: Tensor, labels: Tensor) -> Tensor:
    """A sum over all labels, divided by those that are positive."""
    return 0.1 * _rows(scores, labels).sum() / (labels == 1).sum().clamp(min=1)


def _at_least_ten(scores: Tensor, labels: Tensor) -> Tensor:
    return _rows(scores, labels).sum() / (labels != -100).sum().clamp(min=10)


def _reciprocal(scores: Tensor, labels: Tensor) -> Tensor:
    """Divided by the count through a factor, which is zero where nothing counts."""
    count = (labels != -100).sum().to(scores)
    return _rows(scores, labels).sum() * torch.where(count > 0, 1 / count.clamp(min=1), torch.zeros_like(count))


def _of_samples(scores: Tensor, labels: Tensor) -> list[Tensor]:
    """The mean over the labels of each sample that count; nothing for a sample without any."""
    counted = labels != -100
    each = _rows(scores, labels).view_as(labels)
    return [(row * mask).sum() / mask.sum() for row, mask in zip(each, counted, strict=True) if mask.any()]


def _mean_of_list(scores: Tensor, labels: Tensor) -> Any:
    found = _of_samples(scores, labels)
    return sum(found) / len(found)


def _tasks(scores: Tensor, labels: Tensor, *, last: Callable[[Tensor], Tensor]) -> Tensor:
    """Twelve averages over the labels that count, or over those that `last` counts in the last of them."""
    total, counted = scores.new_zeros(()), (labels != -100).any(1)
    for task in range(12):
        mask = counted if task < 11 else last(counted)
        total = total + (scores[:, task % 3, task % 4].square() * mask).sum() / mask.sum()
    return total


def _ten_void() -> Tensor:
    """Labels of one sample in four do not count; no part is without any."""
    labels = _labels(40, void=0.0)
    labels[::4] = -100
    return labels


def _short() -> Tensor:
    """One label in nine does not count; every sample has some."""
    labels = _labels(40, void=0.0)
    labels[::3, 0] = -100
    return labels


JOBS: dict[str, Callable[[], Job]] = {
    "summed over number": lambda: _job(lambda s, y: _mean(s, y, reduction="sum") / (y != -100).sum()),
    "reciprocal": lambda: _job(_reciprocal, labels=_one_sided()),
    "many tasks": lambda: _job(partial(_tasks, last=lambda counted: counted), labels=_ten_void()),
    "a list of samples": lambda: _job(lambda s, y: torch.stack(_of_samples(s, y)).mean(), labels=_ten_void()),
    "a list of one sample": lambda: _job(_mean_of_list, labels=_short(), batch_size=4),
    "sum and at least one": lambda: _job(
        lambda s, y: (_rows(s, y).sum(), (y != -100).sum().clamp(min=1)), labels=_one_sided()
    ),
    "sum over all and at least two": lambda: _job(
        lambda s, y: (s.square().sum(), (y == 1).sum().clamp(min=2)), labels=_few_positives()
    ),
    "zero where nothing counts": lambda: _job(
        lambda s, y: _mean(s, y) if (y != -100).any() else s.sum() * 0, labels=_one_sided()
    ),
    "by positives": lambda: _job(_by_positives, labels=_few_positives()),
    "a minimum of ten": lambda: _job(_at_least_ten, labels=_few_missing()),
    "a negative factor": lambda: _job(
        lambda s, y: -1.0 * (s[..., 0] * (y != -100)).sum() / (y != -100).sum().clamp(min=1), labels=_one_sided()
    ),
    "ignored": lambda: _job(_mean),
    "rarely ignored": lambda: _job(_mean, labels=_rare()),
    "class weights": lambda: _job(lambda s, y: _mean(s, y, weight=CLASS_WEIGHTS.to(s))),
    "smoothed": lambda: _job(lambda s, y: _mean(s, y, label_smoothing=0.1)),
    "selected": lambda: _job(lambda s, y: _rows(s, y)[y.flatten() != -100].mean()),
    "sum over mask": lambda: _job(lambda s, y: (_rows(s, y) * (y.flatten() != -100)).sum() / (y != -100).sum()),
    "a sum over nothing": lambda: _job(
        lambda s, y: (_rows(s, y) * (y.flatten() != -100)).sum() / (y != -100).sum(), labels=_one_sided()
    ),
    "sum over number": lambda: _job(lambda s, y: _rows(s, y).sum() / int((y != -100).sum())),
    "penalty": lambda: _job(model=Penalised, data=Rows(_numbers(40, 8), _labels(40, void=0.3))),
    "short parts": lambda: _job(lambda s, y: _mean(s, y, weight=CLASS_WEIGHTS.to(s)), batch_size=15),
    "batch norm": lambda: _job(_mean, model=lambda: Tagger(norm=True)),
    "own": lambda: _own(_mean),
    "own, rarely ignored": lambda: _own(_mean, _rare()),
    "own ctc": lambda: _own(_ctc, _labels(40, void=0.0)),
    "nothing on a rank": lambda: _job(_nothing, labels=_one_sided()),
    "a mean of nothing": lambda: _job(_mean, labels=_one_sided()),
}


REFUSED: dict[str, Callable[[], Job]] = {
    "many tasks": lambda: _job(partial(_tasks, last=torch.ones_like), labels=_ten_void()),
    "two counts": lambda: _job(lambda s, y: _mean(s, y) + s.square().mean()),
    "a factor of its own": lambda: _job(
        lambda s, y: _mean(s, y.clamp(min=0)) + float(s.detach().std()) * s.square().mean()
    ),
    "a term on some parts": lambda: _job(
        lambda s, y: _mean(s, y.clamp(min=0)) + (s.square().mean() if (y == -100).sum() > 2 else 0.0)
    ),
}


def by_hand(name: str) -> dict[str, Any]:
    """Train on whole batches: a model, a loss, an optimizer and nothing else."""
    job = JOBS[name]()
    run = Run(job, from_text("dp=1"), World(), dtype=torch.float64)
    model = copy.deepcopy(run.model)
    batches = [run.move_batch(micro.batch) for step in run.batches() for micro in step.micro_batches]
    run.close()
    optimizer: Any = job.optimizer(model.parameters())
    losses = []
    for batch in batches:
        if isinstance(batch, dict):
            loss = model(**batch).loss
        else:
            assert job.loss is not None
            found = job.loss(model(batch[0]), batch)
            loss = found[0] / found[1] if isinstance(found, tuple) else found
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "parameters": {name: value.detach() for name, value in model.named_parameters()}}


def trained(world: World, names: list[str], plan: str, *, jobs: dict[str, Callable[[], Job]] = JOBS) -> dict[str, Any]:
    """Each job under a plan: losses and parameters, or the error."""
    found: dict[str, Any] = {}
    for name in names:
        job = jobs[name]()
        try:
            run = Run(job, complete(from_text(plan), job), world, dtype=torch.float64)
        except EchelonError as error:
            found[name] = str(error)
            continue
        try:
            losses = [float(run.step(batch).loss) for batch in run.batches()]
            state = run.gather_full_state()
            found[name] = {"losses": losses} | ({} if state is None else {"parameters": state.parameters})
        except EchelonError as error:
            found[name] = f"{type(error).__name__}: {error}"
        run.close()
    return found
