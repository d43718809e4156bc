"""What a plan leaves open about a model is found once; what no plan can have is refused with what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.errors import PlanError, UnsplittableModelError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.check import check
from echelon.plan.text import from_text
from echelon.profiler import profile
from tests.engine.jobs import mlp, tokens


def small(model: Callable[[], nn.Module], **changes: Any) -> Job:
    numbers = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
    job = Job(
        model=model,
        loss=lambda output, batch: F.mse_loss(output.sum(1), batch[-1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=TensorDataset(numbers, numbers.sum(1)),
        batch_size=8,
        epochs=1,
    )
    return replace(job, **changes)


class Undecided(nn.Module):
    """Which layer runs follows from the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if float(x.sum()) > 0 else self.right(x)


@pytest.mark.slow
def test_the_document_says_what_the_short_form_leaves_open() -> None:
    job = tokens()
    known = profile(job)
    for found in (complete(from_text("tp=2 pp=2 micro=2"), job), complete(from_text("tp=2 pp=2 micro=2"), job, known)):
        assert str(found) == "dp=1 tp=2 pp=2 micro=2"
        assert not found.incomplete
        assert found.model == known.model
        assert {each.path for each in found.tensor.placements} | {each.path for each in found.tensor.replicated} == {
            each.name.rpartition(".")[0] for each in known.parameters
        }
        assert len(found.pipeline.stages) == 1
        assert complete(found, job) is found
        assert not [problem for problem in check(found, known) if problem.severity == "error"]
    assert len(complete(from_text("pp=2 schedule=interleaved"), job).pipeline.stages) == 3


def test_the_generators_are_left_as_they_were() -> None:
    state = torch.get_rng_state()
    complete(from_text("tp=2 pp=2"), mlp())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_a_profile_knows_where_a_pipeline_can_be_cut_and_what_passes() -> None:
    visits = profile(tokens()).pipeline_units
    assert [visit.path for visit in visits] == ["tokens", "positions", "blocks.0", "blocks.1", "norm", "head"]
    assert visits[0].boundary_bytes.at(1) == 0
    assert visits[3].boundary_bytes.at(3) == 3 * 9 * 16 * 4  # positions x width x bytes
    assert all(visit.cost > 0 for visit in visits)
    assert profile(small(Undecided)).pipeline_units == ()


def test_a_tensor_axis_that_divides_nothing_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        PlanError, match=r"tp=7: nothing of the model can be cut .*5 outputs are too few for 7 ranks.* dp=7 zero=3"
    ):
        complete(from_text("tp=7"), small(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("pp=3", r"pp=3: 3 stages, and the model has 2 units.*use pp=2 or less, or dp=3 zero=3"),
        ("pp=2 schedule=interleaved", r"4 stages, and the model has 2 units.*use schedule=1f1b"),
    ],
)
def test_more_stages_than_units_are_refused_with_the_remedy(plan: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        complete(from_text(plan), small(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))))


def test_a_model_that_looks_at_its_numbers_has_no_stages() -> None:
    job = small(Undecided)
    with pytest.raises(
        UnsplittableModelError,
        match=r"pp=2: the model cannot be cut into stages: .*data decide what is called.*dp=2 zero=3",
    ):
        complete(from_text("pp=2"), job)
    plan = complete(from_text("tp=2"), job)
    # The other layer is not called by these samples: it is cut at rest.
    assert sorted(each.cut for each in plan.tensor.placements) == ["gather", "stored"]


class Growing(nn.Module):
    """Makes a layer when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.late = nn.Linear(5, 5), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.late, nn.Identity):
            self.late = nn.Linear(5, 5).to(x.dtype)
        return self.head(self.late(x))


def test_layers_that_forward_makes_are_neither_profiled_nor_cut() -> None:
    job = small(Growing)
    known = profile(job)
    assert [each.name for each in known.parameters] == ["head.weight", "head.bias"]
    with pytest.raises(UnsplittableModelError, match=r"tp=2: late is created in forward.*dp=2 zero=3"):
        complete(from_text("tp=2"), job, known)


class Peeking(nn.Module):
    """Reads a weight of a block that the block does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(5, 5), "proj": nn.Linear(5, 5)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = x + block["up"](x) @ self.blocks[0]["proj"].weight  # type: ignore[index,operator]
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("tp=2 recompute=block", r"recompute=block: blocks\.0\.proj is used all over the model, and blocks\.0 would be recomputed"),
        ("tp=2 recompute=selective", r"recompute=selective: blocks\.0\.proj is used all over the model"),
        ("dp=2 tp=2 zero=3", r"zero=3: blocks\.0\.proj is used all over the model, and zero=3 shards blocks\.0 by itself; add `whole`"),
    ],
)  # fmt: skip
def test_a_weight_that_would_be_a_piece_where_it_is_used_is_refused_with_the_remedy(plan: str, words: str) -> None:
    job = small(Peeking)
    with pytest.raises(PlanError, match=words):
        complete(from_text(plan), job)
    with pytest.raises(PlanError, match=words):
        complete(from_text(plan), job, profile(job))
    good = complete(from_text("tp=2"), job)
    assert {each.path: each.gathered_in for each in good.tensor.placements if each.cut == "stored"}[
        "blocks.0.proj"
    ] == ""
    refused = replace(good, **{name: getattr(from_text(plan), name) for name in ("mesh", "zero", "recompute")})
    assert [each for each in check(refused, profile(job)) if each.severity == "error"]
    assert not [each for each in check(good, profile(job)) if each.severity == "error"]
    assert complete(from_text("dp=2 tp=2 zero=3 whole"), job).tensor.placements


class Called(nn.Module):
    """Counts its calls, in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 16), nn.Linear(16, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.first(x).relu())


class Rare(nn.Module):
    """For some numbers it looks at all columns at once, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if x.abs().max() > 1e6:
            hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        return self.second(hidden)


def test_modules_that_look_at_numbers_make_no_pairs() -> None:
    plan = complete(from_text("tp=2"), replace(mlp(), model=Rare))
    assert {each.cut for each in plan.tensor.placements} == {"gather", "logits"}


class Switching(nn.Module):
    """Which layer runs follows from how many steps there were."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.early, self.later, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.first(x)
        return self.last(self.early(x) if int(self.steps) < 4 else self.later(x))


def test_a_model_whose_calls_follow_from_its_buffers_is_not_staged() -> None:
    with pytest.raises(UnsplittableModelError):
        complete(from_text("pp=2"), replace(mlp(), model=Switching))


def clamped() -> nn.Module:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    return nn.Sequential(Clamped(8, 8), nn.Linear(8, 4))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (clamped, "forward changes 0.weight itself"),
        (hooked, "0.weight has a gradient hook"),
        (hooked(), "0.weight has a gradient hook"),
    ],
)
def test_what_happens_to_parameters_and_not_to_shards_is_known(model: Any, words: str) -> None:
    assert words in profile(replace(mlp(), model=model)).unshardable_reason


@pytest.mark.slow
def test_trials_leave_the_users_own_module_as_it_was() -> None:
    model = Called()
    job = replace(mlp(), model=model)
    profile(job)
    complete(from_text("tp=2"), job)
    complete(from_text("pp=2"), job)
    assert model.calls == 0
