"""Parameters that the loss holds and the job's optimizer trains: class proxies, a learned temperature."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.engine.checkpoint.function_state import find_loss_parameters
from echelon.engine.run import Run
from echelon.errors import JobError, PlanError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.profiler.optimizer_class import classify, make_trial_optimizers
from echelon.testing.models import MLP
from echelon.testing.rank_pool import RankPool
from echelon.verifier.verify import verify
from echelon.world import World
from tests.engine.jobs import mlp
from tests.engine.stateful import Proxies, proxies


def tempered(**changes: Any) -> Job:
    """A number in the closure of the loss; (sum, count)."""
    heat = nn.Parameter(torch.tensor(0.5))

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(output * heat.exp(), batch[-1], reduction="sum"), len(batch[-1])

    return mlp(loss=loss, optimizer=lambda params: torch.optim.AdamW([*params, heat], lr=0.05), **changes)


MADE = {"proxies": proxies, "tempered": tempered, "clipped": lambda: tempered(clip_norm=0.3)}


@pytest.mark.parametrize("name", MADE)
def test_one_process_trains_them_as_a_plain_loop_does(name: str) -> None:
    plain, job = MADE[name](), MADE[name]()
    with Run(job, Plan(fused=False), World()) as run:
        model = copy.deepcopy(run.model)
        optimizer = plain.optimizer(model.parameters())
        for value in run.loss_parameters.values():
            value.grad = torch.ones_like(value)  # as a trial may leave it
        for batch in run.batches():
            (micro,) = batch.micro_batches
            optimizer.zero_grad()
            loss = plain.loss(model(micro.batch[0]), micro.batch)
            (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
            if plain.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), plain.clip_norm)
            optimizer.step()
            run.step(batch)
        theirs = [*model.parameters(), *find_loss_parameters(plain, model).values()]
        mine = [*run.model.parameters(), *run.loss_parameters.values()]
        assert len(mine) == len(theirs) == 1 + len(list(model.parameters()))
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_trials_do_not_train_them() -> None:
    job = proxies()
    before = job.loss.vectors.detach().clone()
    model = MLP(width=12, layers=3, inputs=8, classes=4)
    classify(job, dict(model.named_parameters()))
    for optimizer in make_trial_optimizers(job, dict(model.named_parameters())):
        for value in (value for group in optimizer.param_groups for value in group["params"]):
            value.grad = torch.ones_like(value)
        optimizer.step()
    assert torch.equal(job.loss.vectors, before)
    assert job.loss.vectors.grad is None


def trained(world: World, name: str, plan: str) -> list[float]:
    job = MADE[name]()
    with torch.no_grad():
        for value in find_loss_parameters(job, nn.Module()).values():
            value += world.rank  # which one process does not have: rank 0's count
    with Run(job, from_text(plan), world) as run:
        losses = [float(run.step(batch).loss) for batch in run.batches()]
        return [*losses, *(float(value.detach().sum()) for value in run.loss_parameters.values())]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3 micro=4"])
@pytest.mark.parametrize("name", ["proxies", "clipped"])
def test_data_ranks_exchange_their_gradients(ranks: RankPool, name: str, plan: str) -> None:
    alone = trained(World(), name, "dp=1")
    for found in ranks.run(2, trained, name, plan):
        assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_a_proof_compares_them() -> None:
    certificate = verify(proxies(), from_text("dp=1 micro=4"), world=World())
    assert certificate.verified, certificate.divergent


def test_a_proof_sees_a_wrong_gradient_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Run.backward

    def backward(self: Run, batch: Any) -> Tensor:
        loss = scaled(self, batch)
        for value in self.loss_parameters.values():
            value.grad.mul_(0.5)
        return loss

    monkeypatch.setattr(Run, "backward", backward)
    certificate = verify(proxies(), from_text("dp=1 micro=4"), world=World())
    assert not certificate.verified
    assert "parameter 1 of the loss" in certificate.divergent


def refusal(world: World, plan: str) -> str:
    job = proxies()
    try:
        Run(job, complete(from_text(plan), job), world).close()
    except PlanError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("plan", ["tp=2", "pp=2 micro=2"])
def test_plans_that_share_the_model_refuse_them(ranks: RankPool, plan: str) -> None:
    assert all("cannot train loss.vectors, a parameter of loss=" in each for each in ranks.run(2, refusal, plan))


def test_a_parameter_that_nothing_uses_is_refused() -> None:
    other = Proxies()
    job = mlp(optimizer=lambda params: torch.optim.SGD([*params, *other.parameters()], lr=0.1))
    with pytest.raises(JobError, match=r"of shape \(4, 4\) that neither the model that is trained nor loss= uses"):
        Run(job, Plan(), World())
