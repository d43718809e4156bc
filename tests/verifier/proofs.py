"""Jobs to prove, and ways to break a run, called on every rank of the pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.engine import norm
from echelon.engine.run import Run
from echelon.job import Job
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.testing.models import GPT, MLP
from echelon.verifier.verify import verify
from echelon.world import World

TOKENS = torch.randint(0, 32, (21, 9), generator=torch.Generator().manual_seed(1))
X = torch.randn(33, 8, generator=torch.Generator().manual_seed(2))
Y = torch.randint(0, 4, (33,), generator=torch.Generator().manual_seed(3))


def token_loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Over tokens above 7 only, so that samples weigh differently."""
    labels = torch.where(batch[1] > 7, batch[1], -100).flatten()
    return F.cross_entropy(output.flatten(0, 1), labels, reduction="sum", ignore_index=-100), (labels >= 0).sum()


class Attention(nn.Module):
    """One attention with a separate bias of the keys, whose true gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True))


class Gated(Attention):
    """Samples decide which layers run: under zero=3 the ranks would not gather the same ones."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(self.query(x) if tokens[0, 0].item() > 15 else self.key(x))


def make_job(name: str, **changes: Any) -> Job:
    """`gpt`: tied weights, dropout, tokens that count, clipping, AdamW. `norm`: batch norm, a mean, SGD. `keys`: AdamW's worst.
    `gated`: control flow by values."""
    tokens = {"data": TensorDataset(TOKENS[:, :-1], TOKENS[:, 1:]), "loss": token_loss}
    vectors = {"data": TensorDataset(X, Y), "loss": lambda output, batch: F.cross_entropy(output, batch[1])}
    jobs: dict[str, dict[str, Any]] = {
        "gpt": tokens
        | {
            "model": lambda: GPT(vocab=32, context=8, width=16, layers=2, heads=2, dropout=0.1, tied=True),
            "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3),
            "clip": 0.5,
        },
        "norm": vectors
        | {
            "model": lambda: MLP(width=16, layers=3, inputs=8, classes=4, norm=True),
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "batch": 12,  # of 33: the last has 9, which are two samples and more for each of four ranks
        },
        "gated": tokens | {"model": Gated, "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)},
        "keys": tokens | {"model": Attention, "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)},
    }
    return Job(**{"batch": 8, "epochs": 2} | jobs[name] | changes)


#: A job's name, a fault's name (empty: none), and what the plan has beside dp.
Proof = tuple[str, str, dict[str, Any]]


def prove(world: World, proofs: list[Proof]) -> list[str]:
    """The certificates, as text. Several in one go: starting a group costs more than a small proof."""
    texts = []
    for name, fault, plan in proofs:
        made = Plan(mesh=Mesh(dp=world.size), **{"threads": 1} | plan)
        with Broken(FAULTS[fault]):
            texts.append(verify(make_job(name), made, world=world).to_json())
    return texts


class Broken:
    """Puts a fault into Run for a while."""

    def __init__(self, fault: Callable[[type[Run]], None]) -> None:
        self._fault = fault
        self._kept: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._kept = dict(vars(Run))
        self._fault(Run)

    def __exit__(self, *error: object) -> None:
        for key, value in self._kept.items():
            if vars(Run).get(key) is not value:
                setattr(Run, key, value)


def _after_backward(change: Callable[[Run, Any], None]) -> Callable[[type[Run]], None]:
    def install(kind: type[Run]) -> None:
        original = kind.backward

        def backward(self: Run, batch: Any) -> Tensor:
            loss = original(self, batch)
            change(self, batch)
            return loss

        kind.backward = backward  # type: ignore[method-assign]

    return install


def _scaled_by_dp(run: Run, batch: Any) -> None:
    for value in run.model.parameters():
        if value.grad is not None:
            value.grad.mul_(run.world.size)


def _one_not_reduced(kind: type[Run]) -> None:
    """The gradient of one parameter is what rank 0's own samples give, as if its exchange had been left out."""
    original = kind.backward

    def backward(self: Run, batch: Any) -> Tensor:
        mine: list[Tensor] = []
        weight = self.model.get_parameter("positions.weight")
        hook = weight.register_hook(lambda grad: mine.append(grad.detach().clone()))
        loss = original(self, batch)
        hook.remove()
        assert weight.grad is not None
        weight.grad.copy_(torch.stack(mine).sum(0))
        return loss

    kind.backward = backward  # type: ignore[method-assign]


def _equal_micro_batches(kind: type[Run]) -> None:
    """Every micro-batch weighs the same, whatever its size."""
    original = kind.backward

    def backward(self: Run, batch: Any) -> Tensor:
        even = batch.samples / len(batch.micros) / self.world.size
        micros = tuple(dataclasses.replace(micro, samples=even) for micro in batch.micros)
        return original(self, dataclasses.replace(batch, micros=micros))

    kind.backward = backward  # type: ignore[method-assign]


def _local_norm(kind: type[Run]) -> None:
    """Clipping by the norm of some of the gradients, as of those that a rank holds."""
    original = kind.update

    def update(self: Run, *args: Any) -> Any:
        whole = norm.total_norm
        norm.total_norm = lambda grads, ranks: whole(grads[: len(grads) // 2], ranks)
        try:
            return original(self, *args)
        finally:
            norm.total_norm = whole

    kind.update = update  # type: ignore[method-assign]


def _stale_buffer(kind: type[Run]) -> None:
    """Running statistics stay as they were before the step."""
    original = kind.backward

    def backward(self: Run, batch: Any) -> Tensor:
        before = [value.clone() for value in self.model.buffers()]
        loss = original(self, batch)
        for value, old in zip(self.model.buffers(), before, strict=True):
            value.copy_(old)
        return loss

    kind.backward = backward  # type: ignore[method-assign]


def _last_row_not_updated(kind: type[Run]) -> None:
    """The last rows of a parameter stay as they were, as if a rank's uneven shard had been left out of the update."""
    original = kind.update

    def update(self: Run, *args: Any) -> Any:
        weight = [value for value in self.model.parameters() if value.ndim == 2][-1]
        before = weight.detach().clone()
        step = original(self, *args)
        with torch.no_grad():
            rest = weight.to_local() if hasattr(weight, "to_local") else weight
            kept = before.to_local() if hasattr(before, "to_local") else before
            if self.world.rank == self.world.size - 1 or self.plan.zero == 0:
                rest[-1:].copy_(kept[-1:])
        return step

    kind.update = update  # type: ignore[method-assign]


def _rate_per_micro_batch(kind: type[Run]) -> None:
    """The learning rate moves once per micro-batch."""
    original = kind.update

    def update(self: Run, *args: Any) -> Any:
        step = original(self, *args)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        return step

    kind.update = update  # type: ignore[method-assign]


def _doubled_report(kind: type[Run]) -> None:
    """The loss that is reported is doubled; gradients are right."""
    original = kind.backward
    kind.backward = lambda self, batch: original(self, batch) * 2  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[type[Run]], None]] = {
    "": lambda kind: None,
    "scaled by dp": _after_backward(_scaled_by_dp),
    "one not reduced": _one_not_reduced,
    "equal micro-batches": _equal_micro_batches,
    "local norm": _local_norm,
    "stale buffer": _stale_buffer,
    "last row": _last_row_not_updated,
    "rate": _rate_per_micro_batch,
    "reported loss": _doubled_report,
}
