"""Random samples for the zoo, always the same ones, and what most of its jobs have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.job import Job

#: Not a multiple of the batch, so that the last batch of an epoch is short: 8, 8, 5.
SAMPLES = 21


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int, low: int = 0, seed: int = 0) -> Tensor:
    """Whole numbers from `low` up to and without `high`: tokens, classes, lengths."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def train(**fields: Any) -> Job:
    """A job of two epochs in batches of 8 with AdamW, unless told otherwise."""
    given: dict[str, Any] = {"batch_size": 8, "epochs": 2, "optimizer": adamw}
    return Job(**given | fields)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)
