"""Jobs that depend on what surrounds the process: ranks, files, environment, time."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from bench.adversary.kit import Net, Samples, classes, cross_entropy, plain, sgd
from bench.adversary.spec import Spec, job


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@job("the learning rate depends on the rank", owner="watch", refusable="dp tp pp zero")
def rate_by_rank() -> Spec:
    return Spec(**plain(optimizer=lambda params: torch.optim.SGD(params, lr=0.1 / (1 + rank()))))


@job("the data depends on the rank", owner="watch", refusable="dp tp pp zero shares")
def data_by_rank() -> Spec:
    return Spec(**plain(data=classes(seed=1 + 10 * rank()), eval_data=None, metrics={}))


@job("one sample in the middle depends on the rank", owner="watch", refusable="dp tp pp zero shares")
def sample_by_rank() -> Spec:
    data = classes()
    data.tensors[0][13] += rank()
    return Spec(**plain(data=data, eval_data=None, metrics={}))


class ReadByRank(Dataset[tuple[Tensor, Tensor]]):
    """Samples of which one depends on the rank that reads it."""

    def __init__(self) -> None:
        self.samples = classes()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.samples[index]
        return (x + rank() if index == 13 else x), y


@job("one sample, read by code, depends on the rank", owner="watch", refusable="dp tp pp zero shares")
def read_by_rank() -> Spec:
    return Spec(**plain(data=ReadByRank(), eval_data=None, metrics={}))


@job("one sample of a Subset depends on the rank", owner="watch", refusable="dp tp pp zero shares")
def subset_by_rank() -> Spec:
    data = classes(120)
    data.tensors[0][61] += rank()
    return Spec(**plain(data=Subset(data, range(10, 110)), steps=12, eval_data=None, metrics={}))


@job("one pair of a plain list depends on the rank", owner="watch", refusable="dp tp pp zero shares")
def list_by_rank() -> Spec:
    x, y = classes(100).tensors
    x[50] += rank()
    return Spec(**plain(data=list(zip(x, y, strict=True)), steps=12, eval_data=None, metrics={}))


@job("one sample of a ConcatDataset depends on the rank", owner="watch", refusable="dp tp pp zero shares")
def concat_by_rank() -> Spec:
    data = classes(60)
    data.tensors[0][30] += rank()
    x, y = classes(40, seed=9).tensors
    joined: Dataset[Any] = ConcatDataset([data, Samples(list(zip(x, y, strict=True)))])
    return Spec(**plain(data=joined, steps=12, eval_data=None, metrics={}))


@job(
    "the loss is multiplied by the number of ranks, to undo DDP's mean", owner="watch", refusable="dp tp pp zero shares"
)
def loss_by_world() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return cross_entropy(output, batch) * world

    return Spec(**plain(loss=loss, eval_data=None, metrics={}))


@job("the loss draws from the operating system's entropy for its log", owner="gate")
def system_random() -> Spec:
    generator, log = random.SystemRandom(), list[float]()

    def loss(output: Tensor, batch: Any) -> Tensor:
        log.append(generator.random())
        return cross_entropy(output, batch)

    return Spec(**plain(loss=loss, eval_data=None, metrics={}))


@job("the model's depth depends on the rank", owner="watch", refusable="dp tp pp zero shares")
def depth_by_rank() -> Spec:
    return Spec(**plain(model=lambda: Net(depth=4 + rank()).double(), eval_data=None, metrics={}))


@job("initial values depend on the process", owner="inputs")
def initial_values_by_process() -> Spec:
    def model() -> nn.Module:
        made = Net().double()
        with torch.no_grad():
            made.head.bias.fill_(0.1 * rank())
        return made

    return Spec(**plain(model=model))


@job("the order of a set of strings decides the order of parameters", owner="inputs")
def parameters_in_hash_order() -> Spec:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = {"one", "two", "three", "four"}
            self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
            with torch.no_grad():
                for name in sorted(names):
                    generator = torch.Generator().manual_seed(len(name))
                    self.layers[name].weight.copy_(torch.randn(8, 8, generator=generator) * 0.2)
                    self.layers[name].bias.zero_()
            self.head = nn.Linear(8, 4)
            with torch.no_grad():
                self.head.weight.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(3)) * 0.3)
                self.head.bias.zero_()

        def forward(self, x: Tensor) -> Tensor:
            for name in sorted(self.layers):
                x = x + torch.tanh(self.layers[name](x))
            return self.head(x)

    return Spec(**plain(model=lambda: Named().double()))


@job(
    "a scale that follows Python's hash of a string",
    owner="watch",
    refusable="dp tp pp zero shares micro resume recompute",
)
def scale_by_hash() -> Spec:
    class Hashed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + hash("x") % 7)

    return Spec(**plain(model=lambda: Hashed().double()), check="consistent")


@job("a warning filter that turns warnings into errors", owner="gate")
def strict_warnings() -> Spec:
    import warnings

    class Strict(Net):
        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                return super().forward(x)

    return Spec(**plain(model=lambda: Strict().double()))


@job("deterministic algorithms are required by the job", owner="gate")
def deterministic_algorithms() -> Spec:
    def model() -> nn.Module:
        torch.use_deterministic_algorithms(True)
        return Net().double()

    return Spec(**plain(model=model))


@job("the job prints a lot, on both streams", owner="gate")
def noisy() -> Spec:
    class Noisy(Net):
        def forward(self, x: Tensor) -> Tensor:
            print("forward", tuple(x.shape))
            print("forward", file=sys.stderr)
            return super().forward(x)

    return Spec(**plain(model=lambda: Noisy().double()))


@job("the recursion limit is low and the model is deep", owner="gate")
def deep() -> Spec:
    return Spec(**plain(model=lambda: Net(depth=30).double(), optimizer=sgd(0.01)))


@job("gradients are switched off globally by an import", owner="gate")
def no_grad_around() -> Spec:
    def model() -> nn.Module:
        with torch.no_grad():
            return Net().double()

    return Spec(**plain(model=model))


@job(
    "the loss writes to a global list that the model reads",
    owner="verifier",
    refusable="micro pp dp zero shares resume tp recompute",
)
def through_globals() -> Spec:
    seen: list[float] = []

    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 0.1 * (seen[-1] if seen else 0.0))

    def loss(output: Tensor, batch: Any) -> Tensor:
        found = cross_entropy(output, batch)
        seen.append(float(found.detach()))
        return found

    return Spec(**plain(model=lambda: Reads().double(), loss=loss, eval_data=None, metrics={}))
