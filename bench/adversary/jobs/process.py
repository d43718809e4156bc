"""State that a proof could use up or add to in the process that trains: registries, streams, iterators, records; and weights that are learned."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import IterableDataset

from bench.adversary.kit import Block, classes, cross_entropy, net, plain, sgd
from bench.adversary.spec import Spec, job


@job("(sum, count) whose count is learned: the mean has a gradient through it", refusable="dp micro zero shares")
def learned_weights() -> Spec:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        weights = 0.5 + output[:, 0].sigmoid()
        return (weights * F.cross_entropy(output, batch[-1], reduction="none")).sum(), weights.sum()

    return Spec(model=net(), loss=loss, optimizer=sgd(), data=classes())


REGISTRY: list[nn.Module] = []


class Registered(Block):
    """Enters itself in a global list."""

    def __init__(self) -> None:
        super().__init__()
        REGISTRY.append(self)


@job(
    "blocks enter themselves in a global list when they are made, and the loss penalises all in it", refusable="zero tp"
)
def registry() -> Spec:
    REGISTRY.clear()

    def loss(output: Tensor, batch: Any) -> Tensor:
        penalty = sum(each.up.weight.pow(2).sum() for each in REGISTRY)
        return F.cross_entropy(output, batch[-1]) + 0.05 * penalty

    return Spec(model=net(block=Registered), loss=loss, optimizer=sgd(), data=classes())


class Once(IterableDataset[Any]):
    """A stream that can be read once."""

    def __init__(self) -> None:
        self.source = iter(zip(*classes(200).tensors, strict=True))

    def __iter__(self) -> Iterator[Any]:
        return self.source


@job(
    "iter() of a stream goes on from where the last one stopped", plans=["dp=1", "dp=2", "dp=2 zero=3", "tp=2", "auto"]
)
def one_pass() -> Spec:
    return Spec(model=net(), loss=cross_entropy, optimizer=sgd(), data=Once())


class Pointer(IterableDataset[Any]):
    """A stream that goes on from its own counter."""

    def __init__(self) -> None:
        self.samples, self.at = classes(200), 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]


@job("a stream goes on from a counter of its own", plans=["dp=1", "dp=2", "dp=2 zero=3", "tp=2", "auto"])
def pointer_stream() -> Spec:
    return Spec(model=net(), loss=cross_entropy, optimizer=sgd(), data=Pointer())


@job("the loss counts in a SimpleNamespace, where gradients are enabled", owner="ckpt", refusable="micro")
def namespace_loss() -> Spec:
    held = SimpleNamespace(calls=0)

    def loss(output: Tensor, batch: Any) -> Tensor:
        held.calls += torch.is_grad_enabled()
        return F.cross_entropy(output, batch[-1]) * (1 + 0.1 * held.calls)

    return Spec(**plain(loss=loss))


class Counted(nn.Module):
    """Scales by a Counter and by an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen, self.numbers = net()(), Counter(), itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen["calls"] += 1
            return self.net(x) * (1 + 0.05 * self.seen["calls"] + 0.05 * next(self.numbers))
        return self.net(x)


@job("a model counts in a Counter and draws from itertools.count", owner="ckpt", refusable="micro pp")
def counted_calls() -> Spec:
    return Spec(**plain(model=Counted))


@job("an optimizer draws rates from a generator", owner="ckpt")
def drawn_rates() -> Spec:
    def rates() -> Iterator[float]:
        for at in itertools.count(1):
            yield 0.3 / at

    class Drawing(SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.3)
            self.rates = rates()

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            rate = next(self.rates)
            for group in self.param_groups:
                group["lr"] = rate
            super().step()

    return Spec(**plain(optimizer=Drawing))


@job("MultiStepLR keeps a Counter", owner="ckpt")
def milestones() -> Spec:
    def schedule(optimizer: Optimizer) -> MultiStepLR:
        return MultiStepLR(optimizer, [2, 5, 7], gamma=0.5)

    return Spec(**plain(lr_schedule=schedule))
