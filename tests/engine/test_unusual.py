"""Parameters that are laid out, typed or held as most are not: they train right, or are refused in words."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from echelon.engine.parallel.gradient_allreduce import GradientAllReduce
from echelon.engine.run import Run
from echelon.errors import JobError, PlanError
from echelon.job import Job
from echelon.plan.certificate import Certificate
from echelon.plan.plan import Mesh, Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.verifier.verify import verify
from echelon.world import World
from tests.engine.jobs import JOBS, classes, failure, mlp, trained
from tests.engine.pp_models import Hooked
from tests.sampling import some
from tests.zoo import ZOO, prove


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    some("unusual", [
        ("channels-last", "dp=2"),  # fused kernels take it that a gradient lies as its parameter does
        ("flow", "dp=2 zero=2 whole"),  # weights in columns
        ("siamese", "dp=2 zero=3"),  # a temperature: one number cannot be sharded
        ("fourier", "dp=2 zero=1"),  # complex weights
    ], 2),
)  # fmt: skip
def test_unusual_parameters_are_proved(ranks: RankPool, name: str, plan: str) -> None:
    certificate = Certificate.from_json(ranks.run(2, prove.prove, name, plan, timeout=240)[0])
    assert certificate.verified, certificate.divergent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("shortened", "dp=2"),
        ("shortened", "dp=2 zero=3 micro=2"),
        ("shortened", "tp=2"),
        ("orthogonal", "dp=2 zero=1"),
        ("tempered", "tp=2"),
        ("orthogonal", "pp=2 micro=2"),
    ],
)
def test_unusual_modules_train_as_on_one_device(ranks: RankPool, name: str, plan: str) -> None:
    alone, found = trained(World(), name, "dp=1"), ranks.run(2, trained, name, plan)[0]
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-12)
    for key, value in alone["parameters"].items():
        assert torch.allclose(found["parameters"][key], value, rtol=1e-12, atol=1e-12), key


@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("hooked", "dp=2 zero=1", "zero=1: first.weight has a gradient hook"),
        ("hooked", "tp=2", "tp=2: first.weight has a gradient hook"),
        ("hooked module", "pp=2 micro=2", "pp=2: second has a backward hook"),
    ],
)
def test_what_a_plan_cannot_keep_is_refused(ranks: RankPool, name: str, plan: str, words: str) -> None:
    assert all(words in each for each in ranks.run(2, failure, name, plan))


def test_a_hook_that_sees_a_part_of_the_batch_is_told(ranks: RankPool) -> None:
    assert any("first.weight has a hook on gradients" in each for each in ranks.run(2, warned, "hooked")[0])


def test_a_parameter_may_have_its_first_gradient_later() -> None:
    """Fused kernels take momenta of all parameters or of none."""
    fused, plain = (trained_plainly(fused=fused) for fused in (True, False))
    assert all(torch.allclose(a, b) for a, b in zip(fused, plain, strict=True))


def trained_plainly(*, fused: bool) -> list[torch.Tensor]:
    with Run(JOBS["late"](), Plan(fused=fused), World()) as run:
        for batch in run.batches(4):
            run.step(batch)
        return [value.detach().clone() for value in run.model.parameters()]


def test_an_optimizer_that_wants_a_closure_is_refused() -> None:
    with pytest.raises(JobError, match=r"optimizer= is LBFGS, whose step\(\) needs a closure"):
        Run(mlp(optimizer=lambda params: torch.optim.LBFGS(params)), Plan(), World())


def warned(world: World, name: str) -> list[str]:
    said: list[str] = []
    Run(mlp(model=Hooked), Plan(mesh=Mesh(dp=world.size)), world, warn=said.append).close()
    return said


def test_gradients_lie_as_their_parameters_do() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    overlapping = nn.Parameter(torch.randn(1, 4).expand(3, 4), requires_grad=True)
    exchange = GradientAllReduce([weight, nn.Parameter(torch.randn(3, 5).t()), overlapping], 1)
    views = [view for bucket in exchange._buckets for view in bucket.views]
    assert sorted(view.stride() for view in views) == sorted([weight.stride(), (1, 5), (4, 1)])
    exchange.close()


def test_sparse_gradients_train_as_in_a_plain_loop() -> None:
    job = ZOO["dlrm-sparse"]()
    run = Run(job, Plan(), World())
    plain = copy.deepcopy(run.model)
    for bag in plain.bags:
        bag.sparse = True
    optimizer = job.optimizer(plain.parameters())
    for batch in run.batches(3):
        (micro,) = batch.micro_batches
        loss = job.loss(plain(*micro.batch[:-1]), micro.batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(batch)
    assert plain.bags[0].weight.grad.is_sparse
    for mine, theirs in zip(run.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    run.close()


class Lazy(torch.optim.Optimizer):
    """Treats sparse gradients in a way of its own: momentum of the rows that they hold alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for value in (value for group in self.param_groups for value in group["params"]):
            grad, momentum = value.grad.coalesce(), self.state[value].setdefault("momentum", torch.zeros_like(value))
            (rows,) = grad.indices()
            momentum[rows] = 0.9 * momentum[rows] + grad.values()
            self.state[value]["last"] = grad
            value[rows] -= self.param_groups[0]["lr"] * momentum[rows]


def sparse_job(kind: Any = torch.optim.SparseAdam, **changes: Any) -> Job:
    def optimizers(params: Any) -> list[torch.optim.Optimizer]:
        params = list(params)
        tables = [value for value in params if value.shape[0] == 40]
        rest = [value for value in params if value.shape[0] != 40]
        return [kind(tables), torch.optim.SGD(rest, lr=0.05)]

    ids = torch.randint(40, (32, 3), generator=torch.Generator().manual_seed(3))
    return mlp(
        model=lambda: nn.Sequential(nn.Embedding(40, 4, sparse=True), nn.Flatten(), nn.Linear(12, 4)),
        data=TensorDataset(ids, classes(32)),
        optimizer=optimizers,
        **changes,
    )


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, Lazy])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_one_process_steps_on_sparse_gradients(tmp_path: Path, kind: Any, clip: float | None) -> None:
    """Torch clips none, so the plain loop does it by hand."""
    job = sparse_job(kind, clip_norm=clip)
    run = Run(job, Plan(), World())
    plain = copy.deepcopy(run.model)
    optimizers = job.optimizer(plain.parameters())
    for batch in run.batches():
        (micro,) = batch.micro_batches
        for each in optimizers:
            each.zero_grad()
        job.loss(plain(micro.batch[0]), micro.batch).backward()
        if clip is not None:
            norm = torch.stack([value.grad.to_dense().norm() for value in plain.parameters()]).norm()
            for value in plain.parameters():
                value.grad.mul_(min(clip / (norm + 1e-6), torch.tensor(1.0)))
        for each in optimizers:
            each.step()
        run.step(batch)
    for mine, theirs in zip(run.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    run.save(tmp_path / "here")
    run.close()
    with Run(job, Plan(), World()) as again:
        again.load(tmp_path / "here")
        kept = again.optimizers[0].state_dict()["state"][0]
    wanted = optimizers[0].state_dict()["state"][0]
    for key, value in wanted.items():
        torch.testing.assert_close(kept[key], value.to_dense() if isinstance(value, torch.Tensor) else value)


def test_micro_batches_of_sparse_gradients_are_proved() -> None:
    certificate = verify(sparse_job(clip_norm=0.05), from_text("dp=1 micro=4"), world=World())
    assert certificate.verified, certificate.divergent


def test_several_ranks_refuse_what_takes_sparse_gradients_alone(ranks: RankPool) -> None:
    assert all("takes sparse gradients alone; ranks sum dense" in each for each in ranks.run(2, sparse_failure))


def sparse_failure(world: World) -> str:
    try:
        Run(sparse_job(), from_text("dp=2"), world).close()
    except PlanError as error:
        return str(error)
    return "no error"


@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors stay on the host there, which torch itself refuses")
@pytest.mark.parametrize("name", ["held elsewhere", "one held elsewhere"])
def test_a_parameter_that_would_not_learn_under_zero_stops_the_run(ranks: RankPool, name: str) -> None:
    messages = ranks.run(2, "tests.engine.jobs:failure", name, "dp=2 zero=3", timeout=120)
    assert all("zero=3: layer.weight would not learn: a layer computes with" in message for message in messages), (
        messages
    )
