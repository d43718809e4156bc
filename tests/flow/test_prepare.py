"""What is known of a job, and what is kept of it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.engine.run import Run
from echelon.errors import JobError, PlanError
from echelon.flow.job_source import JobSource
from echelon.flow.resolve_plan import ResolvedPlan, load_resolved_plan, resolve_plan
from echelon.flow.train import train
from echelon.plan.check import require_executable
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.world import World
from tests.flow.jobs import FILE, make
from tests.simulator.cases import make_cluster, make_profile


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "kept.py").write_text(FILE)
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "file" / "cache"))
    subject = JobSource(str(tmp_path / "kept.py"))
    assert subject.profile().elements == 9
    (warning,) = subject.warnings
    assert "the profile could not be kept there" in warning
    assert "ECHELON_CACHE" in warning


def test_a_profile_is_kept_for_a_file_that_alone_describes_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    (tmp_path / "again.py").write_text(FILE)
    JobSource(str(tmp_path / "again.py")).profile()
    (kept,) = (tmp_path / "cache").glob("profile-*.json")
    before = kept.stat().st_mtime_ns
    JobSource(str(tmp_path / "again.py")).profile()
    assert kept.stat().st_mtime_ns == before


def test_ranks_get_all_that_is_known(tmp_path: Path) -> None:
    prepared = ResolvedPlan(plan=from_text("dp=2"), profile=make_profile(), cluster=make_cluster(cores=2))
    received = load_resolved_plan(prepared.save_for_ranks(tmp_path))
    assert (received.plan, received.profile, received.cluster) == (prepared.plan, prepared.profile, prepared.cluster)
    assert received.forecast is not None
    (tmp_path / "bare").mkdir()
    assert load_resolved_plan(ResolvedPlan(plan=from_text("dp=2")).save_for_ranks(tmp_path / "bare")).profile is None


class Undecided(nn.Module):
    """Its samples decide which layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        side = x[:, :1] > 0
        left = self.left(x) if side.any() else torch.zeros(())
        return torch.where(side, left, self.right(x) if not side.all() else torch.zeros(()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan", "instead", "why"),
    [
        (lambda: nn.Linear(8, 1), "pp=2 micro=2 schedule=gpipe", "dp=2 zero=3 micro=1", "pp=2: the model cannot be cut into stages: it is a single"),
        (lambda: nn.Linear(8, 1), "dp=2 pp=2 zero=1", "dp=4 zero=3", "pp=2: the model cannot be cut into stages"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), "pp=3", "dp=3 zero=3", "pp=3: 3 stages, and the model has 2 units"),
        (lambda: nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 1)), "tp=9", "dp=9 zero=3", "tp=9: nothing of the model can be cut"),
        (lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))), "pp=5 micro=10", "dp=5 zero=3 micro=2 batchnorm=sync", "pp=5: 5 stages"),
        (Undecided, "pp=2", "dp=2 zero=3 whole", "pp=2: the model cannot be cut into stages"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("profiled", [True, False])
def test_where_nothing_can_be_cut_the_ranks_share_the_memory_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: type[nn.Module], plan: str, instead: str, why: str, profiled: bool
) -> None:  # fmt: skip
    subject = JobSource(make(model=model, batch_size=16))
    if profiled:
        known = subject.profile()
        monkeypatch.setattr(subject, "cached_profile", lambda: known)
    prepared = resolve_plan(subject, plan)
    assert str(prepared.plan) == instead
    assert f'"{from_text(plan)}" falls back to "{instead}" on the same ranks' in prepared.fallback
    assert why in prepared.fallback
    assert "\n" not in prepared.fallback
    assert prepared.fallback in prepared.warnings
    received = load_resolved_plan(prepared.save_for_ranks(tmp_path))
    assert (received.plan, received.fallback) == (prepared.plan, prepared.fallback)


class Slope(nn.Module):
    """Gives a derivative that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.layer(x).tanh().sum(), x, create_graph=True)
        return slope.sum(1, keepdim=True)


class Beside(nn.Module):
    """Computes with a parameter that it holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.held = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.held[0].T


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "why"),
    [(Slope, "differentiates its own derivative"), (Beside, "layer.weight is held by a layer outside its module")],
)
def test_a_model_that_cannot_be_sharded_either_trains_whole_on_every_rank(model: type[nn.Module], why: str) -> None:
    subject = JobSource(make(model=model, batch_size=16))
    assert why in subject.profile().unshardable_reason
    prepared = resolve_plan(subject, "pp=2")
    assert str(prepared.plan) == "dp=2"
    assert (
        '"dp=1 pp=2" falls back to "dp=2" on the same ranks, where every rank has the whole model' in prepared.fallback
    )
    assert why in prepared.fallback
    with pytest.raises(PlanError, match=rf"zero=1: .*{why}.*use zero=0"):
        require_executable(from_text("dp=2 zero=1 whole"), subject.profile())


def test_where_the_ranks_cannot_share_either_one_process_trains_and_both_reasons_are_told() -> None:
    subject = JobSource(make(loss=lambda output, batch: (output - batch[-1]).std()))
    prepared = resolve_plan(subject, "pp=2")
    assert prepared.plan == Plan()
    assert "pp=2: the model cannot be cut into stages" in prepared.fallback
    assert "dp=2: a sample's loss depends on the others of its batch" in prepared.fallback


def test_a_plan_that_is_wrong_in_itself_is_still_refused() -> None:
    with pytest.raises(PlanError, match="leave `sequence` out"):
        resolve_plan(
            JobSource(make(model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))), "tp=2 pp=2 sequence"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("dp=2", "dp=1"),
        ("dp=2 zero=3 whole shares=2:1", "dp=1"),
        ("dp=1 micro=4", "dp=1"),
        ("dp=2 tp=2 micro=4", "dp=1 tp=2"),
        ("dp=2 pp=2 micro=2", "dp=1 pp=2"),
    ],
)
def test_samples_that_see_each_other_stay_together(text: str, instead: str) -> None:
    """Whatever a plan written by hand says: on fewer ranks, with the reason."""
    job = make(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)),
        loss=lambda output, batch: (output - batch[-1]).std(),
        batch_size=16,
    )
    prepared = resolve_plan(JobSource(job), text)
    assert str(prepared.plan) == instead
    assert "a sample's loss depends on the others of its batch" in prepared.fallback
    assert prepared.fallback in prepared.warnings


class Picky(nn.Linear):
    """Takes no batch but that of its training."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 16:
            raise ValueError(f"a batch of {len(x)}")
        return super().forward(x)


def test_what_is_not_known_of_a_model_that_cannot_be_profiled_is_said() -> None:
    prepared = resolve_plan(JobSource(make(model=lambda: Picky(8, 1), batch_size=16)), "dp=1 micro=8")
    assert prepared.profile is None
    (warning,) = (each for each in prepared.warnings if "could not be profiled" in each)
    assert "(ValueError: a batch of 2): whether its samples see each other" in warning


def _frozen() -> nn.Module:
    return nn.Linear(8, 1).requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential, "model (Sequential) has no parameters: there is nothing to train"),
        (nn.Tanh, "model (Tanh) has no parameters"),
        (
            _frozen,
            "model (Linear): all 2 parameters have requires_grad=False (weight, bias): there is nothing to train",
        ),
    ],
)
@pytest.mark.parametrize("plan", ["", "dp=1"])
def test_a_model_with_nothing_to_train_is_refused_in_words(model: Any, words: str, plan: str, tmp_path: Path) -> None:
    job = make(model=model, loss=lambda output, batch: output.sum())
    begin = partial(train, job, plan, out=tmp_path, quiet=True) if plan else partial(resolve_plan, JobSource(job))
    with pytest.raises(JobError, match=re.escape(words)):
        begin()


def test_a_plan_that_is_completed_for_one_model_is_not_taken_for_another_of_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the environment decides is not seen in the sources."""
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "sized.py"
    file.write_text(
        "import os, torch\nfrom torch import nn\nfrom tests.flow.jobs import make\n"
        "def job():\n"
        "    rows = int(os.environ['TABLE_ROWS'])\n"
        "    ids = torch.utils.data.TensorDataset(torch.arange(64).reshape(32, 2))\n"
        "    return make(model=lambda: nn.EmbeddingBag(rows, 4), inputs=lambda batch: (batch, {}),\n"
        "                loss=lambda output, batch: output.mean(), data=ids)\n"
    )
    for rows in (2000, 3000, 2000):
        monkeypatch.setenv("TABLE_ROWS", str(rows))
        prepared = resolve_plan(JobSource(str(file)), "dp=2 exchange=server rows=1000")
        assert [table.rows for table in prepared.plan.server.tables] == [rows]
        assert prepared.profile is not None
        assert prepared.plan.model == prepared.profile.model


def test_cuts_that_this_machine_cannot_look_for_are_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, plan = JobSource(make), from_text("tp=2")
    profile = subject.profile()
    monkeypatch.setattr("echelon.flow.job_source._MAX_TRIAL_SECONDS", -1.0)
    assert subject.complete_if_cheap(plan, profile) == plan
    assert subject.complete_if_cheap(from_text("dp=2 tp=2"), profile).incomplete
    (warning,) = subject.warnings
    assert "trying it in float64 would take" in warning
    monkeypatch.setattr("echelon.flow.job_source._TRIAL_COPIES", 1e30)
    assert subject.complete_if_cheap(plan, profile) == plan
    assert "this machine has" in subject.warnings[-1]
    monkeypatch.undo()
    assert not JobSource(make).complete_if_cheap(plan, profile).incomplete  # a small one is looked at


def test_a_setting_that_the_model_does_not_allow_is_left_out_and_it_is_said(tmp_path: Path) -> None:
    """Of text and of documents alike."""
    subject = JobSource(make(model=Undecided, batch_size=16))
    document = tmp_path / "plan.json"
    from_text("dp=2 zero=3").save(document)
    for wanted in ("dp=2 zero=3", str(document)):
        prepared = resolve_plan(subject, wanted)
        assert str(prepared.plan) == "dp=2 zero=3 whole"
        assert prepared.fallback.startswith('"dp=2 zero=3" runs as "dp=2 zero=3 whole": zero=3: ')
        assert prepared.fallback in prepared.warnings
    prepared = resolve_plan(JobSource(make(model=Beside, batch_size=16)), "dp=2 zero=3 keep")
    assert str(prepared.plan) == "dp=2"
    assert "layer.weight is held by a layer outside its module" in prepared.fallback


@pytest.mark.extra
@pytest.mark.slow
def test_a_keras_model_is_the_same_model_each_time_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras counts its layers over all models of a process and names parameters by it: what `auto` planned was "for another model"."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")

    def model() -> nn.Module:
        layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        return keras.Sequential(layers)

    job = make(model=model, epochs=1)
    plan = replace(Plan(), model=JobSource(job).profile().model)  # as auto's plans are
    for _ in range(2):
        with Run(job, plan, World()) as run:
            assert run.step(next(run.batches())).loss > 0
