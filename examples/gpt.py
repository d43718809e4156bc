"""A byte-level GPT that learns Python from the standard library's own sources, which every machine has.

python examples/gpt.py
torchrun --nproc-per-node 2 examples/gpt.py
echelon train examples/gpt.py
echelon train examples/gpt.py:tiny        # another job of the same file: a few seconds
"""

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import echelon


class Block(nn.Module):
    """Attention to what came before, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Given bytes, the logits of each next byte."""

    def __init__(self, *, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens.long()) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def windows(context: int) -> TensorDataset:
    """The standard library as samples of `context` bytes and, one further, the bytes to predict."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py")) + sorted(library.glob("[a-h]*/*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    samples = text.unfold(0, context + 1, context)  # a view: nothing is copied
    return TensorDataset(samples[:, :-1], samples[:, 1:])


def cross_entropy(output: Tensor, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[-1].flatten().long())


def bits_per_byte(output: Tensor, batch: list[Tensor]) -> Tensor:
    return cross_entropy(output, batch) / math.log(2)


def gpt(*, name: str, context: int, width: int, layers: int, batch: int, steps: int) -> echelon.Job:
    samples = windows(context)
    held_out = 256
    return echelon.Job(
        name=name,
        model=lambda: GPT(context=context, width=width, layers=layers, heads=4),
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, weight_decay=0.1),
        lr_schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1),
        clip_norm=1.0,
        data=TensorDataset(*samples[:-held_out]),
        eval_data=TensorDataset(*samples[-held_out:]),
        metrics={"bits_per_byte": bits_per_byte},
        batch_size=batch,
        steps=steps,
    )


def job() -> echelon.Job:
    return gpt(name="gpt", context=128, width=128, layers=4, batch=16, steps=200)


def tiny() -> echelon.Job:
    return gpt(name="gpt-tiny", context=32, width=32, layers=2, batch=16, steps=30)


if __name__ == "__main__":
    echelon.train(job)
