"""Rows in place of a table give what the table gives, and the parts of a batch that reach tables are found again in others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.engine.backends.id_prefetch import IdPredictor, find_batch_view
from echelon.engine.backends.remote_embedding import EmptyTable, FetchedRows, install_remote_lookup
from echelon.errors import PlanError, TrainingError
from echelon.plan.parameter_server import ServedTable

IDS = torch.arange(60).reshape(10, 6)


@pytest.mark.parametrize(
    "part",
    [
        lambda ids: ids,
        lambda ids: ids[:, 2],
        lambda ids: ids[:, 1:4],
        lambda ids: ids[:, 5:],
        lambda ids: ids[:, ::2],
        lambda ids: ids.reshape(-1),
    ],
)
def test_a_part_of_one_batch_is_found_in_another(part: Any) -> None:
    view = find_batch_view(part(IDS), ["text", torch.randn(10), IDS])
    assert view is not None
    other = torch.randint(0, 1000, (7, 6))  # another number of samples
    found = view.extract([None, None, other])
    assert found is not None
    assert torch.equal(found.reshape(-1), part(other).reshape(-1))
    assert view.extract([None, None]) is None
    assert view.is_flat or view.extract([None, None, torch.zeros(7, 1, dtype=torch.long)]) is None


@pytest.mark.parametrize(
    "part", [lambda ids: ids % 7, lambda ids: ids.clone(), lambda ids: ids.int(), lambda ids: ids[2:]]
)
def test_what_is_made_from_a_batch_is_not_foreseen(part: Any) -> None:
    assert find_batch_view(part(IDS), [IDS]) is None


def test_ids_of_all_micro_batches_come_once_and_sorted() -> None:
    foresight = IdPredictor()
    foresight.set_micro_batch((IDS, torch.zeros(10)))
    foresight.observe_lookup("a", IDS[:, 0])
    foresight.observe_lookup("a", IDS[:, 1])
    foresight.observe_lookup("b", IDS[:, 2])
    foresight.observe_lookup("b", IDS[:, 2] % 3)  # some of b's ids are made: none is foreseen
    batches = [
        (torch.tensor([[5, 3, 0, 0, 0, 0]]), torch.zeros(1)),
        (torch.tensor([[3, 9, 0, 0, 0, 0]]), torch.zeros(1)),
    ]
    found = foresight.predict_ids(batches)
    assert {table: ids.tolist() for table, ids in found.items()} == {"a": [3, 5, 9]}


def served(module: nn.Module, weight: Tensor) -> list[FetchedRows]:
    """Have `module` look rows of `weight` up, as from a server; they are noted."""
    made: list[FetchedRows] = []

    def fetch(path: str, ids: Tensor) -> tuple[FetchedRows, Tensor]:
        unique, places = torch.unique(ids.reshape(-1), return_inverse=True)
        rows = FetchedRows(unique.numpy(), weight.detach()[unique].clone().requires_grad_())
        made.append(rows)
        return rows, places

    install_remote_lookup(module, ServedTable(path="table", rows=len(weight), dim=weight.shape[1]), fetch)
    return made


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("kind", ["embedding", "sum", "mean", "max", "weighed", "offsets"])
def test_rows_give_what_the_table_gives(kind: str, padding: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 4, dtype=torch.float64, generator=draw)
    ids, scores = torch.randint(0, 20, (6, 5), generator=draw), torch.rand(6, 5, dtype=torch.float64, generator=draw)
    modules: list[Any] = []
    for _ in range(2):
        mode = {"weighed": "sum", "offsets": "sum"}.get(kind, kind)
        made = (
            nn.Embedding(20, 4, padding)
            if kind == "embedding"
            else nn.EmbeddingBag(20, 4, mode=mode, padding_idx=padding)
        )
        made.weight = nn.Parameter(weight.clone())
        modules.append(made)
    rows = served(modules[1], weight)
    more = {
        "weighed": ((ids,), {"per_sample_weights": scores}),
        "offsets": ((ids.flatten(), torch.tensor([0, 4, 9])), {}),
    }
    args, kwargs = more.get(kind, ((ids,), {}))
    true, mine = (module(*args, **kwargs) for module in modules)
    assert torch.equal(true, mine)
    for out in (true, mine):
        (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    whole = torch.zeros_like(weight)
    for each in rows:
        assert each.values.grad is not None
        whole[torch.from_numpy(each.ids)] += each.values.grad
    assert torch.allclose(whole, modules[0].weight.grad, rtol=1e-14)


def test_an_id_beyond_the_table_is_refused() -> None:
    module = nn.Embedding(20, 4)
    served(module, torch.zeros(20, 4))
    with pytest.raises(TrainingError, match="table: the ids 1 to 20 are looked up in a table of 20 rows"):
        module(torch.tensor([1, 20]))


def test_a_table_that_is_not_here_cannot_be_computed_with() -> None:
    """A penalty on all of its rows would be zero, in silence."""
    standin = EmptyTable(torch.empty(0, 4), True)
    standin.parameter_name = "users.weight"
    assert standin.pow(2).sum().item() == 0
    standin.is_in_forward = lambda: True
    assert (standin.shape, standin.grad, standin.dim(), standin.numel()) == ((0, 4), None, 2, 0)
    for compute in (
        lambda: standin.pow(2).sum(),
        lambda: torch.ones(2, 4) @ standin.T,
        lambda: nn.functional.linear(torch.ones(2, 4), standin),
    ):
        with pytest.raises(PlanError, match=r"forward computes with users\.weight itself"):
            compute()


def test_rows_are_found_only_where_all_are_there() -> None:
    rows = FetchedRows(np.array([2, 5, 9]), torch.zeros(3, 1))
    found = rows.find_positions(torch.tensor([9, 2, 2]))
    assert found is not None
    assert found.tolist() == [2, 0, 0]
    assert rows.find_positions(torch.tensor([9, 3])) is None
    assert rows.find_positions(torch.tensor([10])) is None
    assert FetchedRows(np.empty(0, np.int64), torch.zeros(0, 1)).find_positions(torch.tensor([1])) is None
