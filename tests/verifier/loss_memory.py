"""Losses that keep state between calls, proved on every rank of the pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.verifier.verify import verify
from echelon.world import World

SAMPLES, CLASSES = 32, 4
_DRAW = torch.Generator().manual_seed(1)
DATA = TensorDataset(
    torch.arange(SAMPLES),
    torch.randn(SAMPLES, 8, generator=_DRAW),
    torch.randint(0, CLASSES, (SAMPLES,), generator=_DRAW),
)


class Elr:
    """A moving average of each sample's prediction, and a log that nobody reads."""

    def __init__(self) -> None:
        self.memory, self.log = torch.zeros(SAMPLES, CLASSES), list[float]()

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        index, p = batch[0], output.softmax(-1)
        self.memory[index] = 0.7 * self.memory[index] + 0.3 * p.detach()
        value = F.cross_entropy(output, batch[-1]) - 3 * (self.memory[index] * p).sum(-1).mean()
        self.log.append(float(value.detach()))
        return value


class Logging:
    """Keeps every loss and the last output, and reads neither."""

    def __init__(self) -> None:
        self.log, self.last = list[float](), None

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        value = F.cross_entropy(output, batch[-1])
        self.log.append(float(value.detach()))
        self.last = output.detach()  # type: ignore[assignment]
        return value


class Masked:
    """Makes a mask for the size of its first batch: with another rank's it may fail, which shows nothing."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(len(output), dtype=output.dtype)
        return (F.cross_entropy(output, batch[-1], reduction="none") * self.mask).mean()


PRIOR: dict[int, float] = {}


def self_paced(output: Tensor, batch: Any) -> Tensor:
    """A global dict of each sample's last loss weighs it in the next epoch."""
    each = F.cross_entropy(output, batch[-1], reduction="none")
    weights = torch.tensor([1 / (1 + PRIOR.get(int(i), 0.0)) for i in batch[0]], dtype=output.dtype)
    PRIOR.update({int(i): float(value.detach()) for i, value in zip(batch[0], each, strict=True)})
    return (weights * each).mean()


class Ranked:
    """Keeps each sample's loss relative to its batch: parts of a batch leave other values than the whole."""

    def __init__(self) -> None:
        self.relative: dict[int, float] = {}

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        each = F.cross_entropy(output, batch[-1], reduction="none")
        weights = torch.tensor([self.relative.get(int(i), 1.0) for i in batch[0]], dtype=output.dtype)
        found = (each / each.mean()).detach()
        self.relative.update({int(i): float(value) for i, value in zip(batch[0], found, strict=True)})
        return (weights * each).mean()


FEATURES: dict[str, Tensor] = {}


class Hooked(nn.Sequential):
    """A forward hook leaves features in a global, which the loss reads: every rank has those of its own samples."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self[1].register_forward_hook(lambda _, __, output: FEATURES.update(last=output))


def with_features(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[-1]) + 0.1 * FEATURES["last"].square().mean()


class Inputs:
    """`inputs=` scales each sample by how often it was seen."""

    def __init__(self) -> None:
        self.seen = torch.zeros(SAMPLES)

    def __call__(self, batch: Any) -> Any:
        self.seen[batch[0]] += 1
        return (batch[1] * self.seen[batch[0], None],), {}


def make(name: str) -> Job:
    """The job of that name."""
    losses = {"elr": Elr, "log": Logging, "mask": Masked, "ranked": Ranked}
    plain = {"prior": self_paced, "features": with_features}
    PRIOR.clear()
    return Job(
        model=Hooked if name == "features" else lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
        loss=losses[name]() if name in losses else plain.get(name, lambda output, batch: F.cross_entropy(output, batch[-1])),
        inputs=Inputs() if name == "inputs" else lambda batch: ((batch[1],), {}),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.3),
        data=DATA, batch_size=8, epochs=4,
    )  # fmt: skip


def proved(world: World, name: str, plan: str) -> str:
    """What the certificate calls divergent; empty: it is verified."""
    job = make(name)
    certificate = verify(job, complete(from_text(plan), job), world=world)
    kept = job.loss
    assert not getattr(kept, "log", []), "trials leave no trace"
    return certificate.divergent
