"""Searches on measured machines: what is not forecast could not have been the best."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster
from echelon.plan.profile import Profile
from echelon.planner import Goal, search
from echelon.planner.plan_space import PlanSpace
from tests.simulator.cases import cut, make_cluster, make_gpus, make_stack

#: With memory that the system hands out slowly, and with little of it.
machines = st.one_of(
    st.builds(make_cluster, cores=st.sampled_from([2, 4]), memory=st.sampled_from([6e8, 64e9])),
    st.builds(make_gpus, st.sampled_from([2, 4]), st.sampled_from([4e8, 1e9, 64e9])),
)
models = st.builds(
    make_stack,
    blocks=st.sampled_from([2, 4]),
    width=st.sampled_from([128, 1024]),
    batch=st.sampled_from([1, 2, 6]),
    length=st.sampled_from([8, 512]),
)
goals = st.sampled_from([Goal(), Goal(kind="memory"), Goal(kind="cheapest"), Goal(kind="devices", within=2.0)])


def slow_memory(cluster: Cluster, fault: float) -> Cluster:
    (node,) = cluster.nodes
    return replace(
        cluster, nodes=(replace(node, devices=tuple(replace(each, page_fault_seconds=fault) for each in node.devices)),)
    )


@given(models, machines, goals, st.sampled_from([0.0, 1e-9]), st.integers(1, 5))
@settings(max_examples=10, deadline=None)
def test_nothing_better_is_missed(profile: Profile, cluster: Cluster, goal: Goal, fault: float, top: int) -> None:
    def found(*, exhaustive: bool) -> list[tuple[str, float]]:
        try:
            made = search(
                profile, slow_memory(cluster, fault), goal=goal, top=top, exhaustive=exhaustive, complete=lambda wanted: cut(wanted, profile),
            )  # fmt: skip
        except PlanError as error:
            return [(str(error), 0.0)]
        return [(str(each.plan), each.forecast.time.step) for each in made]

    assert found(exhaustive=False) == found(exhaustive=True)


@given(models, machines, st.sampled_from([0.0, 1e-9]))
@settings(max_examples=6, deadline=None)
def test_bounds_are_never_above_what_they_bound(profile: Profile, cluster: Cluster, fault: float) -> None:
    space = PlanSpace(profile, slow_memory(cluster, fault))
    for family in (family for ranks in space.rank_counts(fine_grained=False) for family in space.families(ranks)):
        for plan in space.plans(family):
            placed = space.simulator.place(plan)
            bound, step = space.simulator.step_seconds_bound(placed), space.simulator.forecast(plan).time.step
            assert space.family_bound(family) <= bound * (1 + 1e-9), plan
            assert bound <= step * (1 + 1e-9), plan


def test_models_are_cut_where_that_is_faster() -> None:
    """More devices than samples: nothing keeps the others busy but another axis."""
    profile = make_stack(blocks=4, width=1024, batch=2, length=512)
    best = search(profile, make_gpus(8, 64e9), complete=lambda wanted: cut(wanted, profile))[0]
    assert best.plan.mesh.tp == 8
    assert best.forecast.time.step < search(profile, make_gpus(8, 64e9))[0].forecast.time.step
