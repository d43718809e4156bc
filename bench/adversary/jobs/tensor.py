"""Models that look cuttable for tensor parallelism and are not, or only in some states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from bench.adversary.kit import CLASSES, SAMPLES, WIDTH, cross_entropy, integers, net, numbers, plain, sgd
from bench.adversary.spec import Spec, job

HIDDEN = 16


class Pair(nn.Module):
    """Column then row, with something in between."""

    def __init__(self, between: Callable[[Tensor], Tensor], hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(WIDTH, hidden), between, nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


def with_pair(between: Callable[[Tensor], Tensor], hidden: int = HIDDEN, **changes: Any) -> Spec:
    return Spec(**plain(model=net(block=lambda: Pair(between, hidden)), **changes))


@job("a norm over hidden units that clamps only once it has grown", owner="cuts")
def inactive_clamp() -> Spec:
    return with_pair(lambda h: h * (3.5 / h.norm(dim=-1, keepdim=True)).clamp(max=1), optimizer=sgd(0.5))


class ZeroGate(nn.Module):
    """Mixes over hidden units, with a gate that begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return x + self.down(h + self.gate * h.mean(-1, keepdim=True))


@job("a mean over hidden units behind a gate that begins at zero", owner="cuts")
def zero_gate() -> Spec:
    return Spec(**plain(model=net(block=ZeroGate), optimizer=sgd(0.5)))


@job("mean over hidden units inside the pair", owner="cuts")
def hidden_mean() -> Spec:
    return with_pair(lambda h: h - h.mean(-1, keepdim=True))


@job("maximum over hidden units", owner="cuts")
def hidden_max() -> Spec:
    return with_pair(lambda h: h / (1 + h.abs().amax(-1, keepdim=True)))


@job("softmax over hidden units", owner="cuts")
def hidden_softmax() -> Spec:
    return with_pair(lambda h: h.softmax(-1))


@job("cumulative sum over hidden units", owner="cuts")
def hidden_cumsum() -> Spec:
    return with_pair(lambda h: h.cumsum(-1) / 10)


@job("hidden units sorted", owner="cuts")
def hidden_sort() -> Spec:
    return with_pair(lambda h: h.sort(-1).values)


@job("top half of hidden units kept", owner="cuts")
def hidden_topk() -> Spec:
    return with_pair(lambda h: h * (h >= h.topk(HIDDEN // 2, -1).values[..., -1:]))


@job("hidden units rolled by one", owner="cuts")
def hidden_roll() -> Spec:
    return with_pair(lambda h: torch.tanh(h.roll(1, -1)))


@job("hidden units reversed", owner="cuts")
def hidden_flip() -> Spec:
    return with_pair(lambda h: torch.tanh(h.flip(-1)))


@job("hidden units gated by the other half (GLU)", owner="cuts")
def gated_halves() -> Spec:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.up(x).chunk(2, -1)
            return x + self.down(value * gate.sigmoid())

    return Spec(**plain(model=net(block=Gated)))


@job("hidden units gated by their neighbour (interleaved GLU)", owner="cuts")
def gated_neighbours() -> Spec:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return x + self.down(h[..., ::2] * h[..., 1::2].sigmoid())

    return Spec(**plain(model=net(block=Gated)))


@job("an odd number of hidden units", owner="cuts")
def odd_hidden() -> Spec:
    return with_pair(torch.tanh, hidden=15)


@job("one hidden unit", owner="cuts")
def one_hidden() -> Spec:
    return with_pair(torch.tanh, hidden=1)


@job("a scale per hidden unit that is a parameter of its own", owner="cuts")
def scale_per_unit() -> Spec:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
            self.scale = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x)) * self.scale)

    return Spec(**plain(model=net(block=Scaled)))


@job("hidden units weighed by a constant ramp made in forward", owner="cuts")
def ramp() -> Spec:
    return with_pair(lambda h: torch.tanh(h) * torch.linspace(0.5, 1.5, h.shape[-1], dtype=h.dtype))


@job("division by the number of hidden units, read from the shape", owner="cuts")
def divides_by_width() -> Spec:
    return with_pair(lambda h: torch.tanh(h) / h.shape[-1])


@job(
    "noise over hidden units when a threshold is passed, by a Python comparison",
    owner="cuts",
    refusable="dp micro zero shares pp",
)
def python_branch() -> Spec:
    return with_pair(
        lambda h: torch.tanh(h) if float(h.detach().abs().max()) < 2.2 else torch.tanh(h - h.mean(-1, keepdim=True)),
        eval_data=None,
        metrics={},
        optimizer=sgd(0.5),
    )


@job("a norm over hidden units that only negative outliers reach", owner="cuts")
def rare_normalisation() -> Spec:
    return with_pair(lambda h: torch.where(h.amin(-1, keepdim=True) < -2.0, F.normalize(h, dim=-1), torch.tanh(h)))


class Attention(nn.Module):
    """Self-attention with fewer key heads than query heads."""

    def __init__(self, heads: int = 4, keys: int = 2, talking: bool = False) -> None:
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, WIDTH // heads
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * keys * self.size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Parameter(torch.eye(heads)) if talking else None

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q = self.q(x).view(n, t, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(n, t, 2, self.keys, self.size).permute(2, 0, 3, 1, 4)
        k, v = (each.repeat_interleave(self.heads // self.keys, 1) for each in (k, v))
        weights = (q @ k.transpose(-1, -2) / self.size**0.5).softmax(-1)
        if self.mix is not None:
            weights = torch.einsum("nhts,hg->ngts", weights, self.mix)
        return x + self.out((weights @ v).transpose(1, 2).reshape(n, t, WIDTH))


def attending(**options: Any) -> Spec:
    data = TensorDataset(numbers(SAMPLES, 5, WIDTH), integers(CLASSES, SAMPLES, 5))
    return Spec(
        model=net(depth=2, block=lambda: Attention(**options)),
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[-1].flatten()),
        optimizer=sgd(),
        data=data,
    )


@job("grouped-query attention: 4 query heads, 2 key heads", owner="cuts")
def grouped_heads() -> Spec:
    return attending()


@job("one key head for all query heads: it cannot be cut by heads", owner="cuts")
def single_key_head() -> Spec:
    return attending(keys=1)


@job("talking heads: a matrix between heads that begins as the identity", owner="cuts")
def talking_heads() -> Spec:
    return attending(talking=True)


@job("an embedding with padding_idx and a vocabulary that tp=2 does not divide", owner="cuts")
def odd_vocabulary() -> Spec:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(13, WIDTH, padding_idx=0), nn.Linear(WIDTH, 13)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.table(ids)))

    data = TensorDataset(integers(13, SAMPLES, 5), integers(13, SAMPLES, 5, seed=3))
    return Spec(
        model=lambda: Words().double(), optimizer=sgd(), data=data,
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[-1].flatten()),
    )  # fmt: skip


@job("logits normalised by their maximum over the vocabulary before the loss", owner="cuts")
def capped_logits() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return cross_entropy(output / output.abs().amax(-1, keepdim=True).clamp(min=2), batch)

    return Spec(**plain(loss=loss, eval_data=None, metrics={}))


@job("group norm over hidden units, with groups that tp=2 would split", owner="cuts")
def group_norm() -> Spec:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(WIDTH, 18), nn.GroupNorm(3, 18), nn.Linear(18, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.norm(self.up(x)))

    return Spec(**plain(model=net(block=Grouped)))


@job("convolutions with channel shuffle", owner="cuts")
def channel_shuffle() -> Spec:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv1d(1, 8, 3, padding=1), nn.Conv1d(8, 4, 3, padding=1, groups=2)
            self.head = nn.Linear(4 * WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = F.channel_shuffle(torch.tanh(self.one(x[:, None])), 2)
            return self.head(torch.tanh(self.two(x)).flatten(1))

    return Spec(**plain(model=lambda: Shuffled().double()))


@job("bilinear: two inputs, one weight of three dimensions", owner="cuts")
def bilinear() -> Spec:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Bilinear(WIDTH, WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.mix(x, x))

    return Spec(**plain(model=net(block=Twice)))
