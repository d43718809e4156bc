"""Parameters that are laid out, typed or held as most are not: they train right, or are refused in words."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from echelon.engine.exchange import Exchange
from echelon.engine.run import Run
from echelon.errors import JobError
from echelon.plan.certificate import Certificate
from echelon.plan.plan import Plan
from echelon.testing.ranks import Pool
from echelon.world import World
from tests.zoo import ZOO, prove


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("channels-last", "dp=2"),  # fused kernels take it that a gradient lies as its parameter does
        ("flow", "dp=2 zero=2 whole"),  # weights in columns
        ("siamese", "dp=2 zero=3"),  # a temperature: one number cannot be sharded
        ("fourier", "dp=2 zero=1"),  # complex weights
    ],
)
def test_unusual_parameters_are_proved(ranks: Pool, name: str, plan: str) -> None:
    certificate = Certificate.from_json(ranks.run(2, prove.prove, name, plan, timeout=240)[0])
    assert certificate.verified, certificate.divergent


def test_gradients_lie_as_their_parameters_do() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    overlapping = nn.Parameter(torch.randn(1, 4).expand(3, 4), requires_grad=True)
    exchange = Exchange([weight, nn.Parameter(torch.randn(3, 5).t()), overlapping], 1)
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
        (micro,) = batch.micros
        loss = job.loss(plain(*micro.batch[:-1]), micro.batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(batch)
    assert plain.bags[0].weight.grad.is_sparse
    for mine, theirs in zip(run.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    run.close()


def test_an_optimizer_of_sparse_gradients_alone_is_refused() -> None:
    job = replace(ZOO["dlrm-sparse"](), optimizer=lambda params: torch.optim.SparseAdam(list(params)))
    with pytest.raises(JobError, match="SparseAdam, which takes sparse gradients alone"):
        Run(job, Plan(), World())


@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors stay on the host there, which torch itself refuses")
@pytest.mark.parametrize("name", ["held elsewhere", "one held elsewhere"])
def test_a_parameter_that_would_not_learn_under_zero_stops_the_run(ranks: Pool, name: str) -> None:
    messages = ranks.run(2, "tests.engine.jobs:failure", name, "dp=2 zero=3", timeout=120)
    assert all("zero=3: layer.weight would not learn: a layer computes with" in message for message in messages), (
        messages
    )
