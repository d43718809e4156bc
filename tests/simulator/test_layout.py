"""Plans laid out by data sheets: stages hold and compute the whole model, ZeRO says what it must, optimizers are the job's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import PlanError
from echelon.plan import catalogue
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import TimeForecast
from echelon.plan.plan import Plan
from echelon.plan.profile import OptimizerProfile, PipelineUnit, Profile
from echelon.plan.text import from_text
from echelon.simulator import TrainingStack, simulate
from echelon.simulator.calibration import load_constants
from echelon.simulator.cost.roofline import with_overheads
from echelon.simulator.memory import rank_memories
from echelon.simulator.plan_layout import PlanLayout, lay_out_plan
from echelon.simulator.simulator import Simulator
from echelon.simulator.summarize_profile import summarize_profile
from tests.simulator.cases import cut, make_language, make_stack

A100 = catalogue.parse_cluster("2x8xA100-80GB")


def layout(profile: Profile, text: str | Plan, cluster: Cluster = A100) -> PlanLayout:
    plan = from_text(text) if isinstance(text, str) else text
    (found,) = Simulator(profile, cluster).place(plan)
    return found.layout


def without_blocks() -> Profile:
    """An LSTM and the like: children with names, none of them repeated."""
    plain = make_stack(blocks=1, width=512)
    names = {"blocks.0.up": "encoder", "blocks.0.down": "decoder"}

    def renamed(path: str) -> str:
        for old, new in names.items():
            path = path.replace(old, new).replace(old.replace("0", "*"), new)
        return path

    return replace(
        plain,
        parameters=tuple(replace(each, name=renamed(each.name)) for each in plain.parameters),
        operators=tuple(replace(each, module=renamed(each.module)) for each in plain.operators),
        modules=tuple(replace(each, path=renamed(each.path), count=1) for each in plain.modules if each.path != "blocks.*"),
        fsdp_units=(),
        fsdp_unit_bytes=(),
        pipeline_units=(PipelineUnit(path="encoder", cost=3.0), PipelineUnit(path="decoder", cost=1.0)),
    )  # fmt: skip


def in_a_sequence() -> Profile:
    """Children of the model itself, of which every second is a block: numbers alone do not make one."""
    plain = make_stack(blocks=6, width=256)
    inner = [PipelineUnit(path=visit.path.replace("blocks.", "layers."), cost=1.0) for visit in plain.pipeline_units]
    norms = [PipelineUnit(path=f"layers.{10 + place}", cost=0.01) for place in range(6)]

    def renamed(path: str) -> str:
        return path.replace("blocks.", "layers.")

    return replace(
        plain,
        parameters=tuple(replace(each, name=renamed(each.name)) for each in plain.parameters),
        operators=tuple(replace(each, module=renamed(each.module)) for each in plain.operators),
        modules=tuple(replace(each, path=renamed(each.path)) for each in plain.modules),
        fsdp_units=tuple(map(renamed, plain.fsdp_units)),
        pipeline_units=tuple(each for pair in zip(inner, norms, strict=True) for each in pair),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("profile", "begins"),
    [
        (without_blocks(), (1,)),
        *product([in_a_sequence(), make_language(blocks=6), make_stack(blocks=6)], [(1,), (1, 2), (2,)]),
    ],
)
def test_stages_together_are_the_whole_model(profile: Profile, begins: tuple[int, ...]) -> None:
    whole = layout(profile, "")
    parted = layout(profile, from_text(f"pp={len(begins) + 1} micro=1").replace(stages=begins))
    assert sum(parted.stage_blocks) == pytest.approx(sum(whole.stage_blocks))
    held = [parted.rank_elements(rank) for rank in range(parted.plan.mesh.pp)]
    assert sum(held) == pytest.approx(profile.elements)
    assert whole.rank_elements(0) == pytest.approx(profile.elements)
    assert held[0] > 0


def test_a_model_without_blocks_is_not_free_in_a_pipeline() -> None:
    profile = without_blocks()
    one = simulate(profile, A100, from_text("micro=1"))
    two = simulate(profile, A100, from_text("pp=2 micro=1").replace(stages=(1,)))
    # Three of four parts of the work are on the first rank.
    assert two.time.forward == pytest.approx(0.75 * one.time.forward)
    assert two.memory.parameters == pytest.approx(one.memory.parameters / 2)
    open_plan = simulate(profile, A100, from_text("pp=2 micro=1"))
    assert open_plan.time == two.time
    with pytest.raises(PlanError, match="1 blocks cannot make 4 stages"):
        simulate(profile, A100, from_text("pp=4 micro=1"))


def test_what_crosses_to_a_stage_is_what_its_place_says() -> None:
    profile = make_language(blocks=4, width=1024, length=512)
    wide = replace(
        profile,
        pipeline_units=tuple(
            replace(each, boundary_bytes=each.boundary_bytes * 100) for each in profile.pipeline_units
        ),
    )
    plan = from_text("pp=2 micro=1").replace(stages=(3,))
    assert simulate(wide, A100, plan).time.exchange > 2 * simulate(profile, A100, plan).time.exchange


def test_few_micro_batches_run_and_wait_as_the_engine_runs_them() -> None:
    profile = make_stack(blocks=8, batch=2)
    few = layout(profile, "pp=4 micro=1")
    assert few.schedule == "gpipe"
    assert [few.in_flight_micro_batches(rank) for rank in range(4)] == [2.0] * 4
    left = layout(make_stack(blocks=8, batch=6), "pp=4 micro=1 schedule=zero-bubble")
    assert (left.schedule, left.chunks) == ("gpipe", 2)
    named = from_text("pp=4 micro=1 schedule=zero-bubble").replace(stages=tuple(range(1, 8)))
    for batch in (6, 8, 12):
        model = make_stack(blocks=8, batch=batch)
        assert simulate(model, A100, named).time == simulate(model, A100, named.replace(stages=())).time
    others = lay_out_plan(summarize_profile(profile), 2, from_text("pp=2 micro=1"), TrainingStack(chunks=2))
    assert others.schedule == "interleaved"


def test_what_fits_goes_by_the_rank_that_may_need_most() -> None:
    """The last rank has the larger forecast (logits), the first one more that is unsure (micro-batches under way)."""
    constants = replace(load_constants(), slack=0.0, spread=0.3)
    for vocab in range(2_000, 60_000, 2_000):
        profile = make_language(blocks=16, width=1024, length=512, vocab=vocab, batch=64)
        found = layout(profile, from_text("pp=4 micro=4").replace(stages=(5, 9, 13)))
        held = [with_overheads(each, constants) for each in rank_memories(found)]
        unsure = max(held, key=lambda each: each.high)
        if max(each.peak for each in held) > unsure.peak:
            break
    else:
        pytest.fail("no model in which they differ")
    simulator = Simulator(profile, A100)
    assert simulator.forecast(found.plan).memory.required == simulator.peak_memory(simulator.place(found.plan))


def exchange(profile: Profile, text: str) -> TimeForecast:
    return simulate(profile, A100, from_text(text), stack=TrainingStack(overlaps_data_parallel=False)).time


def test_zero_2_exchanges_after_every_micro_batch_or_keeps_all_gradients() -> None:
    profile = make_stack(blocks=8, width=2048, batch=64)
    one, two, kept = (
        exchange(profile, f"dp=8 micro=1 {zero}").exchange for zero in ("zero=1", "zero=2", "zero=2 keep")
    )
    assert two > 4 * one
    assert kept == pytest.approx(one)
    held = [
        simulate(profile, A100, from_text(f"dp=8 micro=1 {zero}")).memory
        for zero in ("zero=1", "zero=2", "zero=2 keep")
    ]
    assert held[1].gradients == pytest.approx(held[0].gradients / 8)
    assert held[2].gradients == held[0].gradients


def test_zero_3_fetches_what_is_outside_of_blocks_too() -> None:
    small, large = (make_language(blocks=4, width=512, vocab=vocab, batch=16) for vocab in (1024, 262_144))
    more = 2 * (large.elements - small.elements)
    link = A100.network
    assert link is not None
    # There, and the gradients back, each at most at the network's rate.
    slower = exchange(large, "dp=16 zero=3").exchange - exchange(small, "dp=16 zero=3").exchange
    assert slower >= 2 * more / 2 / link.rate
    fetched = exchange(large, "dp=16 zero=3 keep").exchange
    assert fetched < exchange(large, "dp=16 zero=3").exchange * 1.5


def test_stages_that_share_a_table_add_up_its_gradients() -> None:
    apart, tied = (make_language(blocks=4, width=1024, vocab=65_536, tied=each) for each in (False, True))
    plan, wire = "pp=2 micro=1", A100.nodes[0].wire
    assert wire is not None
    # Each of the two gives its half of the sums and gets the other's.
    assert exchange(tied, plan).exchange - exchange(apart, plan).exchange >= 2 * 65_536 * 1024 / wire.rate


def test_what_tp_says_outside_of_blocks_is_exchange_and_not_compute() -> None:
    cluster = replace(A100, nodes=tuple(replace(node, wire=replace(node.wire, rate=1.0)) for node in A100.nodes))  # type: ignore[arg-type,type-var]
    profile = make_language(blocks=4)
    slow, fast = (simulate(profile, each, from_text("tp=2")).time for each in (cluster, A100))
    assert (slow.forward, slow.backward) == (fast.forward, fast.backward)
    assert slow.exchange > 1e3 * fast.exchange


@pytest.mark.parametrize(
    ("state", "master", "bytes_each"), [(4, False, 4), (4, True, 16), (2, False, 2), (0, False, 0)]
)
def test_the_optimizer_is_the_jobs_own(state: int, master: bool, bytes_each: float) -> None:
    """Adam, Adam with a wide copy (and gradients widened for it), momentum, none."""
    profile = make_language(blocks=4)
    rule = replace(profile.optimizers[0], state_bytes=state * profile.elements)
    held = simulate(
        replace(profile, optimizers=(rule,)), A100, from_text("micro=1"), stack=TrainingStack(master_weights=master)
    )
    assert held.memory.optimizer == pytest.approx(bytes_each * profile.elements)
    assert held.memory.gradients == pytest.approx(2 * profile.elements)


def test_updates_go_by_the_bytes_of_the_optimizer_and_clipping_costs() -> None:
    profile = make_language(blocks=4)
    plain = replace(profile, optimizers=(replace(profile.optimizers[0], state_bytes=0),))
    clipped = replace(plain, clips_gradients=True)
    none, adam, clip = (simulate(each, A100, from_text("")).time.optimizer for each in (plain, profile, clipped))
    # A gradient and a parameter both ways are 6 bytes, two states of 2 bytes both ways 8 more, clipping 6.
    assert adam / none == pytest.approx(14 / 6)
    assert clip / none == pytest.approx(12 / 6)


def test_what_is_not_trained_has_neither_gradients_nor_state() -> None:
    profile = make_language(blocks=4)
    rule: OptimizerProfile = replace(
        profile.optimizers[0], trainable_elements=profile.elements // 4, state_bytes=profile.elements
    )
    held = simulate(replace(profile, optimizers=(rule,)), A100, from_text("micro=1")).memory
    assert held.gradients == pytest.approx(2 * profile.elements / 4)
    assert held.optimizer == pytest.approx(profile.elements)


def test_precisions_of_plan_and_job_are_priced() -> None:
    profile = make_stack(blocks=8, width=4096, batch=16, length=512)
    cluster = catalogue.parse_cluster("A100-80GB")
    full, tf32, half = (
        simulate(profile, cluster, from_text(text)) for text in ("", "precision=tf32", "precision=bf16")
    )
    assert full.time.forward > 5 * tf32.time.forward > 8 * half.time.forward > 0
    assert half.memory.activations == pytest.approx(full.memory.activations / 2)
    assert half.memory.parameters == full.memory.parameters
    job = replace(profile, precision="tf32")
    assert simulate(job, cluster, from_text("")).time == tf32.time
    assert simulate(job, cluster, from_text("precision=fp32")).time == full.time
    narrow = make_language(blocks=4)
    assert simulate(narrow, cluster, from_text("precision=bf16")).time == simulate(narrow, cluster, from_text("")).time


def test_cuts_that_a_plan_names_are_those_that_are_priced() -> None:
    profile = make_stack(blocks=8, width=2048, batch=16, length=512)
    every = cut(from_text("tp=2"), profile)
    half = every.replace(placements=every.tensor.placements[: len(every.tensor.placements) // 2])
    ideal, all_cut, some = (simulate(profile, A100, plan) for plan in (from_text("tp=2"), every, half))
    assert all_cut.memory.parameters == pytest.approx(ideal.memory.parameters)
    assert all_cut.time.forward == pytest.approx(ideal.time.forward)
    # One pair a block; by the ideal rule there are two. Before the blocks and after them nothing is cut, which by the rule sums once each.
    assert all_cut.time.exchange / ideal.time.exchange == pytest.approx(8 / (16 + 2))
    assert some.memory.parameters == pytest.approx(1.5 * all_cut.memory.parameters)


def test_every_kind_of_device_is_priced_by_itself() -> None:
    fast, slow = catalogue.parse_cluster("2x8xH100-80GB"), catalogue.parse_cluster("2x8xA100-40GB")
    mixed = replace(fast, nodes=(fast.nodes[0], slow.nodes[0]), network=slow.network)
    for width in (512, 1024, 4096):
        profile = make_stack(blocks=4, width=width, batch=32, length=256)
        found = simulate(profile, mixed, from_text("dp=16"))
        each = [
            simulate(profile, replace(mixed, nodes=(node, node)), from_text("dp=16")).time.step for node in mixed.nodes
        ]
        assert found.time.step >= max(each) * (1 - 1e-9)


@given(st.sampled_from([(2, 8), (4, 4), (8, 2)]), st.integers(1, 3))
def test_parameters_are_gathered_into_buffers_under_zero_3(mesh: tuple[int, int], micro: int) -> None:
    dp, tp = mesh
    held = simulate(make_language(blocks=4), A100, from_text(f"dp={dp} tp={tp} zero=3 micro={micro}")).memory
    assert held.buckets > 0
    assert held.peak == pytest.approx(
        held.parameters + held.gradients + held.optimizer + held.activations + held.temporary + held.buckets
    )
    assert simulate(make_language(blocks=4), A100, from_text(f"dp={dp} tp={tp}")).memory.buckets == 0
