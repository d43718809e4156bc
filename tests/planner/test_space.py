"""Searches on clusters that are known by their data sheets: the bounds lose nothing, goals are kept, better machines never hurt."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echelon.errors import PlanError
from echelon.plan import catalogue
from echelon.plan.check import check
from echelon.plan.cluster import Cluster, Node
from echelon.plan.mesh import Mesh
from echelon.plan.placement import Placement, TensorSlice
from echelon.plan.plan import Plan, Schedule
from echelon.plan.profile import Profile
from echelon.plan.stages import balance_stages
from echelon.plan.text import from_text
from echelon.planner import Candidate, Goal, search, why_not
from echelon.planner.plan_space import PlanSpace
from echelon.simulator import simulate
from tests.simulator.cases import cut, make_cluster, make_language, make_stack
from tests.simulator.test_sheets import changed, with_experts

clusters = st.sampled_from(["4xA100-40GB", "2x2xV100-16GB", "8xH100-80GB"])
shapes = {
    "blocks": st.sampled_from([4, 6]),
    "width": st.sampled_from([512, 4096]),
    "batch": st.sampled_from([4, 12]),
    "length": st.sampled_from([64, 2048]),
}
models = st.one_of(
    st.builds(make_stack, **shapes),
    st.builds(make_language, vocab=st.sampled_from([1024, 65536]), norms=st.sampled_from([8, 100]), **shapes),
)
goals = st.sampled_from(
    [Goal(), Goal(kind="memory"), Goal(kind="cheapest", price=2.5), Goal(kind="devices", within=20.0)]
)


def found(profile: Profile, cluster: Cluster, **options: object) -> list[tuple[str, float]]:
    try:
        made = search(profile, cluster, **options)  # type: ignore[arg-type]
    except PlanError:
        return []
    return [(str(each.plan), each.forecast.time.step) for each in made]


@given(models, clusters, goals)
@settings(max_examples=12, deadline=None)
def test_bounds_leave_out_only_what_cannot_be_the_best(profile: Profile, name: str, goal: Goal) -> None:
    cluster = catalogue.parse_cluster(name)
    assert found(profile, cluster, goal=goal, top=3) == found(profile, cluster, goal=goal, top=3, exhaustive=True)


@pytest.mark.slow
@given(models, clusters, st.booleans())
@example(make_language(blocks=6, width=4096, batch=64, length=2048, norms=100), "8xH100-80GB", False)
@settings(max_examples=8, deadline=None)
def test_bounds_are_never_above_what_they_bound(profile: Profile, name: str, beyond: bool) -> None:
    space = PlanSpace(profile, catalogue.parse_cluster(name), beyond=beyond)
    for family in (family for size in space.rank_counts(fine_grained=True) for family in space.families(size)):
        assert space.rank_count_bound(family.mesh.ranks) <= space.family_bound(family) * (1 + 1e-9), family
        for plan in space.plans(family):
            placed = space.simulator.place(plan)
            bound, forecast = space.simulator.step_seconds_bound(placed), space.simulator.forecast_placed(placed)
            assert space.family_bound(family) <= bound * (1 + 1e-9), plan
            assert bound <= forecast.time.step * (1 + 1e-9), plan
            assert space.simulator.peak_memory(placed) == forecast.memory.required, plan
            assert space.simulator.may_fit(placed) or not forecast.fits, plan


@given(models, clusters)
@settings(max_examples=15, deadline=None)
def test_what_is_found_can_be_executed_and_fits(profile: Profile, name: str) -> None:
    cluster = catalogue.parse_cluster(name)
    for each in search(profile, cluster, top=8):
        assert each.forecast.fits
        assert not [problem for problem in check(each.plan, profile, cluster) if problem.severity == "error"]
        assert each.plan.mesh.cp == each.plan.mesh.ep == 1
        assert each.plan.mesh.pp == 1 or each.plan.pipeline.stages


def fastest(candidates: tuple[Candidate, ...]) -> float:
    return min(each.forecast.time.step for each in candidates)


@pytest.mark.slow
@given(models, clusters, st.sampled_from(["rate", "bandwidth", "link", "memory"]), st.floats(1.0, 8.0))
@settings(max_examples=12, deadline=None)
def test_better_machines_never_make_the_best_plan_slower(profile: Profile, name: str, what: str, times: float) -> None:
    cluster = catalogue.parse_cluster(name)
    assert fastest(search(profile, changed(cluster, **{what: times}))) <= fastest(search(profile, cluster)) * (1 + 1e-9)


@given(
    st.lists(st.floats(0.1, 9.0), min_size=2, max_size=8),
    st.integers(2, 5),
    st.frozensets(st.integers(1, 7), max_size=3),
)
def test_stages_are_cut_where_the_heaviest_is_lightest(weights: list[float], count: int, bound: frozenset[int]) -> None:
    places = [place for place in range(1, len(weights)) if place not in bound]

    def heaviest(cuts: tuple[int, ...]) -> float:
        return max(sum(weights[a:b]) for a, b in zip((0, *cuts), (*cuts, len(weights)), strict=True))

    best = min((heaviest(cuts) for cuts in combinations(places, count - 1)), default=None)
    cut = balance_stages(weights, count, bound)
    assert (cut is None) == (best is None)
    if cut is not None:
        assert heaviest(cut) == pytest.approx(best)
        assert not set(cut) & bound


def test_each_goal_finds_what_it_asks_for() -> None:
    profile, cluster = make_stack(blocks=8, width=4096, batch=32, length=2048), catalogue.parse_cluster("2x8xA100-80GB")
    fast, small, cheap = (
        search(profile, cluster, goal=Goal(kind=kind), top=1)[0] for kind in ("fastest", "memory", "cheapest")
    )
    assert fast.forecast.time.step < min(small.forecast.time.step, cheap.forecast.time.step)
    assert small.forecast.memory.total < min(fast.forecast.memory.total, cheap.forecast.memory.total)
    money = [each.forecast.time.step * each.plan.ranks for each in (cheap, fast, small)]
    assert money[0] == min(money)
    limit = 3 * fast.forecast.time.step
    few = search(profile, cluster, goal=Goal(kind="devices", within=100 * limit, steps=100), top=1)[0]
    assert few.forecast.time.step <= limit
    assert few.plan.ranks < fast.plan.ranks
    with pytest.raises(PlanError, match=r"no plan of|no plan meets the deadline"):
        search(profile, cluster, ranks=few.plan.ranks // 2, goal=Goal(kind="devices", within=100 * limit, steps=100))


@pytest.mark.parametrize(
    ("goal", "told"),
    [
        ({"kind": "devices"}, "needs a deadline"),
        ({"kind": "quickest"}, "not one of fastest"),
        ({"within": -1.0}, "the deadline must be above 0"),
        ({"within": float("nan")}, "the deadline must be above 0"),
        ({"kind": "memory", "within": 5.0}, "goal=memory takes no deadline"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"price": 0.0}, "above 0"),
        ({"price": 2.0}, "price=2.0 has no effect with goal=fastest"),
        ({"steps": 10}, "steps=10 has no effect without a deadline"),
    ],
)
def test_goals_that_contradict_themselves_are_refused(goal: dict[str, object], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        Goal(**goal)  # type: ignore[arg-type]


def test_a_deadline_that_nothing_meets_says_how_long_the_fastest_takes() -> None:
    profile, cluster = make_stack(width=4096, batch=32, length=2048), catalogue.parse_cluster("4xA100-80GB")
    with pytest.raises(
        PlanError, match=r'the fastest, "dp=\d.*takes .* for 10 steps, and the limit is 1.00 ms'
    ) as caught:
        search(profile, cluster, goal=Goal(within=1e-3, steps=10))
    assert caught.value.exit_code == 1


def test_a_model_larger_than_the_cluster_says_how_many_devices_hold_it() -> None:
    profile = make_stack(blocks=48, width=4096, batch=64, length=128)
    with pytest.raises(
        PlanError, match=r"fit no plan of 2xV100-16GB \(2 devices\); \d+ devices of this kind would hold it"
    ) as caught:
        search(profile, catalogue.parse_cluster("2xV100-16GB"))
    assert caught.value.exit_code == 1
    count = int(str(caught.value).split("; ")[1].split()[0])
    assert search(profile, catalogue.parse_cluster(f"{count // 2}x2xV100-16GB"), top=1)


@pytest.mark.parametrize(("name", "ranks"), [("6xV100-16GB", None), ("3xV100-16GB", 1), ("8xV100-16GB", 2)])
def test_as_many_devices_as_are_told_hold_it(name: str, ranks: int | None) -> None:
    profile = make_stack(blocks=48 if ranks is None else 24, width=4096, batch=64, length=128)
    with pytest.raises(PlanError, match="devices of this kind would hold it") as caught:
        search(profile, catalogue.parse_cluster(name), ranks=ranks)
    count = int(str(caught.value).split("; ")[1].split()[0])
    assert count > (ranks or 6)
    assert search(profile, catalogue.parse_cluster(f"{count}x{name}"), ranks=count, top=1)


def test_the_fewest_devices_are_whole_nodes_too() -> None:
    profile, cluster = (
        make_stack(blocks=16, width=4096, batch=144, length=2048),
        catalogue.parse_cluster("16x8xA100-80GB"),
    )
    step = search(profile, cluster, ranks=72, top=1)[0].forecast.time.step
    few = search(profile, cluster, goal=Goal(kind="devices", within=step * 1.001), top=1)[0]
    assert few.plan.ranks <= 72


def test_a_number_of_devices_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="ranks=9: 8xH100-80GB has 8 devices"):
        search(make_stack(), catalogue.parse_cluster("8xH100-80GB"), ranks=9)


def test_axes_that_are_only_forecast_are_found_when_asked_for() -> None:
    cluster = catalogue.parse_cluster("8xH100-80GB")
    long = make_stack(blocks=4, width=1024, batch=1, length=65536)
    assert {each.plan.mesh.cp for each in search(long, cluster, top=20)} == {1}
    assert any(each.plan.mesh.cp > 1 for each in search(long, cluster, top=20, beyond=True))
    routed = search(with_experts(8), cluster, top=400, beyond=True, ranks=8)
    assert any(each.plan.mesh.ep > 1 for each in routed)


def test_precisions_that_are_asked_for_are_searched() -> None:
    profile, cluster = make_stack(blocks=4, width=4096, batch=32, length=512), catalogue.parse_cluster("8xA100-80GB")
    assert {each.plan.precision for each in search(profile, cluster)} == {None}
    assert search(profile, cluster, precisions=(None, "tf32"))[0].plan.precision == "tf32"
    best = search(profile, cluster, precisions=(None, "tf32", "bf16"))
    assert best[0].plan.precision == "bf16"
    with pytest.raises(PlanError, match="precision=half: not one of fp32, tf32, bf16, fp16"):
        search(profile, cluster, precisions=("half",))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="set the job's precision instead"):
        search(profile, make_cluster(), precisions=(None, "bf16"))


def test_cuts_that_a_model_does_not_allow_are_left_out() -> None:
    profile, cluster = make_stack(blocks=4, width=8192, batch=1, length=512), catalogue.parse_cluster("8xA100-80GB")

    def never(plan: Plan) -> Plan:
        if plan.mesh.tp > 1:
            raise PlanError(f"{plan}: no")
        return plan

    def whole_sequences(plan: Plan) -> Plan:
        if plan.tensor.sequence:
            raise PlanError(f"{plan}: no blocks work on a part of the sequence")
        return cut(plan, profile)

    assert search(profile, cluster, top=1)[0].plan.mesh.tp > 1
    assert {each.plan.mesh.tp for each in search(profile, cluster, complete=never)} == {1}
    # One that cannot cut the sequence can still cut the model.
    found = search(profile, cluster, complete=whole_sequences)
    assert found[0].plan.mesh.tp > 1
    assert not any(each.plan.tensor.sequence for each in found)


def test_plans_are_priced_with_the_cuts_that_the_model_allows() -> None:
    """A model of which tp cuts the head alone is neither fast nor small under it."""
    profile, cluster = make_language(blocks=4, width=8192, batch=1, length=512), catalogue.parse_cluster("8xA100-80GB")

    def little(plan: Plan) -> Plan:
        if plan.mesh.tp == 1 or plan.tensor.sequence:
            raise PlanError("no")
        head = Placement(path="head", cut="gather", slices=(TensorSlice("weight", 0),))
        return plan.replace(placements=(head,))

    assert search(profile, cluster, top=1)[0].plan.mesh.tp > 1
    found = search(profile, cluster, complete=little, top=20)
    assert found[0].plan.mesh.tp == 1
    for each in found:
        assert each.forecast.time.step == pytest.approx(simulate(profile, cluster, each.plan).time.step)
        assert each.forecast.fits
        assert not [problem for problem in check(each.plan, profile, cluster) if problem.severity == "error"]
    (tensor, *_) = [each for each in found if each.plan.mesh.tp > 1]
    assert tensor.forecast.memory.parameters > 0.9 * 2 * profile.elements / tensor.plan.mesh.pp


def test_why_not_tells_differences_by_cause_and_what_binds() -> None:
    profile, cluster = make_stack(blocks=8, width=4096, batch=32, length=2048), catalogue.parse_cluster("2x8xA100-80GB")
    best = search(profile, cluster, top=1)[0].plan
    told = why_not(profile, cluster, from_text("dp=2 tp=8 micro=1"), best)
    assert "slower" in told
    assert "exchange +" in told
    ahead = why_not(profile, cluster, replace(best, mesh=Mesh(dp=8, cp=2), micro=None), best)
    assert "the context axis is not executed yet" in ahead
    assert "slower" in ahead or "faster" in ahead
    tight = why_not(make_stack(blocks=16, width=16384, batch=16, length=2048), cluster, from_text("dp=16"), best)
    assert "does not fit" in tight
    assert "too much; most of it" in tight


def mixed() -> Cluster:
    fast, slow = catalogue.parse_cluster("2x2xH100-80GB"), catalogue.parse_cluster("2x2xA100-80GB")
    return replace(fast, name="mixed", nodes=(fast.nodes[0], slow.nodes[0]), network=slow.network)


def test_faster_devices_get_larger_shares_of_the_batch() -> None:
    profile, cluster = make_stack(blocks=8, width=4096, batch=64, length=2048), mixed()
    best = search(profile, cluster, top=1)[0]
    assert (
        best.plan.data.batch_shares[0]
        == best.plan.data.batch_shares[1]
        > best.plan.data.batch_shares[2]
        == best.plan.data.batch_shares[3]
    )
    assert best.forecast.time == simulate(profile, cluster, best.plan).time
    equal = simulate(profile, cluster, best.plan.replace(batch_shares=()))
    assert best.forecast.time.step < 0.8 * equal.time.step
    assert from_text(str(best.plan)).data.batch_shares == best.plan.data.batch_shares
    assert not [problem for problem in check(best.plan, profile, cluster) if problem.severity == "error"]


def test_what_devices_cost_decides_what_is_cheapest() -> None:
    """Where the second half of the machines costs little it is taken too; where it costs much the first half has to do."""
    profile = make_stack(blocks=8, width=4096, batch=64, length=2048)

    def priced(first: float, second: float) -> Cluster:
        made = mixed()
        prices = zip(made.nodes, (first, second), strict=True)
        return replace(made, nodes=tuple(_costing(node, price) for node, price in prices))

    cheap, dear = (
        search(profile, priced(1.0, each), goal=Goal(kind="cheapest"), top=1)[0].plan.ranks for each in (0.01, 100.0)
    )
    assert cheap == 4
    assert dear <= 2
    first, second = priced(1.0, 1.0).nodes
    half = replace(mixed(), nodes=(first, _costing(second, None)))
    with pytest.raises(PlanError, match="A100-80GB has no price and other devices have"):
        search(profile, half, goal=Goal(kind="cheapest"))


def _costing(node: Node, price: float | None) -> Node:
    sheets = [(device, device.sheet) for device in node.devices]
    return replace(
        node, devices=tuple(replace(one, sheet=sheet and replace(sheet, price=price)) for one, sheet in sheets)
    )


def test_shares_that_are_not_one_for_each_data_rank_are_refused() -> None:
    for text, told in (
        ("dp=2 shares=1:2:3", "one for each of dp=2"),
        ("dp=2 shares=3", "one for each"),
        ("dp=2 shares=3:x", "integers"),
    ):
        with pytest.raises(PlanError, match=told):
            from_text(text)


@given(models, clusters)
@settings(max_examples=8, deadline=None)
def test_the_schedule_that_is_not_searched_is_never_the_best(profile: Profile, name: str) -> None:
    space = PlanSpace(profile, catalogue.parse_cluster(name))
    families = (
        family
        for size in space.rank_counts(fine_grained=False)
        for family in space.families(size)
        if family.mesh.pp > 1
    )
    plans = [plan for family in families for plan in space.plans(family)]
    assert {*get_args(Schedule)} - {plan.pipeline.schedule for plan in plans} == {"gpipe"}
    for plan in (plan for plan in plans if plan.pipeline.schedule == "1f1b"):
        kept, other = (space.simulator.forecast(each) for each in (plan, plan.replace(schedule="gpipe")))
        assert kept.time.step <= other.time.step * (1 + 1e-9), plan
        assert kept.memory.high <= other.memory.high, plan


def test_fp8_is_forecast_and_searched_beyond_what_is_executed() -> None:
    profile = make_language(blocks=4, width=4096, batch=16, length=2048)
    cluster = catalogue.parse_cluster("8xH100-80GB")
    wide, narrow = (simulate(profile, cluster, from_text(f"dp=8 precision={each}")) for each in ("bf16", "fp8"))
    assert narrow.time.forward < wide.time.forward
    assert narrow.memory == wide.memory
    (problem,) = check(from_text("dp=8 precision=fp8"))
    assert (problem.path, problem.value, problem.severity, problem.not_implemented) == (
        "precision",
        "fp8",
        "error",
        True,
    )
    told = why_not(profile, cluster, from_text("dp=8 precision=fp8"), from_text("dp=8 precision=bf16"))
    assert "not executed yet" in told
    assert "faster" in told
    with pytest.raises(PlanError, match=r"precision=fp8.*--beyond"):
        search(profile, cluster, precisions=("fp8",))
    best = search(profile, cluster, precisions=(None, "fp8"), beyond=True)[0]
    assert best.plan.precision == "fp8"
    # Units that cannot compute in it compute as wide as they can, and nothing is narrowed for them.
    old = catalogue.parse_cluster("8xA100-80GB")
    steps = [simulate(profile, old, from_text(f"dp=8 precision={each}")).time.step for each in ("bf16", "fp8")]
    assert steps[0] == steps[1]
    with pytest.raises(PlanError, match="data sheets only"):
        simulate(make_stack(), make_cluster(), from_text("dp=1 precision=fp8"))
