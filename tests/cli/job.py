"""A job that trains in a second, for the verbs' tests."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import echelon


def job() -> echelon.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    return echelon.Job(
        name="small",
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
        loss=lambda output, batch: F.mse_loss(output, batch[-1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=TensorDataset(x, x.sum(1, keepdim=True)),
        batch_size=16,
        epochs=3,
    )
