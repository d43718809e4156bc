"""What the benchmarks train: small models whose data sits in memory, so that only the training loop is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.job import Job
from echelon.testing.models import GPT, MLP, Block, ResNet

#: Long enough that no measurement reaches the end.
ENDLESS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model with its data, loss, optimizer and global batch, in the words of plain PyTorch."""

    name: str
    what: str
    model: Callable[[], nn.Module]
    samples: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    #: (parameters, fused) -> optimizer. `fused=None` is torch's own default.
    optimizer: Callable[[Iterable[Any], bool | None], torch.optim.Optimizer]
    batch: int

    def build(self, seed: int = 0) -> nn.Module:
        """The model with the values that `seed` gives."""
        torch.manual_seed(seed)
        return self.model()

    def job(self, *, steps: int = ENDLESS, fused: bool | None = None, **fields: Any) -> Job:
        """The same training as a Job."""
        loss, make = self.loss, self.optimizer
        return Job(
            model=self.model,
            loss=lambda output, batch: loss(output, batch[-1]),
            optimizer=lambda parameters: make(parameters, fused),
            data=TensorDataset(*self.samples()),
            batch_size=self.batch,
            steps=steps,
            name=self.name,
            **fields,
        )

    def batches(self, rank: int = 0, ranks: int = 1, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of each shuffled global batch, without end: the cheapest loader that one would write by hand."""
        inputs, targets = self.samples()
        generator = torch.Generator().manual_seed(seed)
        share = self.batch // ranks
        while True:
            order = torch.randperm(len(inputs), generator=generator)
            for start in range(0, len(order) - self.batch + 1, self.batch):
                ids = order[start + rank * share : start + (rank + 1) * share]
                yield inputs[ids], targets[ids]


class HeadBlock(Block):
    """A block whose attention takes as many heads as it is given: what one writes who means to cut it by hand."""

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // self.heads
        q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class HeadGPT(GPT):
    """The GPT of such blocks."""

    def __init__(self, *, vocab: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__(vocab=vocab, context=context, width=width, layers=0)
        self.blocks.extend(HeadBlock(width, heads) for _ in range(layers))


def _adamw(parameters: Iterable[Any], fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=fused)


def _sgd(parameters: Iterable[Any], fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=fused)


def tokens(rows: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Random text: (tokens, those that follow)."""
    text = torch.randint(vocab, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _images(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, 32, 32, generator=generator), torch.randint(10, (rows,), generator=generator)


def _vectors(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 2048, generator=generator), torch.randint(10, (rows,), generator=generator)


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


WORKLOADS = {
    "gpt": Workload(
        name="gpt",
        what="GPT 6 x 256, T=128, AdamW, batch 16",
        model=lambda: GPT(vocab=256, context=128, width=256, layers=6, heads=4),
        samples=lambda: tokens(512, 128, 256),
        loss=_token_loss,
        optimizer=_adamw,
        batch=16,
    ),
    "resnet": Workload(
        name="resnet",
        what="ResNet-18 half width, 32 x 32, SGD, batch 64",
        model=lambda: ResNet(width=32),
        samples=lambda: _images(1024),
        loss=F.cross_entropy,
        optimizer=_sgd,
        batch=64,
    ),
    "mlp": Workload(
        name="mlp",
        what="MLP 4 x 2048 (50 MB of gradients), SGD, batch 256",
        model=lambda: MLP(width=2048, layers=4, classes=10),
        samples=lambda: _vectors(2048),
        loss=F.cross_entropy,
        optimizer=_sgd,
        batch=256,
    ),
    # For the tensor and pipeline axes: long enough a step that compute counts for more than messages.
    "gpt-axes": Workload(
        name="gpt-axes",
        what="GPT 6 x 384, T=128, vocabulary 2048, AdamW, batch 8",
        model=lambda: HeadGPT(vocab=2048, context=128, width=384, layers=6, heads=6),
        samples=lambda: tokens(512, 128, 2048),
        loss=_token_loss,
        optimizer=_adamw,
        batch=8,
    ),
    # For one GPU. `python -m bench.overhead --device cuda` runs it in bf16.
    "gpt124m": Workload(
        name="gpt124m",
        what="GPT 12 x 768 (124M), T=1024, AdamW, batch 32",
        model=lambda: GPT(vocab=50304, context=1024, width=768, layers=12, heads=12, tied=True),
        samples=lambda: tokens(256, 1024, 50304),
        loss=_token_loss,
        optimizer=_adamw,
        batch=32,
    ),
}
