"""What crosses a stage boundary: skips, containers, dataclasses, None, generators."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.adversary.kit import CLASSES, WIDTH, Block, Net, net, plain
from bench.adversary.spec import Spec, job


class Skips(Net):
    """A U-net: each block's input is added at its mirror."""

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks[:2]:
            kept.append(x)
            x = block(x)
        for block in self.blocks[2:]:
            x = block(x) + kept.pop()
        return self.head(x)


@job("skip connections over stage boundaries (U-net)", owner="cuts")
def skips() -> Spec:
    return Spec(**plain(model=lambda: Skips().double()))


@dataclasses.dataclass
class State:
    """What a block hands on."""

    x: Tensor
    total: Tensor
    note: str = ""
    extra: Tensor | None = None


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: State) -> State:
        x = self.block(state.x)
        return State(x, state.total + x.pow(2).mean(-1), state.note + "+")


class Dataclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Passing() for _ in range(4)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = State(x, x.sum(-1) * 0)
        for block in self.blocks:
            state = block(state)
        return self.head(state.x) * (1 + state.total[:, None] * len(state.note) * 0.01)


@job("blocks hand on a dataclass with a tensor, a string and None", owner="cuts")
def dataclass_between() -> Spec:
    return Spec(**plain(model=lambda: Dataclasses().double()))


@job("the model returns a dataclass", owner="cuts")
def dataclass_output() -> Spec:
    class Output(Net):
        def forward(self, x: Tensor) -> Any:
            return State(super().forward(x), x.sum(-1))

    return Spec(
        **plain(
            model=lambda: Output().double(),
            loss=lambda output, batch: nn.functional.cross_entropy(output.x, batch[-1]),
            metrics={"accuracy": lambda output, batch: (output.x.argmax(-1) == batch[-1]).double().mean()},
        )
    )


class WithNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
        x = self.block(x if memory is None else x + 0.1 * memory)
        return x, (x if memory is None else None), None


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(WithNone() for _ in range(4)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        memory = None
        for block in self.blocks:
            x, memory, _ = block(x, memory)
        return self.head(x)


@job("tuples with None, in alternating places", owner="cuts")
def tuples_with_none() -> Spec:
    return Spec(**plain(model=lambda: Tuples().double()))


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@job("blocks hand on a named tuple", owner="cuts")
def named_tuple_between() -> Spec:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, point: Point) -> Point:
            return Point(torch.tanh(self.one(point.x)) + point.y, torch.tanh(self.two(point.y)) + point.x)

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Step() for _ in range(4)), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            point = Point(x, x * 0.5)
            for block in self.blocks:
                point = block(point)
            return self.head(point.x + point.y)

    return Spec(**plain(model=lambda: Steps().double()))


@job("the model returns an OrderedDict with a number and None", owner="cuts")
def dict_output() -> Spec:
    class Output(Net):
        def forward(self, x: Tensor) -> Any:
            return OrderedDict(logits=super().forward(x), depth=len(self.blocks), cache=None)

    return Spec(
        **plain(
            model=lambda: Output().double(),
            loss=lambda output, batch: nn.functional.cross_entropy(output["logits"], batch[-1]),
            metrics={},
        )
    )


@job("the loss reads features of an early block", owner="cuts")
def deep_supervision() -> Spec:
    class Output(Net):
        def forward(self, x: Tensor) -> Any:
            found = []
            for block in self.blocks:
                x = block(x)
                found.append(self.head(x))
            return found

    return Spec(
        **plain(
            model=lambda: Output().double(), metrics={},
            loss=lambda output, batch: sum(nn.functional.cross_entropy(each, batch[-1]) for each in output),
        )
    )  # fmt: skip


@job("the loss reads the batch's input as well as the output (autoencoder)", owner="cuts")
def autoencoder() -> Spec:
    return Spec(
        **plain(
            model=net(WIDTH), metrics={},
            loss=lambda output, batch: (output - batch[0]).pow(2).mean(-1).mean(),
        )
    )  # fmt: skip


@job("forward is a loop over a generator", owner="cuts")
def generator_inside() -> Spec:
    class Lazy(Net):
        def states(self, x: Tensor) -> Iterator[Tensor]:
            for block in self.blocks:
                x = block(x)
                yield x

        def forward(self, x: Tensor) -> Tensor:
            return self.head(sum(self.states(x)))

    return Spec(**plain(model=lambda: Lazy().double()))


@job("two towers whose outputs meet at the end", owner="cuts")
def two_towers() -> Spec:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Net(WIDTH, 2), Net(WIDTH, 2)
            self.head = nn.Bilinear(WIDTH, WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.left(x), self.right(x.flip(-1)))

    return Spec(**plain(model=lambda: Towers().double()))


@job("a metric that calls .item()", owner="cuts")
def item_in_metric() -> Spec:
    return Spec(
        **plain(metrics={"right": lambda output, batch: (output.argmax(-1) == batch[-1]).double().mean().item()})
    )


@job("integer and boolean tensors cross a boundary", owner="cuts")
def integers_between() -> Spec:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor, mask: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x = torch.where(mask[:, None], self.block(x), x)
            return x, ~mask, count + mask.long()

    class Routing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Routed() for _ in range(4)), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            mask, count = x[:, 0] > 0, torch.zeros(len(x), dtype=torch.long)
            for block in self.blocks:
                x, mask, count = block(x, mask, count)
            return self.head(x) * (1 + count[:, None])

    return Spec(**plain(model=lambda: Routing().double()))


@job("one block takes nearly all of the work; another has no parameters", owner="cuts")
def unequal_blocks() -> Spec:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Sequential(
                nn.Identity(), Net(WIDTH, 6), nn.Tanh(), nn.Identity(), nn.Linear(WIDTH, CLASSES)
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.stack(x)

    return Spec(**plain(model=lambda: Uneven().double()))


@job("a model that is one Linear", owner="cuts")
def nothing_to_cut() -> Spec:
    return Spec(**plain(model=lambda: nn.Linear(WIDTH, CLASSES).double()))
