"""The models of published runs as plain PyTorch, written the way that those who ran them wrote them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class WrittenNorm(nn.Module):
    """RMSNorm operator by operator, in float32, as Llama's own code has it."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class FusedNorm(nn.Module):
    """RMSNorm as one kernel: it moves what a LayerNorm without bias moves, which is traced in its place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight)


class Core(nn.Module):
    """Attention between its projections: one kernel, or written out with a softmax that is fused or not. The flash-attn package and cuDNN
    take fewer keys than queries as they are; around torch's own kernel and written-out ones stacks repeat them (`repeat_kv`)."""

    def __init__(self, kind: str, *, causal: bool) -> None:
        super().__init__()
        self.kind, self.causal = kind, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if self.kind in ("native", "package"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=groups > 1)
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if self.kind == "flash":
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        lots, heads, length, width = q.shape
        scores = torch.bmm(q.reshape(-1, length, width), k.reshape(-1, length, width).transpose(1, 2))
        if self.kind == "fused":  # scale and mask are part of the softmax's kernel
            mixed = scores.softmax(-1)
        else:
            scores = scores.view(lots, heads, length, length) * width**-0.5
            if self.causal:
                hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
                scores = scores.masked_fill(hidden, -1e4)
            mixed = scores.float().softmax(-1).type_as(q).view(-1, length, length)
        return torch.bmm(mixed, v.reshape(-1, length, width)).view(lots, heads, length, width)


class Attention(nn.Module):
    """Projections around the core."""

    def __init__(self, model: dict[str, Any], core: str, *, bias: bool, rotary: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.kv, self.size = model["heads"], model["kv_heads"], model["head_dim"]
        self.rotary = rotary
        self.qkv = nn.Linear(model["hidden"], (self.heads + 2 * self.kv) * self.size, bias=bias)
        self.core = Core(core, causal=causal)
        self.out = nn.Linear(self.heads * self.size, model["hidden"], bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.heads * self.size, self.kv * self.size, self.kv * self.size]
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.qkv(x).split(sizes, dim=-1))
        if self.rotary:
            q, k = _turned(q), _turned(k)
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


def _turned(x: Tensor) -> Tensor:
    """Rotary positions: each half by the other (the angles are made on the spot; they cost next to nothing)."""
    angle = torch.ones(x.shape[-2], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle - b * angle, b * angle + a * angle), dim=-1)


class Feed(nn.Module):
    """The feed-forward part."""

    def __init__(self, model: dict[str, Any], *, bias: bool, squared: bool) -> None:
        super().__init__()
        width, inner = model["hidden"], model["ffn"]
        self.gate = nn.Linear(width, inner, bias=bias) if model["gated_mlp"] else None
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.squared = squared

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.relu(self.up(x)).square() if self.squared else F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward part with their residuals; norms before them, or (BERT) after."""

    def __init__(self, model: dict[str, Any], core: str, *, fused_norm: bool) -> None:
        super().__init__()
        arch = model["arch"]
        bias = arch in ("gpt", "bert")
        self.post = arch == "bert"
        self.attention = Attention(model, core, bias=bias, rotary=arch in ("llama", "nemotron"), causal=arch != "bert")
        self.feed = Feed(model, bias=bias, squared=arch == "nemotron")
        self.norm1, self.norm2 = (_norm(arch, model["hidden"], fused_norm) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(x + F.dropout(self.attention(x), 0.1))
            return self.norm2(x + F.dropout(self.feed(x), 0.1))
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


def _norm(arch: str, width: int, fused: bool) -> nn.Module:
    if arch == "llama":
        return FusedNorm(width) if fused else WrittenNorm(width)
    return nn.LayerNorm(width)


class Transformer(nn.Module):
    """All four kinds. The loss is over the vocabulary in float32; BERT's on masked positions alone."""

    #: Of BERT's positions the share whose word is predicted (15 %, as published).
    MASKED = 0.15

    def __init__(self, model: dict[str, Any], core: str, *, layers: int, fused_norm: bool) -> None:
        super().__init__()
        arch, width = model["arch"], model["hidden"]
        self.masked = arch == "bert"
        self.embed = nn.Embedding(model["vocab"], width)
        self.positions = nn.Embedding(model["seq_len"], width) if arch in ("gpt", "bert") else None
        self.blocks = nn.ModuleList(Block(model, core, fused_norm=fused_norm) for _ in range(layers))
        self.norm = _norm(arch, width, fused_norm)
        self.head = nn.Linear(width, model["vocab"], bias=False)
        if model.get("tied_embeddings"):
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.masked:
            x = x[:, : max(round(self.MASKED * x.shape[1]), 1)]
        return self.head(x)


def word_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy in float32 over the positions that are predicted."""
    targets = batch[-1][:, : output.shape[1]]
    return F.cross_entropy(output.float().flatten(0, 1), targets.flatten())


class _OneKernel(torch.autograd.Function):
    """Cross entropy in one kernel each way: logits are read as they are, and nothing is kept beside them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, targets = ctx.saved_tensors
        found = logits.softmax(-1)
        found.scatter_add_(-1, targets[:, None], -torch.ones_like(targets[:, None], dtype=found.dtype))
        return found.mul_(grad / len(targets)), None


def package_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The same as the flash-attn package computes it (`flash_attn.losses.cross_entropy`)."""
    targets = batch[-1][:, : output.shape[1]]
    return _OneKernel.apply(output.flatten(0, 1), targets.flatten())


class Unit(nn.Module):
    """A bottleneck of ResNet v1.5: the stride is in the middle."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.body = nn.Sequential(
            _conv(inner, width, 1), nn.ReLU(inplace=True), _conv(width, width, 3, stride), nn.ReLU(inplace=True), _conv(width, outer, 1)
        )  # fmt: skip
        self.short = _conv(inner, outer, 1, stride) if stride > 1 or inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x), inplace=True)


def _conv(inner: int, outer: int, size: int | tuple[int, int], stride: int = 1, padding: Any = None) -> nn.Sequential:
    sizes = (size, size) if isinstance(size, int) else size
    padding = tuple(side // 2 for side in sizes) if padding is None else padding
    return nn.Sequential(nn.Conv2d(inner, outer, size, stride, padding, bias=False), nn.BatchNorm2d(outer))


def resnet(depths: tuple[int, ...]) -> nn.Module:
    """ResNet-50 and -101."""
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inner = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for place in range(depth):
            layers.append(Unit(inner, width, 2 if stage and not place else 1))
            inner = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 1000))


def vgg16() -> nn.Module:
    """VGG-16 without batch norm."""
    layers: list[nn.Module] = []
    inner = 3
    for outer in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if not outer:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU(inplace=True)]
        inner = outer
    wide = 4096
    head = [
        nn.Linear(512 * 49, wide),
        nn.ReLU(True),
        nn.Dropout(),
        nn.Linear(wide, wide),
        nn.ReLU(True),
        nn.Dropout(),
        nn.Linear(wide, 1000),
    ]
    return nn.Sequential(*layers, nn.Flatten(), *head)


class Branches(nn.Module):
    """Inception: several ways side by side, put together by channels."""

    def __init__(self, *ways: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleList(ways)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways], dim=1)


def _way(inner: int, *steps: tuple[int, Any] | tuple[int, Any, int], before: nn.Module | None = None) -> nn.Sequential:
    layers: list[nn.Module] = [before] if before else []
    for outer, size, *stride in steps:
        layers += [_conv(inner, outer, size, *stride, padding=0 if stride else None), nn.ReLU(inplace=True)]
        inner = outer
    return nn.Sequential(*layers)


def _pool() -> nn.Module:
    return nn.AvgPool2d(3, 1, 1)


def inception_v3() -> nn.Module:
    """Inception v3 without its second head."""
    layers: list[nn.Module] = [
        _conv(3, 32, 3, 2, 0), nn.ReLU(True), _conv(32, 32, 3, 1, 0), nn.ReLU(True), _conv(32, 64, 3), nn.ReLU(True), nn.MaxPool2d(3, 2),
        _conv(64, 80, 1), nn.ReLU(True), _conv(80, 192, 3, 1, 0), nn.ReLU(True), nn.MaxPool2d(3, 2),
    ]  # fmt: skip
    inner = 192
    for pooled in (32, 64, 64):
        layers.append(
            Branches(
                _way(inner, (64, 1)),
                _way(inner, (48, 1), (64, 5)),
                _way(inner, (64, 1), (96, 3), (96, 3)),
                _way(inner, (pooled, 1), before=_pool()),
            )
        )
        inner = 64 + 64 + 96 + pooled
    layers.append(Branches(_way(inner, (384, 3, 2)), _way(inner, (64, 1), (96, 3), (96, 3, 2)), nn.MaxPool2d(3, 2)))
    inner += 384 + 96
    tall, wide = (7, 1), (1, 7)
    for mid in (128, 160, 160, 192):
        layers.append(
            Branches(
                _way(inner, (192, 1)), _way(inner, (mid, 1), (mid, wide), (192, tall)),
                _way(inner, (mid, 1), (mid, tall), (mid, wide), (mid, tall), (192, wide)), _way(inner, (192, 1), before=_pool()),
            )
        )  # fmt: skip
        inner = 768
    layers.append(
        Branches(
            _way(inner, (192, 1), (320, 3, 2)),
            _way(inner, (192, 1), (192, wide), (192, tall), (192, 3, 2)),
            nn.MaxPool2d(3, 2),
        )
    )
    inner += 320 + 192
    for _ in range(2):
        layers.append(
            Branches(
                _way(inner, (320, 1)), nn.Sequential(_way(inner, (384, 1)), Branches(_way(384, (384, (1, 3))), _way(384, (384, (3, 1))))),
                nn.Sequential(_way(inner, (448, 1), (384, 3)), Branches(_way(384, (384, (1, 3))), _way(384, (384, (3, 1))))), _way(inner, (192, 1), before=_pool()),
            )
        )  # fmt: skip
        inner = 2048
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(inner, 1000))


CONVNETS = {
    "resnet50": lambda: resnet((3, 4, 6, 3)),
    "resnet101": lambda: resnet((3, 4, 23, 3)),
    "vgg16": vgg16,
    "inception_v3": inception_v3,
}
