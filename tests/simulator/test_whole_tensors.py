"""Optimizers that need whole tensors cost an exchange and the owner's memory, where the plan cuts tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.plan import catalogue
from echelon.plan.cluster import Cluster
from echelon.plan.profile import Profile, UpdateScope
from echelon.plan.text import from_text
from echelon.simulator import simulate
from tests.simulator.cases import make_cluster, make_language, make_profile

CASES = [
    (make_profile(blocks=8, width=1024), make_cluster(cores=4)),
    (make_language(blocks=8, width=2048, length=1024), catalogue.parse_cluster("8xA100-80GB")),
]


def _reading(profile: Profile, reads: UpdateScope, *, draws: bool = False) -> Profile:
    return replace(
        profile, optimizers=tuple(replace(each, update_scope=reads, uses_rng=draws) for each in profile.optimizers)
    )


@pytest.mark.parametrize(("profile", "cluster"), CASES, ids=["measured", "sheet"])
@pytest.mark.parametrize("zero", [1, 3])
def test_owners_exchange_and_hold_whole_tensors(profile: Profile, cluster: Cluster, zero: int) -> None:
    plan = from_text(f"dp=4 zero={zero}")
    element, tensor, model = (
        simulate(_reading(profile, reads), cluster, plan) for reads in ("element", "tensor", "model")
    )
    draws = simulate(_reading(profile, "element", draws=True), cluster, plan)
    assert element.time.step < tensor.time.step < model.time.step
    assert element.time.exchange < tensor.time.exchange < model.time.exchange
    assert element.memory.peak < tensor.memory.peak < model.memory.peak
    assert (draws.time, draws.memory) == (model.time, model.memory)
    # One owner holds the whole state and a copy of the parameters.
    assert model.memory.optimizer >= profile.state_bytes + profile.bytes


@pytest.mark.parametrize(("profile", "cluster"), CASES, ids=["measured", "sheet"])
@pytest.mark.parametrize("reads", ["tensor", "model"])
def test_replicas_cost_nothing_more(profile: Profile, cluster: Cluster, reads: UpdateScope) -> None:
    plan = from_text("dp=4")
    assert simulate(_reading(profile, reads), cluster, plan) == simulate(profile, cluster, plan)
