"""Tables are found with how often they are read, and with why a server could not train them as torch would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from echelon.errors import PlanError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.profiler.profile_model import profile


class Net(nn.Module):
    """Tables of every kind that can be served or not."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.bag = nn.Embedding(500, 4), nn.EmbeddingBag(400, 4, mode="mean")
        self.short = nn.Embedding(300, 4, max_norm=1.0)
        self.frozen = nn.Embedding(300, 4)
        self.frozen.weight.requires_grad_(False)
        self.often = nn.EmbeddingBag(300, 4, scale_grad_by_freq=True)
        self.tied, self.out = nn.Embedding(300, 4), nn.Linear(4, 300, bias=False)
        self.out.weight = self.tied.weight

    def forward(self, ids: Tensor) -> Tensor:
        one = self.single(ids[:, 0]) + self.bag(ids) + self.short(ids[:, 1]) + self.frozen(ids[:, 0]) + self.often(ids)
        return self.out(one + self.tied(ids[:, 2]))


def job(optimizer: Any) -> Job:
    ids = torch.randint(0, 300, (32, 3), generator=torch.Generator().manual_seed(0))
    return Job(
        model=Net,
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch[-1]),
        optimizer=optimizer,
        data=TensorDataset(ids, ids[:, 0]),
        batch_size=16,
        epochs=1,
    )


def test_tables_and_what_forbids_them() -> None:
    found = {table.path: table for table in profile(job(lambda p: torch.optim.Adagrad(p, lr=0.1))).tables}
    assert found.keys() == {"single", "bag", "short", "frozen", "often", "tied"}
    assert (found["single"].rows, found["single"].dim, found["single"].lookups.at(8)) == (500, 4, 8)
    assert found["bag"].lookups.at(8) == 24
    assert found["single"].unsupported_reason == found["bag"].unsupported_reason == ""
    for path, words in (
        ("short", "max_norm="), ("frozen", "not trained"), ("often", "scale_grad_by_freq="), ("tied", "untie them"),
    ):  # fmt: skip
        assert words in found[path].unsupported_reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda p: torch.optim.RMSprop(p), "no server computes RMSprop"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "servers do not support amsgrad="),
        (lambda p: torch.optim.Adagrad(p, maximize=True), "negate the loss"),
    ],
)
def test_rules_that_no_server_computes_are_refused(optimizer: Any, words: str) -> None:
    made = job(optimizer)
    with pytest.raises(PlanError, match=words):
        complete(from_text("exchange=server rows=400"), made)


def test_a_short_form_is_completed_with_the_tables_of_the_model() -> None:
    plan = complete(from_text("dp=2 exchange=server rows=400"), job(lambda p: torch.optim.SGD(p, lr=0.1)))
    assert [(each.path, each.rows, each.dim, each.initialized_by) for each in plan.server.tables] == [
        ("single", 500, 4, "model"), ("bag", 400, 4, "model"),
    ]  # fmt: skip
    assert not plan.incomplete
    assert plan.model is not None
