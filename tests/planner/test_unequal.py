"""Stages that match devices of unequal speed: cut, forecast and found."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.plan import catalogue
from echelon.plan.cluster import Cluster, Interconnect
from echelon.plan.stages import balance_stages, stage_ranges
from echelon.plan.text import from_text
from echelon.planner import search
from echelon.planner.plan_space import PlanSpace
from echelon.simulator import simulate
from echelon.simulator.timeline import build_timeline
from tests.simulator.cases import make_language

FAST, SLOW = catalogue.parse_cluster("2x2xH100-80GB"), catalogue.parse_cluster("2x2xV100-32GB")
#: Gradients take long over it, what passes from stage to stage does not.
NETWORK = Interconnect(kind="slow", rate=2e9)


def mixed(*nodes: Cluster, each: int = 2) -> Cluster:
    """One node of each, with so many of its devices."""
    return replace(
        FAST,
        nodes=tuple(replace(one.nodes[0], devices=one.nodes[0].devices[:each]) for one in nodes),
        network=NETWORK,
    )


def model(batch: int = 32, blocks: int = 12):  # type: ignore[no-untyped-def]
    return make_language(blocks=blocks, width=4096, batch=batch, length=1024, vocab=1024)


@given(
    weights=st.lists(st.integers(0, 9).map(float), min_size=3, max_size=8),
    pace=st.lists(st.integers(1, 5).map(float), min_size=3, max_size=3),
)
def test_stages_are_cut_as_no_other_cut_is_faster(weights: list[float], pace: list[float]) -> None:
    def slowest(begins: tuple[int, ...]) -> float:
        parts = [sum(weights[a:b]) for a, b in pairwise((0, *begins, len(weights)))]
        return max(part * each for part, each in zip(parts, pace, strict=True))

    found = balance_stages(weights, 3, stage_slowdowns=pace)
    assert found is not None
    assert slowest(found) == min(slowest(each) for each in combinations(range(1, len(weights)), 2))


@pytest.mark.parametrize("turned", [False, True])
def test_slow_devices_get_fewer_blocks(turned: bool) -> None:
    profile = model()
    cluster = mixed(SLOW, FAST) if turned else mixed(FAST, SLOW)
    best = search(profile, cluster, ranks=4)[0]
    assert best.plan.mesh.pp >= 2
    counts = [len(each) for each in stage_ranges(best.plan, len(profile.pipeline_units))]
    by_rank = [sum(counts[rank :: best.plan.mesh.pp]) for rank in range(best.plan.mesh.pp)]
    half = best.plan.mesh.pp // 2
    first, second = sum(by_rank[:half]), sum(by_rank[half:])
    assert first < second if turned else first > second
    assert best.forecast.time.step < simulate(profile, mixed(SLOW, SLOW), best.plan).time.step
    # Half of its devices are slow: it is no match for as many fast ones.
    assert best.forecast.time.step > search(profile, mixed(FAST, FAST), ranks=4)[0].forecast.time.step


def test_a_stage_takes_as_long_as_the_devices_that_it_is_on() -> None:
    profile = model()
    plan = from_text("pp=2 dp=2 micro=1")
    both = plan.replace(stages=(7,))
    found = {name: build_timeline(profile, each, both) for name, each in (
        ("mixed", mixed(FAST, SLOW)), ("fast", mixed(FAST, FAST)), ("slow", mixed(SLOW, SLOW))
    )}  # fmt: skip

    def took(name: str, rank: int) -> float:
        return next(each.end - each.begin for each in found[name].events if each.rank == rank and each.micro_batch == 0)

    assert took("mixed", 0) == pytest.approx(took("fast", 0), rel=0.05)
    assert took("mixed", 1) == pytest.approx(took("slow", 1), rel=0.05)
    # Fewer blocks on the slow devices: faster, and the plan must fit on each of them all the same.
    few = simulate(profile, mixed(FAST, SLOW), plan.replace(stages=(10,)))
    assert few.time.step < simulate(profile, mixed(FAST, SLOW), both).time.step
    assert few.capacity in {device.memory for node in mixed(FAST, SLOW).nodes for device in node.devices}


@given(batch=st.sampled_from([4, 6]), blocks=st.integers(3, 5), turned=st.booleans())
@settings(max_examples=3, deadline=None)
def test_bounds_hold_on_unequal_devices_and_nothing_better_is_missed(batch: int, blocks: int, turned: bool) -> None:
    profile = model(batch, blocks)
    cluster = mixed(*((SLOW, FAST, FAST) if turned else (FAST, SLOW, SLOW)), each=1)
    space = PlanSpace(profile, cluster)
    for family in (family for size in space.rank_counts(fine_grained=True) for family in space.families(size)):
        assert space.rank_count_bound(family.mesh.ranks) <= space.family_bound(family) * (1 + 1e-9), family
        for plan in space.plans(family):
            placed = space.simulator.place(plan)
            forecast = space.simulator.forecast_placed(placed)
            assert space.family_bound(family) <= space.simulator.step_seconds_bound(placed) * (1 + 1e-9), plan
            assert space.simulator.step_seconds_bound(placed) <= forecast.time.step * (1 + 1e-9), plan
            assert space.simulator.peak_memory(placed) == forecast.memory.required, plan
            assert space.simulator.may_fit(placed) or not forecast.fits, plan
    found, all_ = (search(profile, cluster, top=3, exhaustive=each) for each in (False, True))
    assert [each.forecast.time.step for each in found] == [each.forecast.time.step for each in all_]


def test_ranks_on_devices_of_one_kind_are_priced_on_these_alone() -> None:
    """A cluster that has slow machines too is no slower than without them."""
    profile, both, fast = model(), mixed(FAST, SLOW), mixed(FAST)
    plan = from_text("dp=2 zero=1")
    assert simulate(profile, both, plan).time == simulate(profile, fast, plan).time
    assert search(profile, both)[0].forecast.time.step <= search(profile, fast)[0].forecast.time.step * 1.02
    # On all of them the slowest decides, whatever was reckoned for fewer.
    assert (
        simulate(profile, both, from_text("dp=4")).time.step
        > simulate(profile, mixed(FAST, FAST), from_text("dp=4")).time.step
    )
