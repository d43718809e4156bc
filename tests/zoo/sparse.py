"""Work that depends on the data: experts, early exits, loops of unequal length."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.job import Job
from tests.zoo.data import SAMPLES, numbers, train, whole


class Experts(nn.Module):
    """Two of six experts for each token; an expert that nobody chose is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 6, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1, 32)
        odds = self.router(flat).softmax(-1)
        weights, chosen = odds.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, which, None])
        share = F.one_hot(chosen[:, 0], 6).to(odds.dtype).mean(0)
        return out.view_as(x), 6 * (share * odds.mean(0)).sum()


class ExpertText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(40, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.norms, self.layers = (
            nn.ModuleList(nn.LayerNorm(32) for _ in range(3)),
            nn.ModuleList([Experts(), Experts()]),
        )
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        h = self.norms[0](x)
        x = x + self.mix(h, h, h, need_weights=False)[0]
        balance = x.new_zeros(())
        for norm, layer in zip(self.norms[1:], self.layers, strict=True):
            y, extra = layer(norm(x))
            x, balance = x + y, balance + extra
        return self.head(x.mean(1)), balance


def _tokens() -> TensorDataset:
    return TensorDataset(whole(40, SAMPLES, 6, seed=10), whole(5, SAMPLES, seed=11))


def moe() -> Job:
    return train(
        name="moe",
        model=ExpertText,
        data=_tokens(),
        loss=lambda output, batch: F.cross_entropy(output[0], batch[1]),
        clip_norm=1.0,
    )


def moe_balanced() -> Job:
    """The load-balancing loss of Switch Transformers is over all tokens of the batch."""
    return train(
        name="moe-balanced",
        model=ExpertText,
        data=_tokens(),
        loss=lambda output, batch: F.cross_entropy(output[0], batch[1]) + 0.1 * output[1],
    )


class EarlyExit(nn.Module):
    """Samples of which an exit is sure leave there; the rest of the network runs for those that are left, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True)) for _ in range(5))
        self.exits = nn.ModuleList(nn.Linear(64, 3) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.stem(x))
        logits = self.exits[0](h)
        left = torch.arange(len(x), device=x.device)
        for block, leave in zip(self.blocks, self.exits[1:], strict=True):
            unsure = logits[left].softmax(-1).amax(-1) < 0.45
            left, h = left[unsure], h[unsure]
            if len(left) == 0:
                break
            h = h + block(h)
            logits = logits.index_copy(0, left, leave(h))
        return logits


def early_exit() -> Job:
    # The samples of an epoch are shuffled; some are an order of magnitude louder, and leave at once.
    loud = torch.where(whole(3, SAMPLES, 1, seed=12) == 0, 0.3, 6.0)
    return train(
        name="early-exit",
        model=EarlyExit,
        data=TensorDataset(numbers(SAMPLES, 16, seed=13) * loud, whole(3, SAMPLES, seed=14)),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    )


class Ponder(nn.Module):
    """One step of a network, repeated as often as the longest sample asks."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.think = nn.Linear(8, 64), nn.GRUCell(64, 64)
        self.norm, self.answer = nn.LayerNorm(64), nn.Linear(64, 2)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        seen = torch.tanh(self.read(x))
        state = torch.zeros_like(seen)
        turn = 0
        while turn < turns.max().item():
            state = torch.where((turn < turns)[:, None], self.norm(self.think(seen, state)), state)
            turn += 1
        return self.answer(state)


def ponder() -> Job:
    return train(
        name="ponder",
        model=Ponder,
        data=TensorDataset(
            numbers(SAMPLES, 8, seed=15), whole(9, SAMPLES, low=1, seed=16), numbers(SAMPLES, 2, seed=17)
        ),
        loss=lambda output, batch: F.mse_loss(output, batch[2]),
    )
