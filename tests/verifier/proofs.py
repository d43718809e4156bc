"""Jobs to prove, called on every rank of the pool, with faults in the run where they are asked for."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.fault_catalogue import inject_fault
from echelon.testing.models import GPT, MLP
from echelon.verifier.verify import verify
from echelon.world import World
from tests.zoo import ZOO

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


@dataclasses.dataclass
class Given:
    """What `Aside` gives."""

    scores: Tensor
    more: dict[str, Tensor]


class Aside(nn.Module):
    """Gives something that the loss does not use, and that is wrong on every rank but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Given:
        hidden = self.layer(x).relu()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return Given(scores=self.head(hidden), more={"hidden": hidden.detach() + rank})


class Twice(nn.Module):
    """Calls itself once more on every rank but the first, to no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inside = nn.Linear(8, 4), False

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() and not self.inside:
            self.inside = True
            self(x)
            self.inside = False
        return self.layer(x)


class Counting(nn.Module):
    """Counts its calls, and on every rank but the first by another number."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1 + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        return self.layer(x)


class Clicked(nn.Module):
    """A table of single ids and bags of ids; ids of the bags are made from the batch, so that they cannot be foreseen."""

    def __init__(self, *, sparse: bool = False, bags: bool = True) -> None:
        super().__init__()
        self.users = nn.Embedding(60, 4, padding_idx=0, sparse=sparse)
        kinds = ("sum", "mean") if bags else ()
        self.items = nn.ModuleList([nn.EmbeddingBag(40, 4, mode=mode, sparse=sparse) for mode in kinds])
        self.hidden, self.head = nn.Linear(4 + 4 * len(kinds), 6), nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [self.users(ids[:, 0]), *(bag(ids[:, 1:] % 40) for bag in self.items)]
        return self.head(self.hidden(torch.cat(rows, 1)).relu()).squeeze(1)


def click_loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Clicks count twice, so that samples weigh differently."""
    weights = 1 + batch[-1]
    return (weights * F.binary_cross_entropy_with_logits(output, batch[-1], reduction="none")).sum(), weights.sum()


def apart(named: Any) -> list[torch.optim.Optimizer]:
    """Tables by SparseAdam, the rest by AdamW."""
    pairs = list(named)
    tables = [value for name, value in pairs if name.startswith(("users", "items"))]
    rest = [value for name, value in pairs if not name.startswith(("users", "items"))]
    return [torch.optim.SparseAdam(tables, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


def dense(*tables: Any) -> Any:
    """The table users and the bags items.0 and items.1 by three optimizers that move every row at every step, the rest by AdamW."""

    def make(named: Any) -> list[torch.optim.Optimizer]:
        pairs = list(named)
        names = ("users", "items.0", "items.1")
        of = [[value for name, value in pairs if name.startswith(each)] for each in names]
        rest = [value for name, value in pairs if not name.startswith(names)]
        return [*(make(values) for make, values in zip(tables, of, strict=True)), torch.optim.AdamW(rest, lr=0.01)]

    return make


CLICKS = torch.randint(0, 60, (41, 4), generator=torch.Generator().manual_seed(4))
CLICKED = torch.randint(0, 2, (41,), generator=torch.Generator().manual_seed(5)).float()


def make_job(name: str, **changes: Any) -> Job:
    """`gpt`: tied weights, dropout, tokens that count, clipping, AdamW. `norm`: batch norm, a mean, SGD. `keys`: AdamW's worst.
    `gated`: control flow by values. `aside`: an output that the loss does not use. `twice`: another number of calls on some ranks. `counts`: a buffer of whole
    numbers that differs over ranks. `users`, `clicks`, `sparse`: tables that a server can hold, under each rule that it has for them; their
    batches are not divided by two ranks, and the last is short."""
    tokens = {"data": TensorDataset(TOKENS[:, :-1], TOKENS[:, 1:]), "loss": token_loss}
    vectors = {"data": TensorDataset(X, Y), "loss": lambda output, batch: F.cross_entropy(output, batch[1])}
    mean = lambda output, batch: F.binary_cross_entropy_with_logits(output, batch[-1])  # noqa: E731
    clicks = {"data": TensorDataset(CLICKS, CLICKED), "loss": mean, "batch_size": 15}
    jobs: dict[str, dict[str, Any]] = {
        "gpt": tokens
        | {
            "model": lambda: GPT(vocab=32, context=8, width=16, layers=2, heads=2, dropout=0.1, tied=True),
            "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3),
            "clip_norm": 0.5,
        },
        "norm": vectors
        | {
            "model": lambda: MLP(width=16, layers=3, inputs=8, classes=4, norm=True),
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "batch_size": 12,  # of 33: the last has 9, which are two samples and more for each of four ranks
        },
        "gated": tokens | {"model": Gated, "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)},
        "aside": vectors
        | {
            "model": Aside,
            "loss": lambda output, batch: F.cross_entropy(output.scores, batch[1]),
            "batch_size": 12,
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        },
        "twice": vectors | {"model": Twice, "batch_size": 12, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)},
        "counts": vectors | {"model": Counting, "batch_size": 12, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)},
        "users": clicks | {"model": lambda: Clicked(bags=False), "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)},
        "clicks": clicks
        | {
            "model": Clicked,
            "loss": click_loss,
            "optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
            "lr_schedule": lambda each: torch.optim.lr_scheduler.StepLR(each, 1, 0.9),
        },
        "sparse": clicks | {"model": lambda: Clicked(sparse=True), "optimizer": apart, "clip_norm": 0.05},
        "sparse-free": clicks | {"model": lambda: Clicked(sparse=True), "optimizer": apart},
        "moved": clicks
        | {
            "model": Clicked,
            "loss": click_loss,
            "optimizer": dense(
                lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
                lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
                lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, weight_decay=0.1),
            ),
            "lr_schedule": lambda each: torch.optim.lr_scheduler.StepLR(each, 2, 0.9),
            "epochs": 8,
        },
        "mixed": clicks
        | {
            "model": Clicked,
            "loss": click_loss,
            "optimizer": dense(
                lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
                lambda p: torch.optim.Adagrad(p, lr=0.1),
                lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
            ),
            "lr_schedule": lambda each: torch.optim.lr_scheduler.StepLR(each, 1, 0.9),
        },
        "moved-too": clicks
        | {
            "model": Clicked,
            "optimizer": dense(
                lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
                lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2),
                lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
            ),
            "lr_schedule": lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 24),
            "clip_norm": 0.5,
            "epochs": 8,
        },
        "keys": tokens | {"model": Attention, "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)},
    }
    return Job(**{"batch_size": 8, "epochs": 2} | jobs[name] | changes)


#: A job's name, a fault's name (empty: none), and what the plan has beside dp.
Proof = tuple[str, str, dict[str, Any]]


def prove(world: World, proofs: list[Proof]) -> list[str]:
    """The certificates, as text. Several in one go: starting a group costs more than a small proof."""
    texts = []
    for name, fault, plan in proofs:
        made = Plan(mesh=Mesh(dp=world.size), threads=1).replace(**plan)
        with inject_fault(fault) if fault else nullcontext():
            texts.append(verify(make_job(name), made, world=world).to_json())
    return texts


def any_job(name: str, fault: str = "") -> Job:
    """One of the above or of the zoo, with what a fault needs to show."""
    job = ZOO[name]() if name in ZOO else make_job(name)
    if "learning rate" in fault and job.lr_schedule is None:
        return dataclasses.replace(job, lr_schedule=torch.optim.lr_scheduler.CosineAnnealingLR)
    return job


def plan_for(name: str, text: str) -> str:
    """The plan document of a short form, with its placements and stages for a model."""
    return complete(from_text(f"{text} threads=1"), any_job(name)).to_json()


def prove_broken(world: World, name: str, plan: str, fault: str, **options: Any) -> str:
    """The certificate of a job under a plan document while a fault of the catalogue is in the run (empty: none)."""
    with inject_fault(fault) if fault else nullcontext():
        return verify(any_job(name, fault), Plan.from_json(plan), world=world, **options).to_json()
