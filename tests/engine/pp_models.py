"""Models that a pipeline could get wrong without a word: what they do between their units, or in one mode only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


def _same(width: int = 8) -> nn.Linear:
    """A layer that gives what it is given."""
    layer = nn.Linear(width, width)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(width))
        layer.bias.zero_()
    return layer


class Noise(nn.Module):
    """Noise that goes in first and is taken away last: nothing is left where it is one. Of `late` the last stage has no size but that of
    the batch, and does not compute the dropout before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = _same(), _same(), _same()

    def forward(self, x: Tensor) -> Tensor:
        early = torch.randn_like(x)
        hidden = self.first(early)
        dropped = F.dropout(hidden, 0.5)
        late = torch.rand(len(x), 8, dtype=x.dtype)
        mixed = self.second(hidden + 0 * dropped + late)
        return self.third(mixed) - late - early


class OwnNoise(nn.Module):
    """Noise from a generator of the model's own, between units and in them. Nothing of what goes in first is left where it is one noise for
    all stages, also where a rank holds two of them and runs forward once for each."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.Generator().manual_seed(5)
        self.layers = nn.ModuleList(_same() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        early = torch.randn(x.shape, generator=self.numbers, dtype=x.dtype)
        x = early
        for layer in self.layers:
            late = torch.rand(x.shape, generator=self.numbers, dtype=x.dtype)
            x = layer(x + late) - late
        return x - early


class Dropping(nn.Module):
    """Units that draw: the same numbers of the same place, whoever computes the places before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x[:, :4]


class Counting(nn.Module):
    """Counts its steps at the end of forward, and looks at the count where it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(torch.tanh(self.first(x * torch.exp(-self.seen))))
        if self.training:
            self.seen += 1
        return out


class Twice(nn.Module):
    """A tower with running statistics that is called for both halves of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 16), nn.BatchNorm1d(16)
        self.head = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)])

    def forward(self, x: Tensor) -> Tensor:
        left, right = (self.norm(self.layer(half)) for half in x.chunk(2, dim=1))
        out = torch.tanh(left * right)
        for layer in self.head:
            out = torch.tanh(layer(out))
        return out


class Auxiliary(nn.Module):
    """A second head that only training needs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.extra = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden) + (0.3 * self.extra(hidden) if self.training else 0.0)


class _Whiten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(8) + torch.arange(64.0).view(8, 8) / 100)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Turned(nn.Module):
    """Reads what its first modules hold again at the end, but only turned: a frozen weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.whiten, self.embed = _Whiten(), nn.Linear(8, 8, bias=False)
        self.embed.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.whiten(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x @ self.embed.weight.T @ self.whiten.matrix.mT)[:, :4]


class Frozen(nn.Module):
    """Nothing is trained below: the first stage has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8).requires_grad_(False) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Thawing(Frozen):
    """Trains its first layer from the third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        self.layers[0].requires_grad_(self.calls > 2)
        return super().forward(x)


class ReadLast(nn.Module):
    """Its output takes all weights in: the last stage shares weights with each other one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x[:, :4] * sum(layer.weight.square().sum() for layer in self.layers)


class Counts(nn.Module):
    """Counts its calls, which ranks do alike, and what its samples hold, which they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positive", torch.zeros(8, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.positive += (x > 0).sum(0)
        return self.layer(x)


class Tempered(nn.Module):
    """One of its parameters is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(8, 12), nn.Linear(12, 4), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) * self.scale


class Late(nn.Module):
    """One of its layers has its first gradient in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 4), nn.Linear(8, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.first(x) + self.second(x) if self.calls > 2 else self.first(x)


class Shortened(nn.Module):
    """Looking a row up shortens it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x.abs() * 8).long().clamp(max=19)).mean(1))


class Hooked(nn.Module):
    """Doubles a gradient by a hook: of a parameter, or of a module."""

    def __init__(self, *, module: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 4)
        if module:
            self.second.register_full_backward_hook(lambda _, given, __: tuple(2 * each for each in given))
        else:
            self.first.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Orthogonal(nn.Module):
    """Its constructor computes with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu())


class Watched(nn.Module):
    """Its running statistics are read between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x))) * self.norm.running_var.mean()
