"""Forecasts of the tensor and pipeline axes: what each rank holds is exact, what it waits for follows from the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import PlanError
from echelon.plan.placement import Placement, TensorSlice
from echelon.plan.plan import Plan
from echelon.plan.profile import Amount, ModuleProfile, OptimizerProfile, ParameterProfile, Profile, fold_path
from echelon.plan.stages import stage_count
from echelon.plan.text import from_text
from echelon.simulator import simulate
from echelon.simulator.pipeline_schedule import bubble_seconds, in_flight_micro_batches
from echelon.simulator.rank_profile import rank_profiles
from echelon.simulator.rank_shares import RankShares
from tests.simulator.cases import cut, make_cluster, make_profile, make_stack, profiles

CLUSTER = make_cluster(cores=8)


def whole(plan: Plan) -> Plan:
    return plan.replace(mesh=replace(plan.mesh, tp=1, pp=1), placements=(), stages=())


@pytest.mark.parametrize("text", ["tp=2", "pp=2 micro=4", "tp=2 pp=2 micro=4", "pp=4 schedule=interleaved micro=2"])
def test_parameters_gradients_and_state_are_divided(text: str) -> None:
    profile = make_stack(blocks=8, width=512)
    plan = cut(from_text(text), profile)
    ways = plan.mesh.tp * plan.mesh.pp
    held, one = (simulate(profile, CLUSTER, each).memory for each in (plan, whole(plan)))
    for name in ("parameters", "optimizer"):
        assert getattr(held, name) == pytest.approx(getattr(one, name) / ways, rel=0.05), name
    for each in rank_profiles(profile, plan, (4, 4)):
        assert sum(parameter.bytes for parameter in each.profile.parameters) == profile.bytes / ways


@given(st.integers(1, 6), st.integers(2, 4), st.sampled_from([63, 64, 100]))
def test_the_rank_that_holds_most_of_an_uneven_cut_counts(blocks: int, ways: int, width: int) -> None:
    profile = make_stack(blocks=blocks, width=width)
    (part,) = rank_profiles(profile, cut(from_text(f"tp={ways}"), profile), (4,))
    held = {each.name: each.shape for each in part.profile.parameters}
    assert held["blocks.0.up.weight"] == (-(-4 * width // ways), width)
    assert held["blocks.0.down.weight"] == (width, -(-4 * width // ways))


def test_a_tied_parameter_is_held_by_both_stages_and_one_of_no_unit_by_all() -> None:
    profile = make_stack(blocks=4, width=64)
    first = profile.parameters[0]
    tied = replace(first, aliases=("blocks.3.up.weight",))
    rest = tuple(each for each in profile.parameters[1:] if each.name != "blocks.3.up.weight")
    profile = replace(profile, parameters=(tied, *rest, ParameterProfile(name="scale", shape=(8,))))
    one, two = rank_profiles(profile, cut(from_text("pp=2 micro=4"), profile), (4, 4))
    assert first.name in {each.name for each in one.profile.parameters} & {each.name for each in two.profile.parameters}
    assert all("scale" in {each.name for each in part.profile.parameters} for part in (one, two))


@given(profiles, st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_ranks_together_hold_and_compute_the_whole_model(profile: Profile, tp: int, pp: int, micro: int) -> None:
    profile = make_stack(blocks=max(len(profile.fsdp_units), 2), width=64, batch=profile.batch)
    found = rank_profiles(profile, cut(from_text(f"tp={tp} pp={pp} micro={micro}"), profile), (micro, micro))
    assert sum(part.profile.bytes for part in found) * tp == profile.bytes
    assert sum(part.profile.flops(4) for part in found) * tp == pytest.approx(profile.flops(4))


def test_what_lies_between_a_column_and_its_row_is_cut_and_what_they_read_is_not() -> None:
    profile = make_stack(blocks=4, width=256)
    (part,) = rank_profiles(profile, cut(from_text("tp=2"), profile), (4,))
    # Of each block the input (1 width) stays whole, the activation and the row's input (4 widths each) are halved.
    assert part.profile.saved_bytes(4) == pytest.approx(profile.saved_bytes(4) * (1 + 4) / (1 + 8))


def test_an_early_rank_of_a_pipeline_peaks_where_its_backward_begins() -> None:
    """Whatever peaks of the whole model fall to it: they lie late in backward, when next to nothing is kept."""
    profile = make_stack(blocks=4, width=256)
    late = replace(profile.moments[0], module="blocks.* mm", alive=Amount(1.0), saved=Amount(0.0))
    profile = replace(profile, moments=(*profile.moments, late))
    first, _ = rank_profiles(profile, cut(from_text("pp=2 micro=4"), profile), (4, 4))
    assert first.profile.saved_bytes(4) == pytest.approx(profile.saved_bytes(4) / 2)
    # Two micro-batches are under way: the other one, and what both gave to the next stage.
    given = profile.modules[0].output.at(4)
    assert first.in_flight_bytes == pytest.approx(profile.saved_bytes(4) / 2 + 2 * given)


def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_there_are_stages() -> None:
    profile = make_stack(blocks=8, width=256, batch=32)
    held = {
        name: simulate(profile, CLUSTER, cut(from_text(f"pp=2 micro=2 schedule={name}"), profile)).memory.activations
        for name in ("gpipe", "1f1b", "interleaved")
    }
    assert held["1f1b"] < held["interleaved"] < held["gpipe"]
    assert held["gpipe"] == pytest.approx(8 * held["1f1b"], rel=0.3)


@given(st.integers(2, 8), st.integers(1, 64), st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
def test_bubbles_and_what_is_in_flight(pp: int, count: int, schedule: str) -> None:
    plan = from_text(f"pp={pp} schedule={schedule}")

    def bubble(plan: Plan, count: int) -> float:
        return bubble_seconds(plan, count, [1.0] * pp)[0]

    assert 0 < bubble(plan, count) <= (pp - 1) / count * (1 + 1e-9)
    assert bubble(plan, 2 * count * pp) < bubble(plan, count * pp)
    for rank in range(pp):
        assert 1 / stage_count(plan) <= in_flight_micro_batches(plan, count, rank) <= count
    if schedule in ("gpipe", "1f1b"):
        assert bubble(plan, count) == pytest.approx((pp - 1) / count)


def test_a_rank_waits_for_its_neighbours_work_and_not_for_its_own() -> None:
    plan = from_text("pp=2")
    assert bubble_seconds(plan, 1, [3.0, 0.3]) == pytest.approx([0.3, 3.0])
    assert bubble_seconds(plan, 4, [3.0, 3.0]) == pytest.approx([0.75, 0.75])


def test_weights_that_are_cut_at_rest_are_computed_whole() -> None:
    profile = make_stack(blocks=1, width=256)
    path = next(each.name for each in profile.parameters).rpartition(".")[0]
    stored = Placement(path=path, cut="stored", slices=(TensorSlice("weight", 0),))
    row = Placement(path=path, cut="gather", slices=(TensorSlice("weight", 0),))
    share = {
        each.cut: RankShares(profile, from_text("tp=2").replace(placements=(each,))).compute_share(fold_path(path), 0)
        for each in (stored, row)
    }
    assert share == {"stored": 1.0, "gather": 0.5}


def test_messages_are_priced_and_faster_links_help() -> None:
    profile = make_stack(blocks=4, width=512, length=64)
    for text in ("tp=2", "pp=2 micro=2"):
        plan = cut(from_text(text), profile)
        slow, fast = (simulate(profile, make_cluster(cores=2, link=link), plan).time for link in (1e8, 1e10))
        assert slow.exchange > 2 * fast.exchange > 0
        assert (slow.bubble > 0) is (plan.mesh.pp > 1)


def test_recomputed_blocks_keep_their_inputs_and_cost_a_forward_but_its_end() -> None:
    profile = make_stack(blocks=8, width=256, length=64)
    for text in ("dp=2", "tp=2", "pp=2 micro=4", "dp=2 zero=3"):
        plan = cut(from_text(text), profile)
        kept, again = (simulate(profile, CLUSTER, replace(plan, recompute=each)) for each in ("none", "block"))
        assert again.memory.activations < 0.6 * kept.memory.activations, text
        # Of two equal products the one that ends a block is not needed again.
        assert again.time.backward == pytest.approx(kept.time.backward + kept.time.forward / 2, rel=0.1), text


def test_selective_keeps_products_and_computes_the_rest_again() -> None:
    profile = make_stack(blocks=8, width=256, length=64)
    for text in ("dp=2", "tp=2", "pp=2 micro=4", "dp=2 zero=3"):
        plan = cut(from_text(text), profile)
        none, some, block = (
            simulate(profile, CLUSTER, replace(plan, recompute=each)) for each in ("none", "selective", "block")
        )
        assert block.memory.activations < some.memory.activations < none.memory.activations, text
        assert none.time.backward <= some.time.backward < block.time.backward, text


def test_the_loss_and_a_block_that_is_computed_again_do_not_peak_at_once() -> None:
    profile = make_stack(blocks=8, width=256, length=64)
    (moment,) = profile.moments
    logits = Amount(0.0, 2e6)
    large = replace(profile, moments=(replace(moment, alive=moment.alive + logits, saved=moment.saved + logits),))
    (before,), (after,) = (rank_profiles(each, from_text("recompute=block"), (16,)) for each in (profile, large))
    inputs = profile.modules[0].output.at(16) * 8
    assert after.profile.saved_bytes(16) == pytest.approx(inputs + logits.at(16))
    # Eight inputs of one width, and all that one block of nine keeps besides.
    assert before.profile.saved_bytes(16) == pytest.approx(inputs * (8 + 8) / 8)


def test_an_optimizer_state_follows_the_elements() -> None:
    profile = make_stack(blocks=8, width=256)
    (part,) = rank_profiles(profile, cut(from_text("tp=2"), profile), (4,))
    (rule,), (before,) = part.profile.optimizers, profile.optimizers
    assert isinstance(rule, OptimizerProfile)
    assert (2 * rule.state_bytes, 2 * rule.trainable_elements) == (before.state_bytes, before.trainable_elements)


def test_blocks_that_are_not_alike_are_not_counted_twice() -> None:
    profile = make_stack(blocks=2, width=256)
    blocks = [module for module in profile.modules if module.path == "blocks.*"]
    apart = tuple(replace(blocks[0], path=f"blocks.{i}", count=1) for i in range(2))
    other = tuple(module for module in profile.modules if module.path != "blocks.*")
    assert all(isinstance(each, ModuleProfile) for each in apart)
    plan = from_text("recompute=block")
    found = [simulate(each, CLUSTER, plan).memory for each in (profile, replace(profile, modules=(*apart, *other)))]
    assert found[0].activations == pytest.approx(found[1].activations)


def test_a_plan_that_leaves_its_cuts_open_is_refused() -> None:
    for text in ("tp=2", "pp=2"):
        with pytest.raises(PlanError, match="leaves open how the model is cut"):
            simulate(make_profile(), make_cluster(), from_text(text))
