"""Who clicks on what: a recommender whose tables a parameter server holds, on clicks drawn from a model that is known.

python examples/recommender.py
echelon train examples/recommender.py --plan "dp=2 exchange=server rows=1000"
echelon train examples/recommender.py --plan "dp=2 exchange=server rows=1000 dense=server staleness=4 servers=2 replicas=2"
echelon verify examples/recommender.py --plan "dp=2 exchange=server rows=1000"

The job says nothing of servers: without `exchange=server` each rank holds the tables, and the losses are the same.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import echelon

USERS, ITEMS, SHOPS = 2000, 1000, 50


class Recommender(nn.Module):
    """A user, the items seen before and the item that is shown, as rows of tables; what they have in common decides."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, dim), nn.Embedding(ITEMS, dim)
        self.history = nn.EmbeddingBag(ITEMS, dim, mode="mean")
        self.shops = nn.Embedding(SHOPS, dim)  # small: it stays with the ranks
        self.top = nn.Sequential(nn.Linear(4 * dim + 3, 32), nn.ReLU(), nn.Linear(32, 1))
        for table in (self.users, self.items, self.history, self.shops):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, ids: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        rows = [self.users(ids[:, 0]), self.items(ids[:, 1]), self.history(history), self.shops(ids[:, 2])]
        alike = [(rows[1] * other).sum(1, keepdim=True) for other in (rows[0], rows[2], rows[3])]
        return self.top(torch.cat([*rows, *alike], 1)).squeeze(1)


def clicks(count: int, seed: int) -> TensorDataset:
    """Some users and items come up far more often than others; what users like is a matter of a few hidden traits."""
    world, draw = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)

    def often(rows: int, *shape: int) -> torch.Tensor:
        return (rows ** torch.rand(*shape, generator=draw)).long().clamp(max=rows - 1)

    users, items, history = often(USERS, count), often(ITEMS, count), often(ITEMS, count, 5)
    shops = torch.randint(0, SHOPS, (count,), generator=draw)
    tastes, traits = torch.randn(USERS, 4, generator=world), torch.randn(ITEMS, 4, generator=world)
    liked = (tastes[users] * traits[items]).sum(1) + (traits[history].mean(1) * traits[items]).sum(1)
    labels = (torch.rand(count, generator=draw) < torch.sigmoid(liked - 0.5)).float()
    return TensorDataset(torch.stack([users, items, shops], 1), history, labels)


def right(output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    return ((output > 0) == (batch[-1] > 0.5)).float().mean()


def job() -> echelon.Job:
    return echelon.Job(
        name="recommender",
        model=Recommender,
        loss=lambda output, batch: F.binary_cross_entropy_with_logits(output, batch[-1]),
        # Rows that no sample of a step uses are left alone: of all optimizers the least work for servers.
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.05),
        data=clicks(60_000, seed=1),
        warmup_data=0.1,
        batch_size=512,
        epochs=2,
        eval_data=clicks(10_000, seed=2),
        metrics={"right": right},
    )


if __name__ == "__main__":
    echelon.train(job, "dp=2 exchange=server rows=1000 staleness=0")
