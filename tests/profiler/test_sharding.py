"""Which cut a module gets, and what is said of those that get none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from echelon.errors import PlanError
from echelon.partition.complete_plan import complete
from echelon.partition.complete_plan import find_job_cuts as cuts_of
from echelon.partition.find_tp import TensorCuts, find_tensor_cuts
from echelon.plan.text import from_text
from tests.zoo import ZOO
from tests.zoo.data import train


def cut(model: nn.Module, *inputs: Any, ways: int = 2) -> TensorCuts:
    model = model.double().eval()
    given = inputs or (torch.randn(3, 8, dtype=torch.float64),)

    def loss() -> Tensor:
        out = model(*given)
        return (out[0] if isinstance(out, tuple) else out).square().sum()

    return find_tensor_cuts(model, loss, ways)


def cuts(found: TensorCuts) -> dict[str, str]:
    return {each.path: each.cut for each in found.placements}


IDS = torch.arange(12).view(3, 4)


@pytest.mark.parametrize(
    ("model", "inputs", "ways", "why"),
    [
        (nn.Sequential(nn.Linear(8, 1)), (), 2, None),
        (nn.Sequential(nn.LayerNorm(8)), (), 2, "LayerNorm has vectors only"),
        (nn.Sequential(nn.Linear(1, 2)), (torch.ones(3, 1).double(),), 3, "2 outputs are too few for 3 ranks; use tp=2 or less"),
    ],
)  # fmt: skip
def test_what_stays_whole_says_why(model: nn.Module, inputs: Any, ways: int, why: str | None) -> None:
    found = cut(model, *inputs, ways=ways)
    assert found.replicated == ({} if why is None else {"0": why})


@pytest.mark.parametrize(
    ("model", "ways", "why"),
    [
        (nn.MultiheadAttention(8, 2), 3, "2 heads are too few for 3 ranks; use tp=2 or less"),
        (nn.MultiheadAttention(8, 2, add_zero_attn=True), 2, "attention with bias_k, bias_v or add_zero_attn is not cut by heads"),
    ],
)  # fmt: skip
def test_attention_that_is_not_cut_by_heads_is_cut_at_rest(model: nn.MultiheadAttention, ways: int, why: str) -> None:
    x = torch.randn(5, 2, model.embed_dim).double()
    found = cut(model, x, x, x, ways=ways)
    assert cuts(found) == {"": "stored", "out_proj": "stored"}
    assert found.stored_reasons[""] == why


def test_shares_are_of_the_bytes() -> None:
    found = cut(
        nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 8), nn.LayerNorm(8), nn.GRUCell(8, 2))
    )
    total = 96 + 96 + 8 + 16 + (8 * 6 + 2 * 6 + 12)
    assert found.paired_share == pytest.approx(192 / total)
    assert found.stored_share == pytest.approx(60 / total)
    assert found.cut_share == pytest.approx(252 / total)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x).relu()).tanh())


def test_a_shared_weight_is_cut_alike_or_not_at_all() -> None:
    """As a row and as a column it would be two."""
    found = cut(Tied())
    assert "down" not in cuts(found)
    assert "head" not in cuts(found)
    assert found.replicated["down"] == "down and head share a parameter and cannot be cut alike"


class Beside(nn.Module):
    """A weight that the loss reads after forward is over."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_what_the_loss_reads_stays_whole() -> None:
    model = Beside().double().eval()
    x = torch.randn(3, 8).double()
    found = find_tensor_cuts(model, lambda: model(x).sum() + model.inner.weight.square().sum(), 2)
    assert found.replicated == {"inner": "its parameters are also used outside of it"}
    assert not any(value.isnan().any() for value in model.parameters())


@pytest.mark.slow
def test_most_of_every_zoo_model_is_cut() -> None:
    names = [name for name, entry in ZOO.items() if not entry.needs and name != "dlrm-sparse"]
    assert {name for name in names if cuts_of(ZOO[name](), 2).cut_share <= 0.9} == set()


def test_a_model_of_which_nothing_can_be_cut_is_refused_with_the_remedy() -> None:
    job = train(
        model=lambda: nn.Sequential(nn.LayerNorm(8)),
        data=TensorDataset(torch.randn(16, 8)),
        inputs=lambda batch: (batch, {}),
        loss=lambda output, batch: output.square().mean(),
    )
    with pytest.raises(
        PlanError, match=r"tp=2: nothing of the model can be cut \(LayerNorm has vectors only\); use dp"
    ):
        complete(from_text("tp=2"), job)


class Positions(nn.Module):
    """As transformers' CLIP has it: the table is asked for its size."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] > self.table.weight.shape[0]:
            raise ValueError("too long")
        return self.out(self.table(ids))


def test_a_table_that_is_asked_for_its_size_is_whole_when_that_happens() -> None:
    found = cut(Positions(), torch.arange(12).view(2, 6), ways=4)
    (table,) = (each for each in found.placements if each.path == "table")
    assert (table.cut, table.gathered_in) == ("stored", "")
    assert found.stored_reasons == {"table": "the sizes of its parameters are read outside of it"}


class Scaled(nn.Embedding):
    """A table with a forward of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embedding_dim**0.5


def test_a_class_derived_from_a_known_one_is_cut_at_rest_only() -> None:
    class Loud(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    assert cuts(cut(nn.Sequential(Scaled(12, 8), Loud(8, 4)), IDS)) == {"0": "stored", "1": "stored"}


def test_another_forward_on_a_layer_is_kept() -> None:
    layer, table = nn.Linear(8, 4), nn.Embedding(12, 8)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight.abs())  # type: ignore[method-assign]
    table.forward = lambda ids: nn.functional.embedding(ids, table.weight).tanh()  # type: ignore[method-assign]
    found = cut(nn.Sequential(table, layer), IDS)
    assert cuts(found) == {"0": "stored", "1": "stored"}
    assert found.stored_reasons["1"] == "this Linear computes otherwise, or not with a weight of its own"


def test_a_weight_whose_norm_is_kept_in_a_buffer_is_whole_when_that_happens() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = Scaled(12, 8)
            self.register_buffer("norm", torch.zeros((), dtype=torch.float64))

        def forward(self, ids: Tensor) -> Tensor:
            self.norm.copy_(self.table.weight.detach().norm())
            return self.table(ids)

    (table,) = cut(Kept(), IDS).placements
    assert (table.cut, table.gathered_in) == ("stored", "")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_a_hook_makes_is_not_cut_and_what_it_is_made_of_is() -> None:
    found = cut(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.utils.weight_norm(nn.Linear(12, 8))))
    assert cuts(found) == {"0": "gather", "2": "stored"}
    (normed,) = (each for each in found.placements if each.path == "2")
    assert "weight_v" in {each.name for each in normed.slices}
    assert normed.gathered_in == ""


class Attended(nn.Module):
    """Attention of which a weight is penalised, or which is computed without calling it."""

    def __init__(self, *, called: bool) -> None:
        super().__init__()
        self.inner, self.called = nn.MultiheadAttention(8, 2, batch_first=True), called

    def forward(self, x: Tensor) -> Tensor:
        if self.called:
            return self.inner(x, x, x)[0] + self.inner.in_proj_weight.square().mean()
        values = nn.functional.linear(x, self.inner.in_proj_weight[16:], self.inner.in_proj_bias[16:])
        return self.inner.out_proj(values)


@pytest.mark.parametrize("called", [False, True])
def test_attention_whose_weights_are_read_elsewhere_is_not_cut_by_heads(called: bool) -> None:
    found = cut(Attended(called=called), torch.randn(2, 5, 8).double())
    assert "attention" not in cuts(found).values()
    (inner,) = (each for each in found.placements if each.path == "inner")
    assert (inner.cut, inner.gathered_in) == ("stored", "")
