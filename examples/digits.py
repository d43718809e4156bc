"""Handwritten digits: scikit-learn's 1,797 real images of 8 x 8 pixels, a small convolutional net, 98 % right on new ones.

python examples/digits.py
torchrun --nproc-per-node 2 examples/digits.py
echelon train examples/digits.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import echelon


def convolution(inner: int, outer: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(4, outer), nn.ReLU()


def net() -> nn.Module:
    return nn.Sequential(
        *convolution(1, 16),
        *convolution(16, 16),
        nn.MaxPool2d(2),
        *convolution(16, 32),
        *convolution(32, 32),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images for training and for testing. The test takes every fifth image: always the same ones."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels, dtype=torch.long)
    test = torch.arange(len(targets)) % 5 == 0
    return TensorDataset(images[~test], targets[~test]), TensorDataset(images[test], targets[test])


def accuracy(output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    return (output.argmax(-1) == batch[-1]).float().mean()


def job() -> echelon.Job:
    train, test = digits()
    return echelon.Job(
        name="digits",
        model=net,
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda params: torch.optim.AdamW(params, weight_decay=0.05),
        lr_schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, steps),
        data=train,
        batch_size=64,
        epochs=12,
        eval_data=test,
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    echelon.train(job)
