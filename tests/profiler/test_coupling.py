"""Samples that see each other are found by holding a batch against its halves; those that do not are left in peace."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.job import Job
from echelon.profiler import profile, sample_coupling
from echelon.testing.models import GPT, MLP
from echelon.trials.example_batch import ExampleBatches

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))


def make_job(model: Any, **fields: Any) -> Job:
    values: dict[str, Any] = {
        "loss": lambda output, batch: F.mse_loss(output, batch[-1]),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters),
        "data": list(zip(X, Y, strict=True)),
        "batch_size": 8,
        "steps": 1,
    }
    return Job(model=model, **(values | fields))


def mlp() -> nn.Module:
    return MLP(width=8, layers=2)


def contrastive(output: Tensor, batch: Any) -> Tensor:
    """Each sample against all others of its batch."""
    scores = F.normalize(output, dim=1) @ F.normalize(batch[-1], dim=1).T
    return F.cross_entropy(scores / 0.1, torch.arange(len(scores), device=scores.device))


def unequal(output: Tensor, batch: Any) -> Tensor:
    """A mean over the items that count, of which samples have unequal numbers."""
    total, count = unequal_counted(output, batch)
    return total / count


def unequal_counted(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    kept = batch[-1] > 0.5
    return (output.square() * kept).sum(), kept.sum()


class Functional(nn.Module):
    """Takes batch statistics without a batch norm that could be known by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last((x - x.mean(0)) / (x.std(0) + 1e-3))


class Zero(Functional):
    """A last layer of zeros: the outputs hide what the gradients show."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.last.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [make_job(mlp, loss=contrastive), make_job(Functional), make_job(Zero)],
    ids=["contrastive", "functional statistics", "zero head"],
)
def test_samples_that_see_each_other_are_found(job: Job) -> None:
    found = profile(job)
    assert found.samples_coupled
    assert found.notes == ()


def tried(job: Job, *, weighs: bool = False) -> tuple[bool | None, str]:
    return sample_coupling.detect_coupling(job, ExampleBatches(job), parameters=1, flops=1.0, weigh_by_counts=weighs)


def test_means_over_unequal_counts_part_well_where_parts_are_weighed_by_them() -> None:
    job = make_job(mlp, loss=unequal)
    assert tried(job) == (True, "")
    assert tried(job, weighs=True) == (False, "")
    assert profile(job).samples_coupled is False
    for loss in (contrastive, lambda output, batch: unequal(output, batch).sqrt()):
        assert tried(make_job(mlp, loss=loss), weighs=True) == (True, "")


def ignoring(output: Tensor, batch: Any) -> Tensor:
    """Halves of the samples that are tried count as many labels each; quarters do not."""
    target = output.detach().argmax(1).where(batch[-1][:, 0] > 0, -100)
    return F.cross_entropy(output, target)


def test_equal_halves_hide_nothing() -> None:
    kept = torch.tensor([1, -1, 1, 1, 1, 1, -1, 1.0])
    targets = kept.repeat_interleave(2)[:, None].expand(16, 8)
    job = make_job(mlp, loss=ignoring, data=list(zip(X, targets.clone(), strict=True)))
    assert tried(job) == (True, "")
    assert tried(job, weighs=True) == (False, "")


class Quirks(nn.Module):
    """Dropout in every form, a buffer that every forward changes, casts to float32, batch norms with and without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.norm(F.dropout(self.layers(x), 0.5)).float() * (1 + self.seen).log()


class Island(nn.Module):
    """Keeps a float32 tensor to itself, so that it does not run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), torch.eye(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.table


class Recurrent(nn.Module):
    """Its dropout happens where no function can be caught."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unsqueeze(1))[0].squeeze(1)


class Faint(nn.Module):
    """A loss of its own in which samples see each other, a hundredth of the whole, as router losses are."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layers = nn.Linear(8, 4), mlp()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        shares = self.router(x).softmax(-1)
        return {"output": self.layers(x), "balance": 1e-2 * shares.mean(0).square().sum()}


def late(output: Tensor, batch: Any) -> Tensor:
    """A mean over what is not padding, which few samples have."""
    kept = (batch[-1] != 0).all(1)
    return (output.square().sum(1) * kept).sum() / kept.sum()


def wrong(output: Tensor, batch: Any) -> Tensor:
    """A mean over the samples that the model gets wrong: of a fresh one all."""
    missed = output.sum(1) <= 0
    return ((output - batch[-1]).square().sum(1) * missed).sum() / missed.sum().clamp(min=1)


def zeros() -> nn.Module:
    model = mlp()
    for value in model[-1].parameters():  # type: ignore[index]
        nn.init.zeros_(value)
    return model


@pytest.mark.parametrize("loss", [late, wrong])
def test_a_loss_that_couples_few_samples_or_later_ones_is_found(loss: Any) -> None:
    targets = torch.cat([Y, Y, Y, Y]) + 2
    targets[[9, 10, 13]] = 0
    job = make_job(zeros, loss=loss, data=list(zip(torch.cat([X] * 4), targets, strict=True)))
    assert tried(job) == (True, "")
    assert tried(job, weighs=True) == (False, "")


def test_a_faint_coupling_is_found() -> None:
    def loss(output: dict[str, Tensor], batch: Any) -> Tensor:
        return F.mse_loss(output["output"], batch[-1]) + output["balance"]

    assert profile(make_job(Faint, loss=loss)).samples_coupled


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        make_job(mlp),
        make_job(mlp()),
        make_job(mlp, loss=unequal_counted),
        make_job(Island),
        make_job(Quirks),
        make_job(Recurrent),
        make_job(mlp, batch_size=3),
        make_job(mlp, batch_size=1),
        make_job(
            lambda: GPT(vocab=32, context=8, width=16, layers=2, heads=2, dropout=0.1),
            data=[(row, row) for row in torch.arange(128).view(16, 8) % 31],
            loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[-1].flatten()),
        ),
    ],
    ids=[
        "mlp",
        "module",
        "sum and count",
        "float32 inside",
        "quirks",
        "recurrent",
        "batch of three",
        "batch of one",
        "gpt",
    ],
)
def test_independent_samples_are_left_in_peace(job: Job) -> None:
    found = profile(job, device="cpu")  # some hold tensors that stay on the host
    assert found.samples_coupled is False
    assert found.notes == ()


def test_a_contrastive_loss_is_found_in_float32_too() -> None:
    assert profile(make_job(Island, loss=contrastive)).samples_coupled


def test_randomness_that_cannot_be_held_is_said_and_not_taken_for_coupling() -> None:
    def drawn(samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        return [batch[0] + torch.empty_like(batch[0]).exponential_(), batch[1]]

    found = profile(make_job(mlp, collate=drawn))
    assert found.samples_coupled is None
    assert "draws random numbers that cannot be held still" in found.coupling_unknown_reason


def test_what_cannot_be_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float64 or not isinstance(x, torch._subclasses.FakeTensor):
                raise RuntimeError("only on an accelerator")
            return super().forward(x)

    found = profile(make_job(lambda: Fails(8, 8)))
    assert found.samples_coupled is None
    assert "RuntimeError: only on an accelerator" in found.coupling_unknown_reason
    monkeypatch.setattr(sample_coupling, "MAX_PARAMETERS", 10)
    built: list[type] = []
    monkeypatch.setattr(mlp, "built", built.append, raising=False)  # a captured list would be a trial's own copy
    found = profile(make_job(lambda: mlp.built(type(torch.empty(1))) or mlp(), loss=contrastive))
    assert "too large to try it on a CPU" in found.coupling_unknown_reason
    assert found.samples_coupled is None
    assert set(built) == {torch._subclasses.FakeTensor}, "a large model is traced and not built for real"
    monkeypatch.setattr(sample_coupling, "MAX_PARAMETERS", 10**6)
    monkeypatch.setattr(sample_coupling, "MAX_FLOPS", 1e3)
    assert "too large" in profile(make_job(mlp)).coupling_unknown_reason


@pytest.mark.slow
def test_nothing_of_the_users_is_changed() -> None:
    model = Quirks()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()  # type: ignore[index]
    profile(make_job(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.layers[2].p == 0.5
    assert all(value.grad is None for value in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()  # type: ignore[index]


def test_sparse_gradients_are_compared() -> None:
    def job(loss: Any) -> Job:
        return make_job(
            lambda: nn.Embedding(9, 8, sparse=True),
            data=[(torch.tensor(i % 9), row) for i, row in enumerate(Y)],
            loss=loss,
            optimizer=lambda parameters: torch.optim.SparseAdam(list(parameters)),
        )

    assert profile(job(lambda output, batch: F.mse_loss(output, batch[-1]))).samples_coupled is False
    assert profile(job(contrastive)).samples_coupled


def test_complex_parameters_are_tried_as_they_are() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=8)

    found = profile(
        Job(
            model=Spectral,
            loss=lambda output, batch: F.mse_loss(output, batch[-1]),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            data=[(torch.randn(8), torch.randn(8)) for _ in range(8)],
            batch_size=4,
            steps=1,
        )
    )
    assert found.samples_coupled is False
    assert found.notes == ()


def test_splits_cover_any_number_of_samples() -> None:
    from echelon.profiler.sample_coupling import _list_splits

    for samples in range(2, 40):
        for parts in _list_splits(samples):
            assert sum(part.num_samples for part in parts) == samples
            assert [part.first_sample for part in parts] == [
                sum(part.num_samples for part in parts[:at]) for at in range(len(parts))
            ]


class Periodic(nn.Module):
    """Takes the batch's mean off at every 20th call; who counts them is said by `count`."""

    def __init__(self, kind: str, period: int = 20) -> None:
        super().__init__()
        self.first, self.last, self.kind, self.period = nn.Linear(8, 8), nn.Linear(8, 8), kind, period
        self.register_buffer("whole", torch.zeros((), dtype=torch.long))
        self.register_buffer("real", torch.zeros(()))
        self.plain, self.held = 0, {"calls": [0]}

    def count(self) -> int:
        if self.kind == "whole":
            self.whole += 1
        elif self.kind == "real":
            self.real = self.real + 1
        elif self.kind == "plain":
            self.plain += 1
        else:
            self.held["calls"][0] += 1
        return int(self.whole) + int(self.real) + self.plain + self.held["calls"][0]

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x).tanh(), 0.5)
        if self.count() % self.period == 0:
            x = x - x.mean(0)
        return self.last(x)


class PeriodicLoss:
    """Couples samples at every 61st call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        loss = F.mse_loss(output, batch[-1])
        return loss + output.std(0).mean() if self.calls % 61 == 0 else loss


@pytest.mark.parametrize("kind", ["whole", "real", "plain", "held"])
def test_a_model_that_couples_samples_at_some_calls_only_is_found(kind: str) -> None:
    assert tried(make_job(lambda: Periodic(kind))) == (True, "")


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 2])
def test_a_loss_that_couples_samples_at_some_calls_only_is_found(batch: int) -> None:
    job = make_job(mlp, loss=PeriodicLoss(), batch_size=batch)
    assert profile(job).samples_coupled
    assert job.loss.calls == 0  # type: ignore[union-attr]


class Scaled(Periodic):
    """Counts its calls, reads the count and couples nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x).relu(), 0.5)) * (1 + self.count() / 100)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "real"])
def test_counts_in_buffers_that_couple_nothing_are_left_in_peace(kind: str) -> None:
    assert tried(make_job(lambda: Scaled(kind))) == (False, "")


@pytest.mark.parametrize("kind", ["plain", "held"])
def test_state_of_python_objects_is_not_called_random(kind: str) -> None:
    found, why = tried(make_job(lambda: Scaled(kind)))
    assert found is None
    assert "keeps state by which each call computes something else" in why


class Keeps(nn.Linear):
    """Keeps its last output, which the next call does not read."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = super().forward(x)
        return self.seen


@pytest.mark.parametrize("model", [mlp, lambda: Keeps(8, 8), lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))])
def test_models_without_state_are_not_tried_further(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[int] = []
    monkeypatch.setattr(sample_coupling._Comparison, "is_coupled_later", lambda _, samples: later.append(samples))
    assert tried(make_job(model)) == (False, "")
    assert later == []
    tried(make_job(lambda: Scaled("whole")))
    assert later == [4]
