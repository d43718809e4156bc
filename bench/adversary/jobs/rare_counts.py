"""Losses divided by counts that are equal in all parts of a batch, but for one late step: the first steps show a plain mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, default_collate

from bench.adversary.kit import CLASSES, WIDTH, Net, integers, net, numbers, sgd
from bench.adversary.spec import Spec, job

#: A batch in parts has another loss, for DDP as well.
COUPLED = "dp micro zero shares"
STEPS, BATCH = 20, 8
#: The step, counted from zero, whose parts have unequal counts: spot checks rarely fall on it.
RARE = 13
#: The samples of that step.
LATE = slice(RARE * BATCH, (RARE + 1) * BATCH)


class Rows(IterableDataset[Any]):
    """Samples in a fixed order, so that the rare ones share a batch."""

    def __init__(self, *columns: Sequence[Any] | Tensor) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*self.columns, strict=True)


def first_input(batch: Any) -> Any:
    return (batch[0],), {}


def rows(loss: Callable[[Any, Any], Any], *columns: Sequence[Any] | Tensor, **changes: Any) -> Spec:
    """A job over features and `columns`, of which the model sees the features."""
    data = Rows(numbers(STEPS * BATCH, WIDTH), *columns)
    usual: dict[str, Any] = {"model": net(), "optimizer": sgd(), "data": data, "steps": STEPS, "inputs": first_input}
    return Spec(loss=loss, **(usual | changes))


def labels() -> Tensor:
    return integers(CLASSES, STEPS * BATCH)


def weights(late: Sequence[float]) -> Tensor:
    """A weight of 1 for each sample, and `late` in the rare step."""
    found = torch.ones(STEPS * BATCH, dtype=torch.float64)
    found[LATE] = torch.tensor(late, dtype=torch.float64)
    return found


def each_of(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1], reduction="none")


def weighted_mean(minimum: float = 1.0) -> Callable[[Tensor, Any], Tensor]:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return (each_of(output, batch) * batch[2]).sum() / batch[2].sum().clamp(min=minimum)

    return loss


@job("a clamped count of labels: one part has none, late", refusable=COUPLED)
def part_without_labels() -> Spec:
    return rows(weighted_mean(), labels(), weights([0, 0, 0, 0, 1, 1, 1, 0]))


@job("a clamped count of labels: a whole batch has none, late", refusable=COUPLED)
def batch_without_labels() -> Spec:
    return rows(weighted_mean(), labels(), weights([0] * BATCH))


@job("a clamped sum of weights that is below one half in one part, late", refusable=COUPLED)
def fractional_weights() -> Spec:
    return rows(weighted_mean(), labels(), weights([0.1, 0, 0.2, 0, 1, 1, 0.5, 0]))


@job("every sample's loss over a clamped sum of weights that is below one in all parts, late", refusable=COUPLED)
def weights_below_one() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return each_of(output, batch).sum() / batch[2].sum().clamp(min=1)

    return rows(loss, labels(), weights([0, 0, 0, 0, 0.3, 0.2, 0.1, 0.2]))


@job("a count that is at least two: one part has one label, late", refusable=COUPLED)
def minimum_of_two() -> Spec:
    return rows(weighted_mean(2.0), labels(), weights([1, 0, 0, 0, 1, 1, 1, 0]))


@job("(sum, clamped count): one part has no label, late", refusable=COUPLED)
def sum_and_clamped_count() -> Spec:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return (each_of(output, batch) * batch[2]).sum(), batch[2].sum().clamp(min=1)

    return rows(loss, labels(), weights([0, 0, 0, 0, 1, 1, 1, 0]))


@job("(sum of all samples, clamped count of positives): a batch has no positive, late", refusable=COUPLED)
def sum_and_count_of_nothing() -> Spec:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return each_of(output, batch).sum(), batch[2].sum().clamp(min=1)

    return rows(loss, labels(), weights([0] * BATCH))


@job("a focal term by the count of positives and a plain mean: a batch has no positive, late", refusable=COUPLED)
def focal_and_mean() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output.sigmoid() ** 2).sum() / batch[2].sum().clamp(min=1) + each_of(output, batch).mean()

    return rows(loss, labels(), weights([0] * BATCH))


@job("a masked mean of confident samples and a plain mean (FixMatch): nothing is confident, late", refusable=COUPLED)
def fixmatch() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return weighted_mean()(output, batch) + output.pow(2).mean()

    return rows(loss, labels(), weights([0] * BATCH))


@job("a factor of 1 / count, or 0 where nothing counts: one part has no label, late", refusable=COUPLED)
def reciprocal_count() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        count = batch[2].sum()
        factor = torch.where(count > 0, 1 / count.clamp(min=1), torch.zeros_like(count))
        return (each_of(output, batch) * batch[2]).sum() * factor

    return rows(loss, labels(), weights([0, 0, 0, 0, 1, 1, 1, 0]))


@job("two terms over the same clamped count: one part has no label, late", refusable=COUPLED)
def shared_count() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        count = batch[2].sum().clamp(min=1)
        return (each_of(output, batch) * batch[2]).sum() / count + 0.3 * (output**2).sum(1).mul(batch[2]).sum() / count

    return rows(loss, labels(), weights([0, 0, 0, 0, 1, 0, 1, 0]))


@job("each class weighs 1 / its clamped count: a batch with a single positive, late", refusable=COUPLED)
def balanced_classes() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        positive, negative = batch[2], 1 - batch[2]
        balance = positive / positive.sum().clamp(min=1) + negative / negative.sum().clamp(min=1)
        return (each_of(output, batch) * balance).sum() / 2

    positives = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(STEPS * BATCH // 2)
    positives[LATE] = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1], dtype=torch.float64)
    return rows(loss, labels(), positives)


@job("zero where a part has no label, else the mean over its labels, late", refusable=COUPLED)
def zero_where_empty() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        chosen = batch[2] > 0
        return F.cross_entropy(output[chosen], batch[1][chosen]) if chosen.any() else output.sum() * 0

    return rows(loss, labels(), weights([0, 0, 0, 0, 1, 1, 1, 0]))


@job("the mean over chosen rows through nan_to_num: one part has none, late", refusable=COUPLED)
def nan_to_num() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return torch.nan_to_num(each_of(output, batch)[batch[2] > 0].mean())

    return rows(loss, labels(), weights([0, 0, 0, 0, 1, 1, 1, 0]))


@job("weights of zero in a sum over the number of samples: a plain mean")
def zero_weights() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return (each_of(output, batch) * batch[2]).sum() / len(output)

    return rows(loss, labels(), weights([0, 0, 1, 1, 1, 1, 0, 0]))


@job("the hardest sample decides from the thirteenth step on", refusable=COUPLED)
def late_max() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        found = each_of(output, batch)
        return found.mean() if batch[2].all() else found.max()

    return rows(loss, labels(), (torch.arange(STEPS * BATCH) < 12 * BATCH).double())


# Means inside of means


def lengths(late: Sequence[int]) -> Tensor:
    """A mask of `CLASSES` entries for each sample: all, and as many as `late` says in the rare step."""
    found = torch.full((STEPS * BATCH, 1), CLASSES)
    found[LATE] = torch.tensor(late)[:, None]
    return (torch.arange(CLASSES) < found).double()


def means_of_samples(output: Tensor, batch: Any) -> list[Tensor]:
    pairs = zip(output, batch[1], strict=True)
    return [((row - 1) ** 2 * mask).sum() / mask.sum().clamp(min=1) for row, mask in pairs]


@job("the mean of each sample's masked mean, in a Python loop: unequal lengths, late")
def mean_of_sample_means() -> Spec:
    mask = lengths([1, 1, 1, 4, 0, 4, 4, 4])
    return rows(lambda output, batch: torch.stack(means_of_samples(output, batch)).mean(), mask)


@job("the same as sum(list) / len(list)")
def list_of_sample_means() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        found = means_of_samples(output, batch)
        return torch.as_tensor(sum(found) / len(found))

    return rows(loss, lengths([1, 1, 1, 4, 4, 4, 4, 4]))


@job("each sample's masked mean, then a mean over the samples that have any: unequal, late", refusable=COUPLED)
def mean_of_labelled_samples() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        mask = batch[1]
        found = ((output - 1) ** 2 * mask).sum(1) / mask.sum(1).clamp(min=1)
        return found.sum() / mask.any(1).sum().clamp(min=1)

    return rows(loss, lengths([0, 0, 0, 0, 0, 4, 1, 4]))


@job("twelve tasks with missing labels (Tox21): some are missing late, in the last task", refusable=COUPLED)
def tox21() -> Spec:
    tasks = 12
    truth = (numbers(STEPS * BATCH, tasks, seed=5) > 0).double()
    mask = torch.ones_like(truth)
    mask[RARE * BATCH : RARE * BATCH + 3, tasks - 1] = 0

    def loss(output: Tensor, batch: Any) -> Tensor:
        total = output.new_zeros(())
        for task in range(tasks):
            found = F.binary_cross_entropy_with_logits(output[:, task], batch[1][:, task], reduction="none")
            total = total + (found * batch[2][:, task]).sum() / batch[2][:, task].sum().clamp(min=1)
        return total / tasks

    return rows(loss, truth, mask, model=net(tasks))


# Detection: divided by the number of boxes


def boxes() -> list[Tensor]:
    """Two boxes in each image; in the rare step four parts of two images have 1, 0, 3 and 1."""
    late = dict(zip(range(RARE * BATCH, (RARE + 1) * BATCH), (0, 1, 0, 0, 2, 1, 0, 1), strict=True))
    return [numbers(late.get(place, 2), CLASSES, seed=1000 + place) for place in range(STEPS * BATCH)]


def indexed_boxes(samples: list[Any]) -> dict[str, Tensor]:
    """The boxes of a batch in one tensor, with the image of each."""
    index = torch.cat([torch.full((len(found),), place) for place, (_, found) in enumerate(samples)])
    return {
        "x": torch.stack([x for x, _ in samples]),
        "index": index,
        "boxes": torch.cat([found for _, found in samples]),
    }


@job("a list of targets over the number of boxes (DETR): one part has a single box, late", refusable=COUPLED)
def detr() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        total = output.sum() * 0
        for row, found in zip(output, batch[1], strict=True):
            if len(found):
                total = total + (row[None] - found).abs().sum()
        return total / max(sum(len(found) for found in batch[1]), 1)

    def collate(samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples]), [found for _, found in samples]

    return rows(loss, boxes(), collate=collate)


@job("concatenated targets over the number of boxes (YOLO): one part has a single box, late", refusable=COUPLED)
def yolo_boxes() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output[batch["index"]] - batch["boxes"]).abs().sum() / max(len(batch["boxes"]), 1)

    return rows(loss, boxes(), collate=indexed_boxes, inputs=lambda batch: ((batch["x"],), {}))


@job("objectness of all cells over the number of boxes (YOLO): one part has a single box, late", refusable=COUPLED)
def yolo_objectness() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        target = torch.zeros_like(output)
        target[batch["index"], 0] = 1
        return F.binary_cross_entropy_with_logits(output, target, reduction="sum") / max(len(batch["index"]), 1)

    return rows(loss, boxes(), collate=indexed_boxes, inputs=lambda batch: ((batch["x"],), {}))


class MovingCount:
    """detectron2's RetinaNet: a moving average of the clamped counts divides."""

    def __init__(self) -> None:
        self.normalizer = 8.0

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        self.normalizer = 0.9 * self.normalizer + 0.1 * max(float(batch[2].sum()), 1.0)
        return each_of(output, batch).sum() / self.normalizer


@job("the loss keeps a moving average of clamped counts and divides by it (RetinaNet)", refusable=COUPLED)
def moving_count() -> Spec:
    return rows(MovingCount(), labels(), weights([0, 0, 0, 0, 1, 1, 1, 0]))


@job("the number of boxes by all_reduce over ranks, then clamped (DETR): a batch has one, late", refusable=COUPLED)
def detr_all_reduce() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        count, world = batch[2].sum().clone(), 1
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(count)
            world = dist.get_world_size()
        return (each_of(output, batch) * batch[2]).sum() / torch.clamp(count / world, min=1).item()

    return rows(loss, labels(), weights([0, 0, 0, 0, 1, 0, 0, 0]))


@job("a clamped count, and an all_reduce of the loss for the log: one part has one label, late", refusable=COUPLED)
def logged_all_reduce() -> Spec:
    log: list[float] = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        value = weighted_mean()(output, batch)
        mean = value.detach().clone().reshape(1)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        log.append(float(mean))
        return value

    return rows(loss, labels(), weights([0, 0, 0, 1, 1, 1, 1, 0]))


# Sums by torch's own reduction


def one_hot() -> Tensor:
    """One positive a sample, and none in three samples of the rare step."""
    found = F.one_hot(labels(), CLASSES).double()
    found[RARE * BATCH : RARE * BATCH + 3] = 0
    return found


@job("cross_entropy(reduction='sum') over the number of labels: some are ignored, late", refusable=COUPLED)
def cross_entropy_sum() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="sum") / (batch[1] != -100).sum().clamp(min=1)

    ignored = weights([0, 0, 0, 1, 1, 1, 1, 1]) == 0
    return rows(loss, labels().masked_fill(ignored, -100))


@job("l1_loss(reduction='sum') of chosen rows over their number (torchvision): unequal, late", refusable=COUPLED)
def l1_sum() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        chosen = batch[2] > 0
        return F.l1_loss(output[chosen], batch[1][chosen], reduction="sum") / max(1, int(chosen.sum()))

    return rows(loss, numbers(STEPS * BATCH, CLASSES, seed=6), weights([1, 0, 0, 0, 1, 1, 1, 0]))


@job("mse_loss(reduction='sum') of masked rows over their number: unequal, late", refusable=COUPLED)
def mse_sum() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        mask = batch[2][:, None]
        return F.mse_loss(output * mask, batch[1] * mask, reduction="sum") / batch[2].sum().clamp(min=1)

    return rows(loss, numbers(STEPS * BATCH, CLASSES, seed=6), weights([1, 0, 0, 0, 1, 1, 1, 0]))


@job("binary_cross_entropy(reduction='sum') over the number of positives: unequal, late", refusable=COUPLED)
def bce_sum() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, batch[1], reduction="sum") / batch[1].sum().clamp(min=1)

    return rows(loss, one_hot())


@job("class weights in the batch, as many as a part has samples: positives are unequal, late", refusable=COUPLED)
def class_weights_in_batch() -> Spec:
    balance = torch.tensor([0.5, 1, 2, 1], dtype=torch.float64)

    def loss(output: Tensor, batch: Any) -> Tensor:
        found = F.binary_cross_entropy_with_logits(output, batch[1], pos_weight=batch[2], reduction="sum")
        return found / batch[1].sum().clamp(min=1)

    return rows(loss, one_hot(), collate=lambda samples: (*default_collate(samples), balance))


@job("counts of labels in a Python list: one part has one, late", refusable=COUPLED)
def counts_in_list() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        mask = torch.tensor([min(count, 1) for count in batch[2]])
        return (each_of(output, batch) * mask).sum() / max(sum(batch[2]), 1)

    def collate(samples: list[Any]) -> Any:
        return *default_collate([each[:2] for each in samples]), [int(each[2]) for each in samples]

    return rows(loss, labels(), weights([0, 1, 0, 0, 1, 1, 1, 0]), collate=collate)


# Losses that models compute


class WithLoss(nn.Module):
    """Returns its masked loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()

    def forward(self, x: Tensor, truth: Tensor, mask: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        found = F.cross_entropy(logits, truth, reduction="none")
        return {"logits": logits, "loss": (found * mask).sum() / mask.sum().clamp(min=1)}


def own_loss(late: Sequence[float]) -> Spec:
    columns = labels(), weights(late)
    changes: dict[str, Any] = {"model": lambda: WithLoss().double(), "inputs": lambda batch: (batch, {})}
    return rows(lambda output, batch: output["loss"], *columns, **changes)


@job("the model computes its loss by a clamped count: one part has one label, late", refusable=COUPLED)
def loss_in_model() -> Spec:
    return own_loss([0, 1, 0, 0, 1, 1, 1, 0])


@job("the model computes its loss by a clamped count: one part has no label, late", refusable=COUPLED)
def empty_loss_in_model() -> Spec:
    return own_loss([0, 0, 0, 0, 1, 1, 1, 0])
