"""Tensors that a step changes outside the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from bench.adversary.kit import CLASSES, WIDTH, Net, cross_entropy, net, plain, sgd
from bench.adversary.spec import Spec, job

#: State that changes once per forward: with micro-batches a plain loop with accumulation differs from one whole batch as well.
PER_CALL = "micro pp"
#: The state depends on a batch's samples together; DDP keeps each rank's own.
PER_RANK = "dp micro zero shares"


class Observed(Net):
    """A net that passes its features through `observe` first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.observe(x))

    def observe(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class EmaCentre(Observed):
    """DINO: features are centred by a moving average of batch means."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def observe(self, x: Tensor) -> Tensor:
        out = x - self.centre
        if self.training:
            with torch.no_grad():
                self.centre.mul_(0.8).add_(x.mean(0), alpha=0.2)
        return out


@job("a moving average of batch means as a buffer (DINO centre), with a short last batch", refusable=PER_CALL)
def ema_centre() -> Spec:
    return Spec(**plain(model=lambda: EmaCentre().double()))


class Maximum(Observed):
    """Features divided by the largest absolute value seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def observe(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return x / self.largest


@job("a running maximum, read in the same forward (observer of quantisation)", refusable=PER_RANK)
def running_maximum() -> Spec:
    return Spec(**plain(model=lambda: Maximum().double()))


class LateMaximum(Observed):
    """The maximum is noted after use: a later step reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def observe(self, x: Tensor) -> Tensor:
        out = x / self.largest
        if self.training:
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return out


@job("a running maximum, read in the next step", refusable=PER_CALL)
def late_maximum() -> Spec:
    return Spec(**plain(model=lambda: LateMaximum().double()))


class Counter(Observed):
    """Counts the samples that it has seen; the scale follows the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def observe(self, x: Tensor) -> Tensor:
        out = x / (1 + self.seen / 100)
        if self.training:
            self.seen += len(x)
        return out


@job("an int64 count of samples: a sum over ranks, never a mean", refusable=PER_CALL)
def sample_counter() -> Spec:
    return Spec(**plain(model=lambda: Counter().double()))


class Calls(Observed):
    """Counts calls, not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def observe(self, x: Tensor) -> Tensor:
        out = x * (1 + self.calls / 50)
        if self.training:
            self.calls += 1
        return out


@job("a count of calls: the same on every rank, once per step", refusable=PER_CALL)
def call_counter() -> Spec:
    return Spec(**plain(model=lambda: Calls().double()))


class Periodic(Observed):
    """Takes the batch's mean off at every ninth call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def observe(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.calls += 1
        return x - x.mean(0) if int(self.calls) % 9 == 0 else x


@job("a counter couples the samples of a batch at every ninth call", owner="verifier", refusable=PER_RANK + " pp")
def periodic_coupling() -> Spec:
    return Spec(**plain(model=lambda: Periodic().double(), steps=24))


class ClassSums(Observed):
    """Running sums of features, read by the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def observe(self, x: Tensor) -> Tensor:
        out = x + 0.01 * self.total
        if self.training:
            with torch.no_grad():
                self.total += x.sum(0)
        return out


@job("a running sum over samples", refusable=PER_CALL)
def running_sum() -> Spec:
    return Spec(**plain(model=lambda: ClassSums().double()))


class Queue(Observed):
    """MoCo: a ring of the last features, written at a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(16, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def observe(self, x: Tensor) -> Tensor:
        out = x + 0.1 * (x @ self.ring.T).tanh() @ self.ring / 16
        if self.training:
            with torch.no_grad():
                at = (self.place + torch.arange(len(x))) % 16
                self.ring[at] = x
                self.place.add_(len(x)).remainder_(16)
        return out


@job("a queue of features with a pointer (MoCo)", refusable=PER_RANK)
def feature_queue() -> Spec:
    return Spec(**plain(model=lambda: Queue().double()))


class Codebook(Observed):
    """VQ-VAE with EMA updates: counts and sums per code."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(4))
        self.register_buffer("codes", start)
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", start.clone())

    def observe(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(-1)
        out = x + 0.5 * (self.codes[nearest] - x).detach()
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 6).to(x.dtype)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.T @ x, alpha=0.1)
                self.codes.copy_(self.sums / self.counts[:, None])
        return out


@job("a codebook by moving sums and counts (VQ-VAE)", refusable=PER_RANK)
def codebook() -> Spec:
    return Spec(**plain(model=lambda: Codebook().double()))


def spectral_net() -> nn.Module:
    model = Net()
    for block in model.blocks:
        parametrizations.spectral_norm(block.up)
    return model.double()


@job("spectral norm: power iteration once per forward", owner="cuts", refusable="micro pp tp")
def spectral_norm() -> Spec:
    return Spec(**plain(model=spectral_net, eval_data=None, metrics={}))


class Normed(nn.Module):
    """A block with batch norm."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16, **options), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


@job("batch norm: as DDP, each micro-batch is normalised by itself")
def batch_norm() -> Spec:
    return Spec(**plain(model=net(block=Normed)), splits=True)


@job("batch norm with momentum=None: a cumulative average that reads its counter")
def batch_norm_cumulative() -> Spec:
    return Spec(**plain(model=net(block=lambda: Normed(momentum=None))), splits=True)


class Sometimes(Normed):
    """Batch norm only for batches whose first feature is positive on average."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = self.norm(hidden) if x[:, 0].mean() > 0 or not self.training else hidden
        return x + self.down(torch.tanh(hidden))


@job("batch norm that the data decides to call: unequal calls per rank", refusable=PER_RANK + " pp tp recompute")
def batch_norm_sometimes() -> Spec:
    return Spec(**plain(model=net(block=Sometimes), eval_data=None, metrics={}), splits=True)


class Teacher(Net):
    """A mean teacher, updated in forward through .data."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for mine, own in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                mine.data = mine.data * 0.9 + own.data * 0.1
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.teacher(x)


@job(
    "mean teacher: a frozen parameter that forward replaces through .data", owner="watch", refusable="micro pp zero tp"
)
def mean_teacher() -> Spec:
    return Spec(**plain(model=lambda: Teacher().double(), eval_data=None, metrics={}))


class Clamped(Net):
    """WGAN: weights are clamped through .data at the beginning of forward."""

    def forward(self, x: Tensor) -> Tensor:
        for value in self.head.parameters():
            value.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@job("weights clamped through .data in forward (WGAN)", refusable="pp")
def clamped_weights() -> Spec:
    return Spec(**plain(model=lambda: Clamped().double(), eval_data=None, metrics={}))


@job("Embedding(max_norm=): forward rescales rows in place", owner="verifier", refusable="pp")
def max_norm_embedding() -> Spec:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rest = nn.Embedding(12, WIDTH, max_norm=0.8), Net()

        def forward(self, ids: Tensor) -> Tensor:
            return self.rest(self.table(ids).mean(1))

    from torch.utils.data import TensorDataset

    from bench.adversary.kit import SAMPLES, integers

    data = TensorDataset(integers(12, SAMPLES, 3), integers(CLASSES, SAMPLES, seed=3))
    return Spec(model=lambda: Bag().double(), loss=cross_entropy, optimizer=sgd(0.5), data=data)


class ActNorm(Observed):
    """Scale and shift from the first batch, guarded by a Python flag."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.ready = False

    def observe(self, x: Tensor) -> Tensor:
        if self.training and not self.ready:
            with torch.no_grad():
                self.shift.copy_(x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 0.1))
            self.ready = True
        return (x - self.shift) * self.scale


@job("ActNorm: parameters set from the first batch, guarded by a Python flag", refusable=PER_RANK + " pp")
def act_norm() -> Spec:
    return Spec(**plain(model=lambda: ActNorm().double(), eval_data=None, metrics={}))


class Averaged(Net):
    """Keeps an average of its own head for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(CLASSES, WIDTH))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.training:
            with torch.no_grad():
                self.steps += 1
                self.average += (self.head.weight - self.average) / self.steps
            return self.head(x)
        return F.linear(x, self.average, self.head.bias)


@job("stochastic weight averaging inside forward; evaluation uses the average", refusable="micro pp zero tp")
def averaged_weights() -> Spec:
    return Spec(**plain(model=lambda: Averaged().double()))


class Noted(Net):
    """State outside of parameters and buffers, kept by get_extra_state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) * (1 + 0.01 * self.calls)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@job("a Python counter in get_extra_state", owner="ckpt", refusable=PER_CALL)
def extra_state() -> Spec:
    return Spec(**plain(model=lambda: Noted().double(), eval_data=None, metrics={}))


class Plain(Net):
    """A Python counter that no state holds: resuming cannot know it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) * (1 + 0.01 * self.calls)


@job("a Python counter outside of every state", owner="verifier", refusable="micro pp resume")
def python_counter() -> Spec:
    return Spec(**plain(model=lambda: Plain().double(), eval_data=None, metrics={}))


class Lists(Net):
    """Tensors in a plain list: neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = [torch.ones(WIDTH, dtype=torch.float64) * (1 + place / 10) for place in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        for block, mask in zip(self.blocks, self.masks, strict=True):
            x = block(x * mask)
        return self.head(x)


@job("constant tensors in a Python list")
def tensors_in_list() -> Spec:
    return Spec(**plain(model=lambda: Lists().double()))


class Shared(Net):
    """Two modules share one buffer object."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.linspace(0.5, 1.5, WIDTH)
        self.register_buffer("first", table)
        self.blocks[2].register_buffer("second", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.first) + self.blocks[2].second.sum()


@job("one tensor under two buffers' names, one of them not persistent", owner="cuts")
def shared_buffer() -> Spec:
    return Spec(**plain(model=lambda: Shared().double()))
