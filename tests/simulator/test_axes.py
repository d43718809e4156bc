"""Forecasts of the tensor and pipeline axes: what each rank holds is exact, what it waits for follows from the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.plan.placement import Placement, TensorSlice
from echelon.plan.plan import Plan
from echelon.plan.profile import Amount, ModuleProfile, ParameterProfile, Profile, fold_path
from echelon.plan.text import from_text
from echelon.simulator import simulate
from echelon.simulator.memory import rank_memories, saved_bytes
from echelon.simulator.model_parts import ModelParts
from echelon.simulator.pipeline_schedule import makespan
from echelon.simulator.plan_layout import PlanLayout, lay_out_plan
from echelon.simulator.summarize_profile import summarize_profile
from echelon.simulator.tp_cuts import cut_model
from tests.simulator.cases import cut, make_cluster, make_language, make_stack, profiles

CLUSTER = make_cluster(cores=8)


def layout(profile: Profile, plan: Plan) -> PlanLayout:
    plan = cut(plan, profile)
    return lay_out_plan(summarize_profile(profile, plan), profile.batch, plan, trusts_trace=True)


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
    for rank in range(plan.mesh.pp):
        assert layout(profile, plan).rank_elements(rank) == pytest.approx(profile.elements / ways)


@given(st.integers(1, 6), st.integers(2, 4), st.sampled_from([63, 64, 100]))
def test_the_rank_that_holds_most_of_an_uneven_cut_counts(blocks: int, ways: int, width: int) -> None:
    profile = make_stack(blocks=blocks, width=width)
    held = layout(profile, from_text(f"tp={ways}")).rank_elements(0)
    assert held == pytest.approx(blocks * 2 * -(-4 * width // ways) * width)


def test_a_tied_parameter_is_held_by_both_stages_and_one_of_no_unit_by_all() -> None:
    profile = make_language(blocks=4, width=64, tied=True)
    profile = replace(
        profile, parameters=(*profile.parameters, ParameterProfile(name="scale", shape=(8,), dtype="bfloat16"))
    )
    table, blocks = profile.parameters[0].elements, profile.elements - profile.parameters[0].elements - 8
    plan = from_text("pp=3 micro=4").replace(stages=(3, 4))
    pipeline = lay_out_plan(summarize_profile(profile, plan), profile.batch, plan)
    assert [pipeline.rank_elements(rank) for rank in range(3)] == [
        blocks / 2 + table + 8,
        blocks / 4 + 8,
        blocks / 4 + table + 8,
    ]


@given(profiles, st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_ranks_together_hold_and_compute_the_whole_model(profile: Profile, tp: int, pp: int, micro: int) -> None:
    profile = make_stack(blocks=max(len(profile.fsdp_units), 2), width=64, batch=profile.batch)
    found = layout(profile, from_text(f"tp={tp} pp={pp} micro={micro}"))
    assert sum(found.rank_elements(rank) for rank in range(pp)) * tp == pytest.approx(profile.elements)
    assert sum(found.stage_blocks) == pytest.approx(len(profile.fsdp_units))


def test_what_lies_between_a_column_and_its_row_is_cut_and_what_they_read_is_not() -> None:
    profile = make_stack(blocks=4, width=256)
    # Of each block the input (1 width) stays whole, the activation and the row's input (4 widths each) are halved.
    kept = saved_bytes(layout(profile, from_text("tp=2")), 0, 4)
    assert kept == pytest.approx(profile.saved_bytes(4) * (1 + 4) / (1 + 8))


def test_an_early_rank_of_a_pipeline_peaks_where_its_backward_begins() -> None:
    """Whatever peaks of the whole model fall to it: they lie late in backward, when next to nothing is kept."""
    profile = make_stack(blocks=4, width=256)
    late = replace(profile.moments[0], module="blocks.* mm", alive=Amount(1.0), saved=Amount(0.0))
    profile = replace(profile, moments=(*profile.moments, late))
    pipeline = layout(profile, from_text("pp=2 micro=4"))
    assert saved_bytes(pipeline, 0, 4) == pytest.approx(profile.saved_bytes(4) / 2)
    peak = max(rank_memories(pipeline, 0), key=lambda memory: memory.activations)
    # Two micro-batches are under way: their activations, and what both gave to the next stage.
    assert peak.activations == pytest.approx(profile.saved_bytes(4) + 2 * profile.modules[0].output.at(4))


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
    def found(count: int) -> PlanLayout:
        return layout(
            make_stack(blocks=2 * pp, width=8, batch=count), from_text(f"pp={pp} micro=1 schedule={schedule}")
        )

    def bubble(count: int) -> float:
        """Of ranks that compute for a second."""
        made = found(count)
        seconds = 1 / count / made.chunks
        forward, backward = ([seconds * share] * len(made.stage_blocks) for share in (1 / 3, 2 / 3))
        return makespan(made.schedule, forward, backward, ranks=pp, micro_batches=count) - 1

    assert 0 < bubble(count) <= (pp - 1) / count * (1 + 1e-9)
    assert bubble(2 * count * pp) < bubble(count * pp)
    for rank in range(pp):
        assert 1 / found(count).chunks <= found(count).in_flight_micro_batches(rank) <= count
    if schedule in ("gpipe", "1f1b"):
        assert bubble(count) == pytest.approx((pp - 1) / count)


def test_weights_that_are_cut_at_rest_are_computed_whole() -> None:
    profile = make_stack(blocks=1, width=256)
    path = next(each.name for each in profile.parameters).rpartition(".")[0]
    stored = Placement(path=path, cut="stored", slices=(TensorSlice("weight", 0),))
    row = Placement(path=path, cut="gather", slices=(TensorSlice("weight", 0),))
    for each, shares in ((stored, False), (row, True)):
        cuts = cut_model(profile, ModelParts(profile), from_text("tp=2").replace(placements=(each,)))
        assert cuts.shards_compute(fold_path(path), "block", "weight_matmul") is shares


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
    before, after = (
        max(
            memory.activations + memory.temporary
            for memory in rank_memories(layout(each, from_text("recompute=block")))
        )
        for each in (profile, large)
    )
    # Logits of twice the size of a block that is recomputed: they peak, and the block does not come on top.
    assert logits.at(16) > before > logits.at(16) / 4
    assert logits.at(16) < after < logits.at(16) + before / 2


def test_an_optimizer_state_follows_the_elements() -> None:
    profile = make_stack(blocks=8, width=256)
    whole, half = (simulate(profile, CLUSTER, cut(from_text(text), profile)).memory.optimizer for text in ("", "tp=2"))
    assert half == pytest.approx(whole / 2)


def test_blocks_that_are_not_alike_are_not_counted_twice() -> None:
    profile = make_stack(blocks=2, width=256)
    blocks = [module for module in profile.modules if module.path == "blocks.*"]
    apart = tuple(replace(blocks[0], path=f"blocks.{i}", count=1) for i in range(2))
    other = tuple(module for module in profile.modules if module.path != "blocks.*")
    assert all(isinstance(each, ModuleProfile) for each in apart)
    plan = from_text("recompute=block")
    found = [simulate(each, CLUSTER, plan).memory for each in (profile, replace(profile, modules=(*apart, *other)))]
    assert found[0].activations == pytest.approx(found[1].activations)


def test_a_plan_that_leaves_its_cuts_open_is_cut_by_the_ideal_rule() -> None:
    profile = make_stack(blocks=8, width=512)
    for text in ("tp=2", "pp=2 micro=4"):
        ideal, placed = (simulate(profile, CLUSTER, plan) for plan in (from_text(text), cut(from_text(text), profile)))
        assert ideal.memory.parameters == pytest.approx(placed.memory.parameters)
        assert ideal.time.forward == pytest.approx(placed.time.forward)
