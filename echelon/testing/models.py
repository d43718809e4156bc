"""The models that benchmarks and tests share: a GPT, a ResNet, an MLP, plain PyTorch and unaware of echelon."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projections = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in projections)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions; the head may share the embedding's weight."""

    def __init__(
        self, *, vocab: int = 256, context: int = 128, width: int = 256, layers: int = 6, heads: int = 4,
        dropout: float = 0.0, tied: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2, self.bn2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False), nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 for 32 x 32 images; `width` is the first stage's channels (64 is the full one)."""

    def __init__(self, *, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages, in_channels = [], width
        for stage in range(4):
            out_channels = width << stage
            for block in range(2):
                stages.append(ResidualBlock(in_channels, out_channels, 2 if stage and not block else 1))
                in_channels = out_channels
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(in_channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class MLP(nn.Sequential):
    """Linear layers with ReLU between; `norm` puts batch norm before each ReLU."""

    def __init__(self, *, width: int = 2048, layers: int = 4, inputs: int | None = None, classes: int | None = None,
                 norm: bool = False) -> None:  # fmt: skip
        sizes = [inputs or width, *[width] * (layers - 1), classes or width]
        modules: list[nn.Module] = []
        for index, (in_features, out_features) in enumerate(itertools.pairwise(sizes)):
            modules.append(nn.Linear(in_features, out_features))
            if index < layers - 1:
                modules += [nn.BatchNorm1d(out_features)] if norm else []
                modules.append(nn.ReLU())
        super().__init__(*modules)
