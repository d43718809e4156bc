"""A GPU waits for a host that launches operators more slowly than they run; norms are priced by their layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.plan.cluster import Cluster, RateCurve, RatePoint
from echelon.plan.text import from_text
from echelon.simulator import simulate
from echelon.simulator.cost.curves import CurveCosts
from echelon.simulator.cost.launch_bound import host_stall_seconds
from echelon.simulator.model_summary import LocalOperator
from tests.simulator.cases import make_cluster, make_profile

_SECONDS = st.integers(0, 100).map(float)


@given(stretches=st.lists(st.tuples(_SECONDS, _SECONDS), max_size=8))
def test_a_device_waits_for_what_was_not_issued(stretches: list[tuple[float, float]]) -> None:
    issued = done = 0.0
    for host, device in stretches:
        issued += host
        done = max(done + device, issued)
    assert host_stall_seconds(stretches) == done - sum(device for _, device in stretches)


def _gpu(**seconds: float) -> Cluster:
    cluster = make_cluster()
    curves = tuple(
        RateCurve(operation=f"host {name.replace('_', ' ')}", points=(RatePoint((1.0,), 1 / each),))
        for name, each in seconds.items()
    )
    device = replace(cluster.nodes[0].devices[0], kind="cuda", overhead=1e-9)
    device = replace(device, curves=device.curves + curves)
    return replace(cluster, nodes=(replace(cluster.nodes[0], devices=(device,)),))


def test_a_slow_host_makes_a_step_longer_by_what_it_was_measured_at() -> None:
    profile = make_profile(blocks=4, batch=4)  # 8 operators forward, 8 backward, 4 tensors
    fast, slow = (
        simulate(profile, _gpu(forward_matmul=each, backward_matmul=2 * each, adding=each), from_text("dp=1 micro=2"))
        for each in (1e-9, 10.0)
    )
    assert fast.time.overhead == 0.0
    host = 2 * (8 * 10.0 + 8 * 20.0) + 4 * 10.0
    assert slow.time.overhead == pytest.approx(host, rel=1e-3)
    told = [[note for note in each.notes if "waits" in note] for each in (fast, slow)]
    assert [len(each) for each in told] == [0, 1]


def test_blocks_that_are_computed_again_cost_the_host_what_that_was_measured_at() -> None:
    profile = make_profile(blocks=4, batch=4)  # of forward's operators 4 are in blocks
    cluster = _gpu(forward_matmul=10.0, backward_matmul=10.0, forward_matmul_block=20.0, again_matmul_block=30.0)
    plain, again = (simulate(profile, cluster, from_text(text)) for text in ("dp=1", "dp=1 recompute=block"))
    assert plain.time.overhead == pytest.approx(160.0, rel=1e-3)
    assert again.time.overhead == pytest.approx(160.0 + 4 * 10.0 + 4 * 30.0, rel=1e-3)


@pytest.mark.parametrize(("by", "rate"), [(1, 1e9), (3, 4e9)])
def test_a_norm_goes_by_what_it_was_measured_by(by: int, rate: float) -> None:
    points = (
        (RatePoint((1e6,), 1e9),)
        if by == 1
        else (RatePoint((64.0, 49.0, 32.0), 1e9), RatePoint((256.0, 49.0, 32.0), 4e9))
    )
    cluster = make_cluster()
    device = replace(cluster.nodes[0].devices[0], curves=(RateCurve(operation="native_batch_norm", points=points),))
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], devices=(device,)),))
    norm = LocalOperator(
        name="native_batch_norm", kind="stream", phase="forward", dtype="float32", precision="fp32", dims=(256.0, 49.0, 32.0), flops=0.0,
        moved=8e9,
    )  # fmt: skip
    assert CurveCosts(cluster, 1, 1).operator_seconds(norm) == pytest.approx(8e9 / rate)
