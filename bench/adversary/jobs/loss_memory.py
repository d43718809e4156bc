"""Losses that keep something for each sample, or for nobody, between calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from bench.adversary.kit import CLASSES, classes, net, sgd
from bench.adversary.spec import Spec, job

#: Ranks call the loss with their own samples only, for DDP as well.
PARTED = "dp zero shares"
SAMPLES = 32


class Indexed(Dataset[Any]):
    """Samples with their indices."""

    def __init__(self) -> None:
        self.x, self.y = classes(SAMPLES).tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


def features(batch: Any) -> Any:
    return (batch[1],), {}


def indexed(loss: Any) -> Spec:
    """Four epochs."""
    return Spec(model=net(), loss=loss, optimizer=sgd(0.5), data=Indexed(), inputs=features, steps=16)


class Elr:
    """Early-learning regularization: a moving average of each sample's prediction."""

    def __init__(self) -> None:
        self.memory = torch.zeros(SAMPLES, CLASSES, dtype=torch.float64)

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        index, p = batch[0], output.softmax(-1)
        self.memory[index] = 0.7 * self.memory[index] + 0.3 * p.detach()
        penalty = (1 - (self.memory[index] * p).sum(-1)).clamp_min(1e-4).log().mean()
        return F.cross_entropy(output, batch[-1]) + 3 * penalty


@job("the loss object keeps a moving average of each sample's prediction (ELR)", refusable=PARTED)
def elr_object() -> Spec:
    return indexed(Elr())


PRIOR: dict[int, float] = {}


def self_paced(output: Tensor, batch: Any) -> Tensor:
    each = F.cross_entropy(output, batch[-1], reduction="none")
    weights = torch.tensor([1 / (1 + PRIOR.get(int(i), 0.0)) for i in batch[0]], dtype=torch.float64)
    PRIOR.update({int(i): float(value.detach()) for i, value in zip(batch[0], each, strict=True)})
    return (weights * each).mean()


@job("a global dict of each sample's last loss weighs it in the next epoch (self-paced learning)", refusable=PARTED)
def prior_dict() -> Spec:
    PRIOR.clear()
    return indexed(self_paced)


class Logging:
    """Keeps every loss for a plot, and the output of the last batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.last: Tensor | None = None

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        value = F.cross_entropy(output, batch[-1])
        self.losses.append(float(value.detach()))
        self.last = output.detach()
        return value


@job("a loss object that logs its values and never reads them")
def log_list() -> Spec:
    return indexed(Logging())
