"""What must hold of every forecast, whatever the model and the machine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster, RateCurve, RatePoint, allocated_bytes
from echelon.plan.forecast import Forecast
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.planner import search
from echelon.simulator import simulate
from echelon.simulator.exchange import bucket_messages
from echelon.simulator.plan_layout import lay_out_plan
from echelon.simulator.summarize_profile import summarize_profile
from tests.simulator.cases import make_cluster, make_gpus, make_profile, plan, plans, profiles


@given(profiles, plans)
def test_documents_survive_the_codec(profile: Profile, wanted: Plan) -> None:
    cluster = make_cluster()
    forecast = simulate(profile, cluster, wanted)
    assert Profile.from_json(profile.to_json()) == profile
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert Forecast.from_json(forecast.to_json()) == forecast


@given(profiles, plans, st.floats(1.0, 8.0))
def test_faster_parts_never_make_a_step_slower(profile: Profile, wanted: Plan, factor: float) -> None:
    base = simulate(profile, make_cluster(), wanted).time.step
    for faster in (
        make_cluster(link=2e9 * factor),
        make_cluster(bandwidth=1e10 * factor),
        make_cluster(flops=4e10 * factor),
        make_cluster(overlap=min(0.1 * factor, 1.0)),
    ):
        assert simulate(profile, faster, wanted).time.step <= base * (1 + 1e-9)


@given(profiles, st.integers(1, 3))
def test_sharded_state_falls_with_ranks(profile: Profile, zero: int) -> None:
    cluster = make_cluster(cores=4)
    few, many = (simulate(profile, cluster, plan(dp=dp, zero=zero)).memory for dp in (2, 4))
    assert many.optimizer < few.optimizer
    assert many.peak < few.peak


def test_zero_3_holds_a_share_of_parameters_gradients_and_state() -> None:
    profile, cluster = make_profile(blocks=8, width=1024), make_cluster(cores=4)
    held = simulate(profile, cluster, plan(dp=4, zero=3, micro=1)).memory
    whole = simulate(profile, cluster, plan(dp=1, micro=4)).memory
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(held, part) == pytest.approx(getattr(whole, part) / 4, rel=0.1), part


@given(profiles, st.integers(0, 3))
def test_smaller_micro_batches_need_no_more_activation_memory(profile: Profile, zero: int) -> None:
    cluster, profile = make_cluster(), replace(profile, batch=16)
    found = [simulate(profile, cluster, plan(dp=2, zero=zero, micro=micro)).memory for micro in (4, 2, 1)]
    sizes = [memory.activations + memory.temporary for memory in found]
    assert sizes == sorted(sizes, reverse=True)
    assert found[0].activations > found[-1].activations


@given(profiles, plans)
@settings(max_examples=50)
def test_parts_are_not_negative_and_the_interval_holds_the_value(profile: Profile, wanted: Plan) -> None:
    forecast = simulate(profile, make_cluster(), wanted)
    parts = ("forward", "backward", "exchange", "hidden", "optimizer", "input", "overhead")
    assert all(getattr(forecast.time, part) >= 0 for part in parts)
    assert forecast.time.low <= forecast.time.step <= forecast.time.high
    assert forecast.memory.low <= forecast.memory.peak <= forecast.memory.high


def test_one_rank_exchanges_nothing() -> None:
    time = simulate(make_profile(), make_cluster(), plan(dp=1, zero=3)).time
    assert time.exchange == time.hidden == 0.0


def test_ranks_beyond_the_cores_are_priced_as_slower() -> None:
    profile, cluster = make_profile(batch=16), make_cluster(cores=2)
    two = simulate(profile, cluster, plan(dp=2, threads=1))
    crowded = simulate(profile, cluster, plan(dp=4, threads=1))
    assert crowded.time.step > two.time.step
    assert any("cores" in note for note in crowded.notes)


def test_fits_only_when_the_upper_end_fits() -> None:
    profile = make_profile(blocks=8, width=1024)
    memory = simulate(profile, make_cluster(), plan()).memory
    between = (memory.peak + memory.high) / 2 + memory.framework
    assert not simulate(profile, make_cluster(memory=between / 0.95), plan()).fits
    assert simulate(profile, make_cluster(memory=memory.required / 0.95 + 1e6), plan()).fits


def test_exchange_hides_only_as_far_as_the_link_overlaps() -> None:
    profile = make_profile(blocks=8, width=1024)
    shown = simulate(profile, make_cluster(), plan(dp=2)).time
    half = simulate(profile, make_cluster(overlap=0.5), plan(dp=2)).time
    assert shown.hidden == 0.0
    assert half.exchange + half.hidden == pytest.approx(shown.exchange)
    assert 0 < half.hidden < half.exchange


def test_an_optimizer_without_a_kernel_for_shards_is_priced_unfused_under_zero() -> None:
    profile, cluster = make_profile(blocks=8, width=1024), make_cluster()
    node, device = cluster.nodes[0], cluster.nodes[0].devices[0]
    # Fused kernels four times as fast as plain ones.
    curves = tuple(
        replace(curve, points=tuple(RatePoint(point.dims, 4 * point.rate) for point in curve.points))
        if curve.operation.endswith(":fused")
        else curve
        for curve in device.curves
    )
    cluster = replace(cluster, nodes=(replace(node, devices=(replace(device, curves=curves),)),))
    (rule,) = profile.optimizers
    other = replace(profile, optimizers=(replace(rule, fused_sharded=False),))
    for zero, slower in ((0, False), (1, True)):
        wanted = plan(dp=2, zero=zero)
        known, unknown = (simulate(each, cluster, wanted) for each in (profile, other))
        assert (unknown.time.optimizer > 2 * known.time.optimizer) is slower
    alone = [simulate(each, cluster, plan(zero=1)).time for each in (profile, other)]
    assert alone[0] == alone[1]  # one rank shards nothing


def test_a_model_sharded_whole_is_one_message_each_way() -> None:
    profile, cluster = make_profile(blocks=12, width=64), make_cluster()
    parts, whole = (simulate(profile, cluster, plan(dp=2, zero=3, shard_as_one=each)).time for each in (False, True))
    assert whole.exchange < parts.exchange


def test_buckets_hold_every_gradient_once_and_the_first_is_small() -> None:
    profile = make_profile(blocks=12, width=1024)  # 4 MB each
    layout = lay_out_plan(summarize_profile(profile), profile.batch, plan(bucket_megabytes=8))
    sizes = list(bucket_messages(layout, profile.gradient_bytes))
    assert sum(sizes) == profile.gradient_bytes
    assert sizes[0] == 4 * 2**20
    assert max(sizes) <= 8 * 2**20


def test_accumulation_needs_no_second_copy_of_replicated_gradients() -> None:
    profile, cluster = make_profile(), make_cluster()
    once, often = (simulate(profile, cluster, plan(dp=2, micro=micro)).memory for micro in (None, 1))
    assert once.gradients == often.gradients >= profile.gradient_bytes
    assert often.buckets == 0.0


def test_other_axes_are_refused() -> None:
    with pytest.raises(PlanError, match="cp=2: this axis is not measured"):
        simulate(make_profile(), make_cluster(), Plan(mesh=Mesh(cp=2)))
    with pytest.raises(PlanError, match="dp=8"):
        simulate(make_profile(batch=4), make_cluster(), plan(dp=8))


def test_what_no_link_or_device_describes_is_refused() -> None:
    cluster = make_gpus(2, 8e9)
    node = cluster.nodes[0]
    with pytest.raises(PlanError, match="2 nodes cannot be forecast, because no link between nodes is measured"):
        simulate(make_profile(), replace(cluster, nodes=(node, node)), plan(dp=2))
    with pytest.raises(PlanError, match="2 nodes cannot be forecast"):
        search(make_profile(), replace(cluster, nodes=(node, node)))
    slow = replace(node.devices[0], name="slow", overhead=1.0)
    with pytest.raises(PlanError, match=r"device 1 \(slow\) is not like device 0"):
        simulate(make_profile(), replace(cluster, nodes=(replace(node, devices=(node.devices[0], slow)),)), plan(dp=2))


def test_the_smallest_of_like_devices_decides_what_fits() -> None:
    cluster = make_gpus(2, 8e9)
    node = cluster.nodes[0]
    smaller = replace(node.devices[0], memory=int(7e9))
    cluster = replace(cluster, nodes=(replace(node, devices=(node.devices[0], smaller)),))
    assert simulate(make_profile(), cluster, plan(dp=2)).capacity == 7e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 1}, "ranks=1"),
        ({"points": ()}, "at least one"),
        ({"points": ((8.0, 1.0), (8.0, 2.0))}, "ascend"),
        ({"points": ((8.0, 0.0),)}, "seconds must be above 0"),
        ({"overlap": 1.5}, "between 0 and 1"),
    ],
)
def test_an_impossible_link_is_named(changes: dict[str, Any], message: str) -> None:
    link = make_cluster().nodes[0].links[0]
    with pytest.raises(ValueError, match=f"all_reduce: .*{message}"):
        replace(link, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"points": ()}, "at least one point"),
        ({"points": (RatePoint((1.0,), math.inf),)}, "above 0 and finite"),
        ({"points": (RatePoint((1.0,), 1.0), RatePoint((1.0, 2.0), 1.0))}, "same number of dims"),
        ({"ranks": 0}, "ranks=0"),
        ({"threads": 0}, "threads=0"),
    ],
)
def test_an_impossible_curve_is_named(changes: dict[str, Any], message: str) -> None:
    curve = RateCurve(operation="add", points=(RatePoint((1.0,), 1.0),))
    with pytest.raises(ValueError, match=f"add: .*{message}"):
        replace(curve, **changes)


def test_unmeasured_cases_are_noted() -> None:
    profile = make_profile()
    assert any("compile" in note for note in simulate(profile, make_cluster(), plan(compile=True)).notes)
    other = simulate(replace(profile, precision="bf16"), make_cluster(), plan(precision="fp32"))
    assert other.memory.high > 1.4 * other.memory.peak


def test_a_plan_without_a_precision_is_forecast_in_the_jobs() -> None:
    profile, cluster = replace(make_profile(), precision="tf32"), make_cluster()
    node, device = cluster.nodes[0], cluster.nodes[0].devices[0]
    fast = tuple(
        replace(curve, dtype="tf32", points=tuple(RatePoint(point.dims, 4 * point.rate) for point in curve.points))
        for curve in device.curves
        if "mm" in curve.operation
    )
    cluster = replace(cluster, nodes=(replace(node, devices=(replace(device, curves=(*device.curves, *fast)),)),))
    left, named, other = (simulate(profile, cluster, plan(precision=each)) for each in (None, "tf32", "fp32"))
    assert (left.time, left.memory, left.notes) == (named.time, named.memory, named.notes)
    assert left.time.forward < other.time.forward
    assert left.memory.high < other.memory.high


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(1e6, 1e12)), min_size=1, max_size=8), st.floats(0.1, 1e6))
def test_a_curve_stays_within_its_points(points: list[tuple[float, float]], at: float) -> None:
    curve = RateCurve(operation="add", points=tuple(RatePoint((dim,), rate) for dim, rate in points))
    rates = [rate for _, rate in points]
    assert min(rates) * (1 - 1e-9) <= curve.rate_at((at,)) <= max(rates) * (1 + 1e-9)


def test_a_curve_answers_its_own_points() -> None:
    curve = RateCurve(operation="mm", points=(RatePoint((64.0, 64.0), 1e9), RatePoint((512.0, 512.0), 8e9)))
    assert curve.rate_at((64, 64)) == 1e9
    assert 1e9 < curve.rate_at((128, 256)) < 8e9
    assert curve.rate_at((4096, 4096)) == 8e9


def test_allocators_round_large_blocks_up() -> None:
    assert allocated_bytes(64e6, 1, 2**21) == 64e6 + 2**21
    assert allocated_bytes(1e6, 50, 2**21) < 1.2e6
