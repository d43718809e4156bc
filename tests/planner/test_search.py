"""Whatever `search` returns can be executed and fits; what it says about it is true."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import PlanError
from echelon.plan.check import check
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.planner import explain, search, why_not
from echelon.planner.explain import _compare_forecasts
from echelon.planner.plan_space import PlanSpace
from echelon.simulator import simulate
from tests.simulator.cases import cut, make_cluster, make_gpus, make_profile, make_stack, plan, profiles


@given(profiles, st.sampled_from([1, 2, 4]), st.sampled_from([1e9, 4e9, 64e9]))
@settings(max_examples=40, deadline=None)
def test_plans_pass_check_and_fit(profile: Profile, cores: int, memory: float) -> None:
    cluster = make_cluster(cores=cores, memory=memory)
    try:
        found = search(profile, cluster, top=8)
    except PlanError:
        assert not any(candidate.forecast.fits for candidate in PlanSpace(profile, cluster).data_parallel_candidates())
        return
    for candidate in found:
        assert candidate.forecast.fits
        assert not [problem for problem in check(candidate.plan, profile, cluster) if problem.severity == "error"]
    steps = [
        candidate.forecast.time.step
        for candidate in PlanSpace(profile, cluster).data_parallel_candidates()
        if candidate.forecast.fits
    ]
    assert found[0].forecast.time.step <= min(steps, default=math.inf) * 1.02 + 1e-12
    simple = [each.plan.recompute == "none" for each in found]
    assert simple[0] or not steps  # computed again only where it must be


def test_one_process_wins_where_exchange_costs_more_than_it_saves() -> None:
    profile, cluster = make_profile(blocks=12, width=1024, length=1, batch=4), make_cluster(cores=2, link=1e8)
    best = search(profile, cluster)[0].plan
    assert best.ranks == 1
    assert best.threads == 2


def test_ranks_win_where_a_device_is_needed_for_memory() -> None:
    profile = make_profile(blocks=12, width=1024, length=1, batch=16)
    needed: dict[int, float] = {}
    for candidate in PlanSpace(profile, make_gpus(4, 64e9)).data_parallel_candidates():
        memory = candidate.forecast.memory
        ranks, size = candidate.plan.ranks, memory.required
        needed[ranks] = min(needed.get(ranks, size), size)
    assert search(profile, make_gpus(4, needed[1] + 1e6))[0].plan.ranks == 1
    tight = search(profile, make_gpus(4, (needed[1] + needed[4]) / 2))[0].plan
    assert tight.ranks > 1
    assert tight.zero > 0


def test_a_batch_whose_samples_see_each_other_stays_whole() -> None:
    profile, cluster = replace(make_profile(), samples_coupled=True), make_cluster(cores=4)
    assert {(each.plan.ranks, each.plan.micro) for each in search(profile, cluster, top=50)} == {(1, None)}
    with pytest.raises(PlanError, match=r"no plan of 2 ranks .*\n  dp=2: a sample's loss depends on the others"):
        search(profile, cluster, ranks=2)


def test_plans_leave_the_precision_to_the_job() -> None:
    profile = replace(make_profile(), precision="bf16")
    assert {candidate.plan.precision for candidate in search(profile, make_cluster())} == {None}


def test_little_memory_forces_small_micro_batches() -> None:
    profile = make_profile(blocks=8, width=512, length=256, batch=64)
    roomy = search(profile, make_cluster(cores=1))[0]
    # RSS of the framework counts too: leave room for it and a third of the peak.
    memory = (roomy.forecast.memory.framework + roomy.forecast.memory.peak * 0.6) / 0.95
    tight = search(profile, make_cluster(cores=1, memory=memory))[0]
    assert roomy.plan.micro is None
    assert tight.plan.micro is not None
    assert tight.plan.micro < 64


def test_number_of_ranks_can_be_given() -> None:
    found = search(make_profile(), make_cluster(cores=4), ranks=2)
    assert {candidate.plan.ranks for candidate in found} == {2}
    with pytest.raises(PlanError, match="ranks=0"):
        search(make_profile(), make_cluster(), ranks=0)


def test_when_all_plans_are_refused_each_reason_is_told_once() -> None:
    with pytest.raises(PlanError, match="no plan of 64 ranks can be executed") as caught:
        search(make_profile(batch=16), make_cluster(), ranks=64)
    assert str(caught.value).count("a batch of 16 leaves some rank without a sample; use dp=16 or less") == 1
    with pytest.raises(PlanError, match=r"dp=4: the last batch of an epoch has 2 of 18 samples; use dp=2") as caught:
        search(make_profile(batch=16, samples=18), make_cluster(), ranks=4)
    assert [problem.path for problem in caught.value.problems] == ["dp"]


def test_a_model_too_large_says_how_much_is_missing_and_what_would_hold_it() -> None:
    profile = make_profile(blocks=12, width=4096, length=1)
    with pytest.raises(PlanError, match=r"GB too much .* a machine with \d+\.\d GB would hold it") as caught:
        search(profile, make_cluster(memory=2e9))
    assert caught.value.exit_code == 1
    enough = float(str(caught.value).split("a machine with ")[1].split()[0]) + 0.1
    assert search(profile, make_cluster(memory=enough * 1e9))


def test_a_model_too_large_for_gpus_says_how_many_would_hold_it() -> None:
    profile = make_profile(blocks=40, width=4096, length=1)
    with pytest.raises(PlanError, match=r"about \d+ devices of this size under zero=3") as caught:
        search(profile, make_gpus(2, 4e9))
    count = int(str(caught.value).split("about ")[1].split()[0])
    assert search(profile, make_gpus(2 * count, 4e9))


def test_explain_and_why_not_name_cause_and_constraint() -> None:
    profile, cluster = make_profile(blocks=8, width=1024), make_cluster(cores=2)
    found = search(profile, cluster, top=3)
    told = explain(found)
    assert str(found[0].plan) in told
    assert "time:" in told
    assert "memory per rank:" in told
    assert "slower" in why_not(profile, cluster, plan(dp=2, zero=3, micro=1), found[0].plan)
    assert "cannot be executed" in why_not(profile, cluster, plan(dp=32), found[0].plan)
    small = make_cluster(cores=2, memory=1e9)
    assert "does not fit" in why_not(make_profile(blocks=12, width=2048), small, plan(), found[0].plan)


def test_memory_forces_recomputation_then_other_axes() -> None:
    profile = make_stack(blocks=8, width=512, batch=4, length=4096)
    roomy = [each for each in PlanSpace(profile, make_gpus(4, 1e12)).data_parallel_candidates() if each.plan.ranks == 4]
    least = min(each.forecast.memory.required for each in roomy)
    found = search(profile, make_gpus(4, 0.8 * least), top=100, complete=lambda wanted: cut(wanted, profile))
    assert all(each.forecast.fits for each in found)
    assert {each.plan.recompute for each in found} == {"none", "selective", "block"}
    assert {each.plan.mesh.tp for each in found} >= {1, 2}
    assert not [each.plan for each in found if each.plan.incomplete]


def test_more_ranks_than_samples_are_put_on_other_axes() -> None:
    profile = make_stack(blocks=8, width=256, batch=2)
    found = search(profile, make_gpus(8, 64e9), ranks=8, top=100, complete=lambda wanted: cut(wanted, profile))
    assert {each.plan.ranks for each in found} == {8}
    assert all(each.plan.mesh.dp <= 2 for each in found)
    assert any(each.plan.mesh.tp > 1 for each in found)
    assert any(each.plan.mesh.pp > 1 for each in found)
    without = search(profile, make_gpus(8, 64e9), ranks=8, top=100)
    assert {each.plan.mesh.tp for each in without} == {1}


def test_a_tensor_axis_that_cannot_be_is_left_out() -> None:
    profile = make_stack(blocks=2, width=256, batch=1)

    def never(wanted: Plan) -> Plan:
        raise PlanError(f"{wanted}: no")

    found = search(profile, make_gpus(2, 64e9), ranks=2, complete=never)
    assert {(each.plan.mesh.tp, each.plan.mesh.pp) for each in found} == {(1, 2)}


def test_differences_in_memory_are_of_all_that_is_listed() -> None:
    profile, cluster = make_profile(blocks=8, width=1024), make_cluster(cores=2)
    best = plan(dp=1)
    assert "as fast; as much memory per rank" in why_not(profile, cluster, best, best)
    mine = simulate(profile, cluster, best)
    other = replace(mine, memory=replace(mine.memory, framework=mine.memory.framework + 5e8))
    assert "500 MB more memory per rank: framework +500 MB" in _compare_forecasts(mine, other)
