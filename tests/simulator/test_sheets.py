"""Forecasts by data sheets: pipelines as longest paths, links that must be there, and what never makes a step slower."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon import planner, simulator
from echelon.errors import DocumentError, PlanError
from echelon.plan import catalogue
from echelon.plan.cluster import Cluster, DataSheet, Interconnect
from echelon.plan.profile import Profile
from echelon.plan.text import from_text
from echelon.simulator import TrainingStack, simulate
from echelon.simulator.calibration import constant_bounds, format_constants_file, load_constants
from echelon.simulator.cost.cost_model import RankGroup
from echelon.simulator.cost.network import cluster_network
from echelon.simulator.cost.roofline import product_seconds
from echelon.simulator.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    WEIGHT_BACKWARD,
    in_flight_micro_batches,
    makespan,
    makespan_lower_bound,
    schedule_actions,
    timed_actions,
)
from tests.simulator.cases import make_cluster, make_stack

times = st.floats(0.1, 5.0)


@given(st.integers(1, 8), st.integers(1, 64), times, times)
def test_equal_stages_take_the_closed_form_of_1f1b_and_gpipe(
    ranks: int, count: int, forward: float, backward: float
) -> None:
    for schedule in ("1f1b", "gpipe"):
        found = makespan(schedule, [forward] * ranks, [backward] * ranks, ranks=ranks, micro_batches=count)
        assert found == pytest.approx((count + ranks - 1) * (forward + backward))


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4), times)
def test_interleaving_divides_the_bubble_by_the_chunks(ranks: int, rounds: int, chunks: int, work: float) -> None:
    stages = [work / chunks] * (ranks * chunks)
    found = makespan("interleaved", stages, stages, ranks=ranks, micro_batches=rounds * ranks)
    assert found == pytest.approx(2 * work * (rounds * ranks + (ranks - 1) / chunks))


@given(st.integers(2, 8), st.integers(2, 4))
def test_zero_bubble_leaves_a_third_of_the_bubble(ranks: int, rounds: int) -> None:
    count = rounds * ranks
    found = makespan("zero-bubble", [1.0] * ranks, [2.0] * ranks, ranks=ranks, micro_batches=count)
    assert found == pytest.approx(3 * count + (ranks - 1))


SCHEDULES = ["1f1b", "gpipe", "interleaved", "zero-bubble"]


@st.composite
def pipelines(draw: st.DrawFn, most: int = 30) -> tuple[str, list[float], list[float], int, int]:
    """(schedule, forward, backward, ranks, micro-batches): one to three chunks, any remainder."""
    schedule, ranks = draw(st.sampled_from(SCHEDULES)), draw(st.integers(1, 4))
    stages = ranks * (draw(st.integers(1, 3)) if schedule != "1f1b" else 1)
    forward, backward = (draw(st.lists(times, min_size=stages, max_size=stages)) for _ in range(2))
    return schedule, forward, backward, ranks, draw(st.integers(1, most))


@given(pipelines())
@settings(deadline=None)
def test_every_rank_does_all_of_its_work(pipeline: tuple[str, list[float], list[float], int, int]) -> None:
    schedule, forward, backward, ranks, count = pipeline
    events = timed_actions(schedule, forward, backward, ranks=ranks, micro_batches=count)
    for stage in range(len(forward)):
        busy = sum(end - begin for _, _, at, _, begin, end in events if at == stage)
        assert busy == pytest.approx(count * (forward[stage] + backward[stage]))


@given(pipelines(most=120))
@settings(deadline=None)
def test_steps_of_which_the_end_is_reckoned_are_as_long_as_those_that_are_walked(
    pipeline: tuple[str, list[float], list[float], int, int],
) -> None:
    schedule, forward, backward, ranks, count = pipeline
    walked = max(end for *_, end in timed_actions(schedule, forward, backward, ranks=ranks, micro_batches=count))
    assert makespan(schedule, forward, backward, ranks=ranks, micro_batches=count) == pytest.approx(walked, rel=1e-6)


@given(pipelines(most=120), st.integers(0, 11))
@settings(deadline=None)
def test_a_faster_stage_never_makes_the_pipeline_slower(
    pipeline: tuple[str, list[float], list[float], int, int], which: int
) -> None:
    schedule, forward, backward, ranks, count = pipeline
    faster = [[t / 2 if at == which % len(side) else t for at, t in enumerate(side)] for side in (forward, backward)]
    slow, fast = (makespan(schedule, *each, ranks=ranks, micro_batches=count) for each in ((forward, backward), faster))
    assert fast <= slow * (1 + 1e-6)


@given(pipelines())
@settings(deadline=None)
def test_in_flight_is_what_the_order_keeps(pipeline: tuple[str, list[float], list[float], int, int]) -> None:
    schedule, forward, _, ranks, count = pipeline
    chunks = len(forward) // ranks
    steps = schedule_actions(schedule, ranks, chunks, count)
    for rank in range(ranks):
        ends = WEIGHT_BACKWARD if any(kind == WEIGHT_BACKWARD for kind, _, _ in steps[rank]) else BACKWARD
        held = list(accumulate((kind == FORWARD) - (kind == ends) for kind, _, _ in steps[rank]))
        assert in_flight_micro_batches(schedule, ranks, chunks, count, rank) == pytest.approx(max(held) / chunks)


def changed(
    cluster: Cluster, *, rate: float = 1.0, bandwidth: float = 1.0, link: float = 1.0, memory: float = 1.0
) -> Cluster:
    node = cluster.nodes[0]
    device = node.devices[0]
    assert device.sheet is not None
    assert node.wire is not None
    sheet = replace(
        device.sheet,
        peaks={name: peak * rate for name, peak in device.sheet.peaks.items()},
        vector=device.sheet.vector * rate,
        bandwidth=device.sheet.bandwidth * bandwidth,
    )
    device = replace(device, sheet=sheet, memory=int(device.memory * memory))
    wire = replace(node.wire, rate=node.wire.rate * link)
    network = replace(cluster.network, rate=cluster.network.rate * link) if cluster.network else None
    node = replace(node, devices=(device,) * len(node.devices), wire=wire)
    return replace(cluster, nodes=(node,) * len(cluster.nodes), network=network)


PLANS = ["dp=16", "dp=16 zero=1", "dp=16 zero=3 micro=1", "dp=4 tp=4", "dp=2 tp=2 pp=4 micro=1", "dp=4 pp=4 micro=1 recompute=block", "tp=2 cp=2 dp=4", "tp=8 sequence dp=2"]  # fmt: skip


@given(
    st.sampled_from(PLANS),
    st.sampled_from(["rate", "bandwidth", "link", "memory"]),
    st.floats(1.0, 8.0),
    st.sampled_from(["H100-80GB", "V100-32GB", "MI300X-192GB"]),
)
def test_better_devices_and_links_never_make_a_step_slower(text: str, what: str, times: float, name: str) -> None:
    profile = make_stack(blocks=8, width=1024, batch=32, length=512)
    cluster = catalogue.parse_cluster(f"2x8x{name}")
    before = simulate(profile, cluster, from_text(text))
    after = simulate(profile, changed(cluster, **{what: times}), from_text(text))
    assert after.time.step <= before.time.step * (1 + 1e-9)
    assert after.fits >= before.fits


def big() -> Profile:
    return make_stack(blocks=8, width=2048, batch=64, length=128)


def test_memory_of_zero_3_falls_with_dp_and_a_smaller_scope_holds_more() -> None:
    held = [
        simulate(big(), catalogue.parse_cluster("2x8xA100-80GB"), from_text(f"dp={dp} zero=3 micro=1")).memory.peak
        for dp in (2, 4, 8, 16)
    ]
    assert held == sorted(held, reverse=True)
    plan = from_text("dp=16 zero=3 micro=1")
    node = simulate(
        big(), catalogue.parse_cluster("2x8xA100-80GB"), plan, stack=TrainingStack(shard_group_size=8)
    ).memory.peak
    assert held[-1] < node == pytest.approx(held[2], rel=0.01)


def test_each_stage_of_zero_holds_less() -> None:
    held = [
        simulate(big(), catalogue.parse_cluster("8xA100-80GB"), from_text(f"dp=8 micro=1 zero={zero}")).memory
        for zero in range(4)
    ]
    assert [each.peak for each in held] == sorted((each.peak for each in held), reverse=True)
    assert held[1].optimizer == held[0].optimizer / 8


def test_recomputing_takes_time_and_saves_memory() -> None:
    cluster, profile = catalogue.parse_cluster("8xA100-80GB"), make_stack(blocks=16, width=2048, batch=64, length=2048)
    none, block = (
        simulate(profile, cluster, from_text(f"dp=8 micro=4 recompute={each}")) for each in ("none", "block")
    )
    assert block.time.backward > none.time.backward
    assert block.memory.activations < none.memory.activations / 2


def test_stages_that_a_plan_names_are_those_that_are_priced() -> None:
    profile, cluster = make_stack(blocks=8, width=1024, batch=16, length=512), catalogue.parse_cluster("2xA100-80GB")
    plan = from_text("pp=2 micro=1")
    even, uneven = (simulate(profile, cluster, plan.replace(stages=(at,))) for at in (4, 2))
    assert even.time == simulate(profile, cluster, plan).time
    assert uneven.time.forward == pytest.approx(1.5 * even.time.forward)


def test_links_inside_nodes_are_faster_than_between_them() -> None:
    profile = big()
    plan = from_text("tp=8")
    near = simulate(profile, catalogue.parse_cluster("8xV100-32GB"), plan).time
    far = simulate(profile, catalogue.parse_cluster("8x1xV100-32GB"), plan).time
    assert far.exchange > near.exchange > 0


def test_products_too_small_or_not_aligned_are_slow() -> None:
    device = catalogue.catalogue_device("A100-80GB")
    assert device.sheet is not None

    def share(m: float, n: float, k: float) -> float:
        flops = 2 * m * n * k
        assert device.sheet is not None
        return (
            flops
            / device.sheet.peaks["half"]
            / product_seconds(
                device.sheet, load_constants(), "half", (1.0, m, n, k), flops, 2 * (m * n + m * k + n * k), (n, k)
            )
        )

    assert 0.5 < share(8192, 8192, 8192) < 1
    assert share(256, 1024, 8192) < 0.7 * share(8192, 8192, 8192)
    assert share(8192, 8192, 8190) < 0.6 * share(8192, 8192, 8192)


def test_links_that_ranks_need_must_be_described() -> None:
    cluster = catalogue.parse_cluster("2x8xH100-80GB")
    with pytest.raises(PlanError, match=r"the link between nodes is unknown"):
        simulate(big(), replace(cluster, network=None), from_text("dp=16"))
    without = replace(cluster, nodes=(replace(cluster.nodes[0], wire=None),) * 2)
    with pytest.raises(PlanError, match=r"\[inside\]"):
        simulate(big(), without, from_text("dp=16"))
    with pytest.raises(DocumentError, match=r"2 nodes and no link between them"):
        catalogue.build_cluster(
            "x",
            catalogue.catalogue_device("H100-80GB"),
            8,
            2,
            intra_node=Interconnect(kind="nvswitch", rate=1e9),
            inter_node=None,
        )


def test_ranks_with_the_same_work_wait_for_the_slowest_device() -> None:
    fast, slow = catalogue.parse_cluster("2x8xH100-80GB"), catalogue.parse_cluster("2x8xA100-40GB")
    mixed = replace(fast, nodes=(fast.nodes[0], slow.nodes[0]), network=slow.network)
    plan = from_text("dp=16 zero=1 micro=1")
    found = simulate(big(), mixed, plan)
    assert found.time.step == pytest.approx(simulate(big(), slow, plan).time.step)
    assert found.capacity == slow.nodes[0].devices[0].memory
    assert any("wait for the slowest" in note for note in found.notes)


def test_nodes_of_unequal_size_use_what_all_of_them_have() -> None:
    cluster, small = catalogue.parse_cluster("2x8xA100-80GB"), catalogue.parse_cluster("4xA100-40GB")
    mixed = replace(cluster, nodes=(cluster.nodes[0], small.nodes[0]))
    assert any(
        "4 devices of larger nodes are not used" in note for note in simulate(big(), mixed, from_text("dp=8")).notes
    )
    with pytest.raises(PlanError, match="needs 16 devices, 2x8xA100-80GB has 8"):
        simulate(big(), mixed, from_text("dp=16"))


def with_experts(count: int) -> Profile:
    """Blocks whose feed-forward part is a list of experts, of which a token visits one."""
    plain = make_stack(blocks=4, width=1024, batch=64, length=512)
    parameters = [
        replace(each, name=each.name.replace(f".{layer}.", f".experts.{expert}.{layer}."))
        for each in plain.parameters
        for layer in ("up", "down")
        if f".{layer}." in each.name
        for expert in range(count)
    ]
    operators = [
        replace(each, module=each.module.replace("blocks.*.", "blocks.*.experts.*."), count=each.count * count,
                dims=tuple(dim * (1 / count) if dim.per_sample else dim for dim in each.dims), flops=each.flops * (1 / count))
        for each in plain.operators
    ]  # fmt: skip
    return replace(plain, parameters=tuple(parameters), operators=tuple(operators))


def test_the_expert_axis_divides_experts_and_sends_tokens_to_them() -> None:
    cluster, profile = catalogue.parse_cluster("2x8xH100-80GB"), with_experts(16)
    alone, shared = (simulate(profile, cluster, from_text(f"dp=16 ep={ep}")) for ep in (1, 16))
    assert shared.memory.parameters == pytest.approx(alone.memory.parameters / 16)
    # Gradients of experts that no other rank has are not exchanged; tokens are, and small ones take less.
    assert shared.time.hidden == 0 < alone.time.hidden
    short = replace(profile, modules=tuple(replace(each, output=each.output * 0.25) for each in profile.modules))
    assert shared.time.exchange > simulate(short, cluster, from_text("dp=16 ep=16")).time.exchange > alone.time.exchange
    sharded = [simulate(profile, cluster, from_text(f"dp=16 zero=3 ep={ep}")).memory.parameters for ep in (1, 16)]
    assert sharded[0] == pytest.approx(sharded[1])
    with pytest.raises(PlanError, match="ep=2: the model has no experts"):
        simulate(big(), cluster, from_text("dp=16 ep=2"))


def test_samples_that_take_longer_to_come_than_to_compute_are_waited_for() -> None:
    cluster, profile = catalogue.parse_cluster("8xH100-80GB"), big()
    assert simulate(profile, cluster, from_text("dp=8")).time.input == 0
    heavy = simulate(replace(profile, input_bytes=10**10), cluster, from_text("dp=8"))
    assert heavy.time.input > 0
    assert heavy.time.input + heavy.time.forward + heavy.time.backward == pytest.approx(8 * 10**10 / 12e9)


def test_networks_that_were_measured_reach_what_was_measured() -> None:
    cluster = catalogue.parse_cluster("2x8xA100-80GB")
    assert cluster.network is not None
    slow = replace(cluster, network=replace(cluster.network, share=0.34))
    plan = from_text("dp=16 zero=1")
    assert simulate(big(), slow, plan).time.exchange > simulate(big(), cluster, plan).time.exchange
    with pytest.raises(ValueError, match="share=2"):
        replace(cluster.network, share=2)


@given(pipelines(most=60))
@settings(deadline=None)
def test_the_bound_of_a_pipeline_is_never_above_its_length(
    pipeline: tuple[str, list[float], list[float], int, int],
) -> None:
    schedule, forward, backward, ranks, count = pipeline
    bound, path = (
        way(schedule, forward, backward, ranks=ranks, micro_batches=count) for way in (makespan_lower_bound, makespan)
    )
    assert bound <= path * (1 + 1e-12)


def test_a_plan_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(PlanError, match="needs 16 devices, 8xH100-80GB has 8"):
        simulate(big(), catalogue.parse_cluster("8xH100-80GB"), from_text("dp=16"))


def test_what_was_measured_is_priced_by_its_curves() -> None:
    profile, plan = make_stack(), from_text("dp=2")
    measured = make_cluster()
    node = measured.nodes[0]
    sheet = DataSheet(peaks={"fp32": 1e30}, vector=1e30, bandwidth=1e30, units=1)
    both = replace(measured, nodes=(replace(node, devices=(replace(node.devices[0], sheet=sheet),)),))
    assert simulate(profile, both, plan) == simulate(profile, measured, plan)


def test_every_constant_lies_in_a_range_that_is_accounted_for() -> None:
    plain = json.loads(format_constants_file(load_constants()))
    assert len(plain) <= 25
    for name, (low, high) in constant_bounds().items():
        assert low <= getattr(load_constants(), name) <= high, name
        assert {"unit", "meaning", "range"} <= set(plain[name]), name
    assert json.loads(format_constants_file(replace(load_constants(), step=0.125)))["step"] == plain["step"] | {
        "value": 0.125
    }


@pytest.mark.parametrize(("near", "share"), [(2, 1 / 7), (4, 3 / 7), (8, 1.0)])
def test_in_a_mesh_few_devices_reach_few_links(near: int, share: float) -> None:
    mesh, switch = (
        cluster_network(
            replace(
                catalogue.parse_cluster("8xMI300X-192GB"),
                nodes=(
                    replace(
                        catalogue.parse_cluster("8xMI300X-192GB").nodes[0], wire=Interconnect(kind=kind, rate=448e9)
                    ),
                ),
            ),
            load_constants(),
        )
        for kind in ("xgmi-mesh", "nvswitch")
    )
    size = 1e12
    slow, fast = (each.gather_seconds(size, RankGroup(near)) for each in (mesh, switch))
    assert fast / slow == pytest.approx(share, rel=1e-3)


def test_sums_over_many_nodes_take_a_tree_and_gathers_a_ring() -> None:
    wires = cluster_network(catalogue.parse_cluster("64x1xA100-80GB"), load_constants())
    group, hop = RankGroup(64), load_constants().latency_between
    assert wires.gather_seconds(1.0, group) == pytest.approx(load_constants().latency_inside + 63 * hop, rel=1e-3)
    assert wires.all_reduce_seconds(1.0, group) == pytest.approx(
        2 * (load_constants().latency_inside + 6 * hop), rel=1e-3
    )


def test_the_public_names_are_these() -> None:
    assert simulator.__all__ == ["TrainingStack", "simulate"]
    assert planner.__all__ == ["Candidate", "Goal", "explain", "search", "why_not"]
