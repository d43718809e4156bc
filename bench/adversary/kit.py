"""Small float64 models, data and optimizers that the jobs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

#: Not a multiple of the batch of 8: every epoch ends with a batch of 6.
SAMPLES, WIDTH, CLASSES = 30, 8, 4


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal float64 values that no global generator influences."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 2) -> Tensor:
    """Whole numbers below `high`."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def classes(samples: int = SAMPLES, *, seed: int = 1) -> TensorDataset:
    """(features, class) pairs."""
    return TensorDataset(numbers(samples, WIDTH, seed=seed), integers(CLASSES, samples, seed=seed + 1))


def held_out() -> TensorDataset:
    """11 evaluation samples, which no number of ranks divides."""
    return classes(11, seed=77)


class Samples(Dataset[Any]):
    """A list as a data set: samples of any kind."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Block(nn.Module):
    """A residual two-layer perceptron."""

    def __init__(self, width: int = WIDTH, hidden: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Residual blocks and a head: something to cut for tp, pp and zero alike."""

    def __init__(self, outputs: int = CLASSES, depth: int = 4, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(outputs: int = CLASSES, depth: int = 4, block: Callable[[], nn.Module] = Block) -> Callable[[], nn.Module]:
    """A factory of `Net` in float64."""
    return lambda: Net(outputs, depth, block).double()


def sgd(lr: float = 0.1, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory of plain SGD."""
    return lambda params: torch.optim.SGD(params, lr=lr, **options)


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    """The mean over the batch."""
    return F.cross_entropy(output, batch[-1])


def accuracy(output: Tensor, batch: Any) -> Tensor:
    """The share of right classes."""
    return (output.argmax(-1) == batch[-1]).double().mean()


def plain(**changes: Any) -> dict[str, Any]:
    """Keyword arguments of a harmless job, of which a hostile one changes a few."""
    usual = {
        "model": net(), "loss": cross_entropy, "optimizer": sgd(), "data": classes(),
        "eval_data": held_out(), "metrics": {"accuracy": accuracy},
    }  # fmt: skip
    return usual | changes
