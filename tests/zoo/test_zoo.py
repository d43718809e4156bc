"""Every model of the zoo trains, and a sample of them is proved under data parallelism (ECHELON_ZOO=all: all of them)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bench import zoo as table
from echelon.job import Job, call_loss, call_model
from echelon.plan.certificate import Certificate
from echelon.plan.check import check
from echelon.plan.text import from_text
from echelon.profiler import profile
from echelon.testing.rank_pool import RankError, RankPool
from echelon.verifier.reference_data import open_reference_data
from tests.sampling import WHOLE, drawing, only_whole, some
from tests.zoo import ZOO, prove
from tests.zoo.expected import UNPROVED, expected

#: What cannot be proved under dp=2, and what is said of it.
KNOWN = {
    # The loss couples samples.
    "moe-balanced": "a sample's loss depends on the others of its batch",
    "hf-clip": "a sample's loss depends on the others of its batch",
}
GOOD = [name for name in ZOO if name not in KNOWN]


def need(name: str) -> None:
    for package in ZOO[name].needs:
        if importlib.util.find_spec(package) is None:  # importing keras must wait until its backend is named
            pytest.skip(f"{package} is not installed")


def build(job: Job) -> nn.Module:
    """As one device would. A module is trained in place, so a zoo of factories only."""
    assert not isinstance(job.model, nn.Module)
    torch.manual_seed(job.seed)
    return job.model().train()


#: Of the models that need no framework, those that `make test` trains for a step.
QUICK = some("zoo steps", [name for name in ZOO if not ZOO[name].needs], 6)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
)
def test_a_step(name: str) -> None:
    need(name)
    job = ZOO[name]()
    model, again = build(job), build(job)
    state, other = model.state_dict(), again.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[key], other[key]) for key in state), "two builds from one seed differ"
    assert 20_000 <= sum(value.numel() for value in model.parameters()) < 2_000_000
    batch = open_reference_data(job).read(0, np.arange(job.batch_size))
    loss = call_loss(job, call_model(job, model, batch), batch, model)
    value = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    value.backward()
    assert torch.isfinite(value)
    trained = [each for each in model.parameters() if each.requires_grad]
    reached = [each for each in trained if each.grad is not None and each.grad.abs().sum() > 0]
    assert len(reached) > 0.5 * len(trained)
    optimizer = job.optimizer(model.named_parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    before = [each.detach().clone() for each in reached]
    optimizer.step()
    moved = [not torch.equal(each, old) for each, old in zip(reached, before, strict=True)]
    assert sum(moved) > 0.5 * len(trained)


@pytest.mark.journey
@pytest.mark.parametrize("name", GOOD if WHOLE else drawing("data").sample(GOOD, 2))
def test_proved_under_data_parallelism(ranks: RankPool, name: str) -> None:
    require_proved(ranks, name)


@only_whole
@pytest.mark.parametrize("name", KNOWN)
def test_known_limits(ranks: RankPool, name: str) -> None:
    """Whoever lifts one takes it out of KNOWN."""
    with pytest.raises((AssertionError, RankError), match=KNOWN[name]):
        require_proved(ranks, name)


def require_proved(ranks: RankPool, name: str) -> None:
    need(name)
    certificate = Certificate.from_json(ranks.run(2, prove.prove, name, "dp=2 threads=1", timeout=120)[0])
    assert certificate.verified, certificate.divergent
    assert any("the epoch's last" in note for note in certificate.notes), "a short batch is where weights go wrong"


def sampled() -> list[tuple[str, str]]:
    """Cells of `python -m bench.zoo`, which makes the whole table: of each axis alone and of any."""
    draw = drawing("axes")
    axes = [plan for plan in table.PLANS if "tp" in plan or "pp" in plan]
    wanted = [(draw.choice([*ZOO]), plan) for plan in ("tp=2", "pp=2")]
    return wanted + draw.sample([(name, plan) for name in ZOO for plan in axes], 60 if WHOLE else 1)


@pytest.mark.journey
@pytest.mark.parametrize(("name", "plan"), sampled())
def test_proved_under_tensor_and_pipeline_parallelism(ranks: RankPool, name: str, plan: str) -> None:
    need(name)
    cell = table.judge(ranks, name, plan)
    assert cell.verdict == expected(name, plan), cell.why
    if cell.verdict != "refused":  # what a plan falls back to is proved as well
        assert 0 < cell.worst <= cell.bound


def test_what_is_expected_is_of_models_and_plans_that_there_are() -> None:
    """Whoever mends one takes it out of the table."""
    for each in UNPROVED:
        assert set(each.models) <= ZOO.keys()
        for model in each.models:
            first = "0.0" if each.until else torch.__version__
            assert any(
                each.plans(from_text(plan)) and expected(model, plan, first) == each.verdict for plan in table.PLANS
            )
    assert expected("records", "dp=2 zero=3", "2.11.0+cu130") == "refused"
    assert expected("records", "dp=2 zero=3", "2.13.0") == expected("records", "dp=2", "2.11.0") == "verified"


def cell(model: str, plan: str, **facts: Any) -> table.Cell:
    return table.Cell(**{"model": model, "plan": plan, "verdict": "verified", "cut": 0.9, "work": 0.5} | facts)


def test_a_zoo_that_refuses_or_hardly_cuts_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in ZOO if expected(name, "tp=2") == expected(name, "pp=2") == "verified"]
    monkeypatch.setattr(table, "_here_to_make", lambda: names)

    def good(plan: str, **facts: Any) -> list[bool]:
        return [row.good for row in table._rows([cell(name, plan, **facts) for name in names])]

    assert good("tp=2") == good("pp=2", cut=0.0) == [True, True]
    assert good("tp=2", verdict="refused") == [False, False]
    assert good("pp=2", verdict="falls back") == [False, False]
    assert good("tp=2", cut=0.4) == good("pp=2", cut=0.0, work=0.9) == [True, False]
    assert [row.good for row in table._rows([cell(names[0], "tp=2", cut=0.4)])] == [True]  # not all: nothing is held


def test_what_is_cut_at_rest_only_is_told_apart() -> None:
    cells = [cell("resnet", "tp=2", cut=0.8, paired=0.4), cell("vgg", "tp=2", cut=0.8, paired=0.0, stored=0.6)]
    (row,) = table._rows(cells)
    assert (
        row.what["more than half cut or staged"] == "2, 1 of them without what is cut at rest only; 25% of it in pairs"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3", "tp=2", "pp=2"])
@pytest.mark.parametrize("name", ["gpt-untied", "llama", "hf-gpt2", "resnet", "vgg", "transformer", "lstm"])
def test_proved_on_one_gpu_that_ranks_share(ranks: RankPool, name: str, plan: str) -> None:
    need(name)
    cell = table.judge(ranks, name, plan)
    assert cell.verdict == "verified", cell.why


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.coupled == "loss"])
def test_losses_that_couple_samples_are_refused(name: str) -> None:
    need(name)
    (problem,) = (each for each in check(from_text("dp=2"), profile(ZOO[name]())) if each.severity == "error")
    assert "a sample's loss depends on the others of its batch" in problem.rule


@pytest.mark.slow
def test_importing_the_zoo_imports_no_framework() -> None:
    code = "import sys, tests.zoo; sys.exit(any(name in sys.modules for name in ('transformers', 'keras')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
