"""Text without recurrence: GPT, Llama, an encoder-decoder, a selective state space."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.job import Job
from tests.zoo.data import SAMPLES, numbers, sgd, train, whole


class SelfAttention(nn.Module):
    """Attention in the way of minGPT: written out, with a mask among the buffers and head counts in the views."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.mask: Tensor
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(32, dim=2)
        q = q.view(b, t, 4, 8).transpose(1, 2)
        k = k.view(b, t, 4, 8).transpose(1, 2)
        v = v.view(b, t, 4, 8).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(32), nn.LayerNorm(32), SelfAttention()
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(32, 128), "act": nn.GELU(approximate="tanh"), "c_proj": nn.Linear(128, 32)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](self.mlp["act"](self.mlp["c_fc"](self.ln_2(x))))


class Gpt(nn.Module):
    """Gives its loss itself when it is given targets."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(64, 32), "wpe": nn.Embedding(16, 32), "drop": nn.Dropout(0.1)}
        self.transformer = nn.ModuleDict(
            parts | {"h": nn.ModuleList([Layer() for _ in range(2)]), "ln_f": nn.LayerNorm(32)}
        )
        self.lm_head = nn.Linear(32, 64, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(4))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](pos))
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def gpt_tied() -> Job:
    text = whole(64, SAMPLES, 17)
    return train(
        name="gpt-tied",
        model=lambda: Gpt(tied=True),
        data=TensorDataset(text[:, :-1], text[:, 1:]),
        inputs=lambda batch: (batch, {}),
        loss=lambda output, batch: output[1],
        clip_norm=1.0,
    )


def _decayed(named: Any) -> torch.optim.Optimizer:
    """Weight decay for matrices only, as GPT-2 was trained."""
    params = [p for _, p in named]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def gpt_untied() -> Job:
    """Texts of unequal length, padded: samples weigh differently."""
    text = whole(64, SAMPLES, 17, low=1, seed=1)
    for row, length in enumerate(whole(17, SAMPLES, low=3, seed=2).tolist()):
        text[row, length:] = 0

    def loss(output: tuple[Tensor, None], batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(output[0].flatten(0, 1), batch[1].flatten(), ignore_index=0, reduction="sum")
        return total, (batch[1] != 0).sum()

    return train(
        name="gpt-untied",
        model=lambda: Gpt(tied=False),
        data=TensorDataset(text[:, :-1], text[:, 1:]),
        loss=loss,
        optimizer=_decayed,
        lr_schedule=lambda optimizer, total: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
        clip_norm=0.5,
    )


class RmsNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.type_as(x) * self.weight


def _rotate(x: Tensor, freqs: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


class GroupedAttention(nn.Module):
    """Eight query heads share four of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.wk, self.wv = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = _rotate(self.wq(x).view(b, t, 8, 8), freqs)
        k = _rotate(self.wk(x).view(b, t, 4, 8), freqs)
        v = self.wv(x).view(b, t, 4, 8)
        k = k[:, :, :, None, :].expand(b, t, 4, 2, 8).reshape(b, t, 8, 8)
        v = v[:, :, :, None, :].expand(b, t, 4, 2, 8).reshape(b, t, 8, 8)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8) + mask
        weights = F.softmax(scores.float(), dim=-1).type_as(q)
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, -1))


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*shape, bias=False) for shape in ((64, 172), (172, 64), (64, 172)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = GroupedAttention(), SwiGlu()
        self.attention_norm, self.ffn_norm = RmsNorm(64), RmsNorm(64)

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), freqs, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """As the first Llama was published: the complex rotations are a plain attribute, neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(96, 64)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(2))
        self.norm, self.output = RmsNorm(64), nn.Linear(64, 96, bias=False)
        angles = torch.outer(torch.arange(32), 1.0 / (10000.0 ** (torch.arange(0, 8, 2).float() / 8)))
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: Tensor) -> Tensor:
        _, t = tokens.shape
        self.freqs_cis = self.freqs_cis.to(tokens.device)
        mask = torch.triu(torch.full((t, t), float("-inf"), device=tokens.device), diagonal=1)
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.freqs_cis[:t], mask)
        return self.output(self.norm(h))


def llama() -> Job:
    text = whole(96, SAMPLES, 13, seed=3)
    return train(
        name="llama",
        model=Llama,
        data=TensorDataset(text[:, :-1], text[:, 1:]),
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[1].flatten()),
        clip_norm=1.0,
    )


class Translator(nn.Module):
    """torch's own nn.Transformer with sinusoidal positions and padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(48, 32, padding_idx=0), nn.Embedding(56, 32, padding_idx=0)
        self.transformer = nn.Transformer(
            d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=64, batch_first=True
        )
        self.generator = nn.Linear(32, 56)
        position, rate = torch.arange(16)[:, None], torch.exp(torch.arange(0, 32, 2) * (-math.log(10000.0) / 32))
        table = torch.zeros(16, 32)
        table[:, 0::2], table[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
        self.table: Tensor
        self.register_buffer("table", table, persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.size(1)
        hidden = self.transformer(
            self.source(source) * math.sqrt(32) + self.table[: source.size(1)],
            self.target(target) * math.sqrt(32) + self.table[:length],
            tgt_mask=torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1),
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
        )
        return self.generator(hidden)


def transformer() -> Job:
    source, target = whole(48, SAMPLES, 10, low=1, seed=4), whole(56, SAMPLES, 8, low=1, seed=5)
    for row, length in enumerate(whole(11, SAMPLES, low=4, seed=6).tolist()):
        source[row, length:] = 0
    return train(
        name="transformer",
        model=Translator,
        data=TensorDataset(source, target[:, :-1], target[:, 1:]),
        loss=lambda output, batch: F.cross_entropy(output.transpose(1, 2), batch[2], label_smoothing=0.1),
    )


class SelectiveScan(nn.Module):
    """A Mamba block, its scan written as a loop."""

    def __init__(self, width: int = 32, inner: int = 64, states: int = 8) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(inner, 2 + 2 * states, bias=False), nn.Linear(2, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, states + 1, dtype=torch.float32).repeat(inner, 1)))
        self.D = nn.Parameter(torch.ones(inner))

    def forward(self, u: Tensor) -> Tensor:
        length = u.shape[1]
        x, gate = self.in_proj(u).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :length].transpose(1, 2))
        rank, b, c = self.x_proj(x).split([2, 8, 8], dim=-1)
        delta = F.softplus(self.dt_proj(rank))
        decay = torch.exp(delta[..., None] * -torch.exp(self.A_log.float()))
        added = delta[..., None] * b[:, :, None, :] * x[..., None]
        state, outputs = x.new_zeros(x.shape[0], 64, 8), []
        for t in range(length):
            state = decay[:, t] * state + added[:, t]
            outputs.append((state * c[:, t, None, :]).sum(-1))
        return self.out_proj((torch.stack(outputs, 1) + self.D * x) * F.silu(gate))


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(6, 32), nn.ModuleList(SelectiveScan() for _ in range(3))
        self.norms, self.head = nn.ModuleList(nn.LayerNorm(32) for _ in range(3)), nn.Linear(32, 1)

    def forward(self, series: Tensor) -> Tensor:
        x = self.embed(series)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x[:, -1]).squeeze(-1)


def mamba() -> Job:
    return train(
        name="mamba",
        model=Mamba,
        data=TensorDataset(numbers(SAMPLES, 12, 6, seed=7), numbers(SAMPLES, seed=8)),
        loss=lambda output, batch: F.huber_loss(output, batch[1]),
        optimizer=sgd,
        clip_norm=1.0,
    )
