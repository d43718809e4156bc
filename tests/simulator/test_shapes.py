"""By data sheets: lines of factors, experts, models that ZeRO takes as one unit, what convolutions keep, what sequence parallelism says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.errors import PlanError
from echelon.plan import catalogue
from echelon.plan.plan import Plan
from echelon.plan.profile import Amount, ParameterProfile, Profile
from echelon.plan.text import from_text
from echelon.simulator import TrainingStack, simulate
from echelon.simulator.calibration import load_constants
from echelon.simulator.compute import compute_precision
from echelon.simulator.cost.roofline import operand_line_sizes, product_seconds
from echelon.simulator.memory import rank_memories
from echelon.simulator.plan_layout import lay_out_plan
from echelon.simulator.summarize_profile import summarize_profile
from tests.simulator.cases import make_language, make_stack
from tests.simulator.test_sheets import with_experts

A100, H200 = catalogue.parse_cluster("8xA100-80GB"), catalogue.parse_cluster("8xH200-141GB")
CONV = (Amount(0.0, 1.0), Amount(64.0), Amount(64.0), Amount(9.0), Amount(1024.0), Amount(1.0))


def seconds(lies: str, m: float, n: float, k: float, precision: str = "bf16", name: str = "H200-141GB") -> float:
    sheet = catalogue.catalogue_device(name).sheet
    assert sheet is not None
    dims = (1.0, m, n, k)
    return product_seconds(
        sheet,
        load_constants(),
        precision,
        dims,
        2 * m * n * k,
        2 * (m * n + n * k + m * k),
        operand_line_sizes(lies, dims),
    )


@pytest.mark.parametrize(
    ("lies", "m", "n", "k", "slower"),
    [
        # Measured on an H200: 790 TFLOP/s where all lines lie on 16 bytes, 260 to 282 on 4, 95 to 153 on 2.
        ("nt", 8192, 4098, 4096, 3.0), ("nt", 8192, 4096, 4098, 3.0), ("nn", 8192, 4097, 4096, 6.0), ("tn", 8190, 4096, 4096, 3.0),
        # What lies side by side in no factor may be odd.
        ("tn", 8192, 4096, 4097, 1.0), ("nn", 8191, 4096, 4096, 1.0),
    ],
)  # fmt: skip
def test_products_are_slow_where_lines_of_a_factor_are_not_aligned(
    lies: str, m: int, n: int, k: int, slower: float
) -> None:
    found = seconds(lies, m, n, k) / seconds(lies, 8192, 4096, 4096)
    assert found == pytest.approx(1.0, abs=0.02) if slower == 1 else 0.75 * slower < found < 1.3 * slower


def test_many_products_in_one_call_miss_the_matrix_units_where_lines_are_not_aligned() -> None:
    """256 of 1024 x 1024 x 64: 197 TFLOP/s on an H200, 52 and 77 with one side of 1023."""
    sheet = catalogue.catalogue_device("H200-141GB").sheet
    assert sheet is not None
    rates = []
    for columns in (1024.0, 1023.0):
        dims, flops = (256.0, 1024.0, columns, 64.0), 2 * 256 * 1024 * columns * 64
        rates.append(
            flops / product_seconds(sheet, load_constants(), "bf16", dims, flops, 1.0, operand_line_sizes("nt", dims))
        )
    assert 40e12 < rates[1] < 80e12 < 180e12 < rates[0]


def test_odd_vocabularies_cost_a_few_times_and_no_more() -> None:
    assert (
        1.5
        < seconds("nt", 8192, 50257, 4096, name="A100-80GB") / seconds("nt", 8192, 50304, 4096, name="A100-80GB")
        < 6
    )
    assert seconds("nt", 8192, 4098, 4096, "tf32") > 2 * seconds("nt", 8192, 4096, 4096, "tf32")
    assert seconds("nt", 8192, 4097, 4096, "fp32") == pytest.approx(seconds("nt", 8192, 4096, 4096, "fp32"), rel=0.04)


def test_devices_without_bf16_compute_it_as_slowly_as_they_must() -> None:
    assert compute_precision("bfloat16", "bf16") == compute_precision("bfloat16", "fp32") == "bf16"
    assert compute_precision("bfloat16", "fp16") == compute_precision("float16", "fp16") == "half"
    assert seconds("nt", 4096, 4096, 4096, "bf16", "V100-32GB") > 4 * seconds(
        "nt", 4096, 4096, 4096, "half", "V100-32GB"
    )


def test_a_model_that_is_one_unit_is_gathered_as_a_whole_and_hides_nothing() -> None:
    profile = make_language(blocks=8, width=2048, length=4096)
    parts, whole = (
        simulate(profile, A100, from_text("dp=8 zero=3 micro=1").replace(shard_as_one=whole)) for whole in (False, True)
    )
    assert whole.memory.buckets > 3 * parts.memory.buckets
    assert whole.memory.buckets > 2 * profile.elements
    assert parts.time.hidden > 0 == whole.time.hidden
    assert whole.time.step > parts.time.step


def convolutions(blocks: int = 8) -> Profile:
    """Blocks of one convolution each, whose outputs are what they keep."""
    plain = make_stack(blocks=blocks)
    one = replace(plain.operators[0], name="convolution", kind="convolution", module="blocks.*.up", dims=CONV)
    return replace(plain, operators=(one, *plain.operators[1:]))


def test_selective_and_compiled_keep_what_convolutions_give() -> None:
    assert summarize_profile(convolutions()).saved.products >= 64 * 1024 * 4
    block, selective, none = (
        simulate(convolutions(), A100, from_text(f"dp=8 micro=1 recompute={each}")).memory.activations
        for each in ("block", "selective", "none")
    )
    assert selective == pytest.approx(block + 8 * summarize_profile(convolutions()).saved.products)
    del none


def in_a_row(count: int) -> Profile:
    """Blocks whose layers stand in a list, one behind the other: alike, and no experts."""
    plain = with_experts(count)
    operators = [
        replace(each, dims=tuple(dim * count if dim.per_sample else dim for dim in each.dims))
        for each in plain.operators
    ]
    return replace(plain, operators=tuple(operators))


def stacked(count: int) -> Profile:
    """The same experts with one weight of three dims for each layer of all of them."""
    plain = make_stack(blocks=4, width=1024, batch=64, length=512)
    parameters = [
        ParameterProfile(name=each.name.replace(".weight", ""), shape=(count, *each.shape)) for each in plain.parameters
    ]
    operators = [
        replace(
            each,
            name=each.name.replace("addmm", "bmm").replace("mm", "mm").replace("bbmm", "bmm"),
            module="blocks.*",
            dims=(Amount(float(count)), each.dims[1] * (1 / count), each.dims[2], each.dims[3]),
        )
        for each in plain.operators
    ]
    return replace(plain, parameters=tuple(parameters), operators=tuple(operators))


def test_experts_see_few_rows_each_and_layers_in_a_row_see_all() -> None:
    assert summarize_profile(with_experts(16)).expert_count == 16
    assert summarize_profile(in_a_row(16)).expert_count == 0
    work = summarize_profile(stacked(8))
    assert (work.expert_count, work.expert_elements) == (8, 8 * 2 * 4 * 1024 * 1024)
    cluster = catalogue.parse_cluster("2x8xH100-80GB")
    with pytest.raises(PlanError, match="ep=2: the model has no experts"):
        simulate(in_a_row(16), cluster, from_text("dp=16 ep=2"))
    with pytest.raises(PlanError, match="ep=16: does not divide the 8 experts of a block"):
        simulate(stacked(8), cluster, from_text("dp=16 ep=16"))


@pytest.mark.parametrize("profile", [with_experts(64), stacked(64)], ids=["listed", "stacked"])
def test_ranks_of_ep_compute_fewer_experts_with_more_rows_each(profile: Profile) -> None:
    """Small products are slow: the same work in larger ones takes less."""
    cluster = catalogue.parse_cluster("8x8xH100-80GB")
    forward = [simulate(profile, cluster, from_text(f"dp=64 ep={ep}")).time.forward for ep in (1, 8, 64)]
    assert forward[0] > 1.2 * forward[2]
    assert forward[0] >= forward[1] >= forward[2]


def test_a_scope_divides_experts_over_those_that_have_the_same() -> None:
    work = summarize_profile(with_experts(16))
    plan = from_text("dp=16 ep=4 zero=3")
    shards = [
        lay_out_plan(work, 64, plan, TrainingStack(shard_group_size=scope)).shard_elements(0) for scope in (None, 4)
    ]
    assert shards[0] == pytest.approx(16 * shards[1] / 16)
    # Four ranks have the same four experts each, and no scope is smaller than that.
    assert shards[1] == pytest.approx(work.expert_elements * 4 / 4 / 4)
    axes = [rank_memories(lay_out_plan(work, 64, from_text(f"dp=16 ep={ep}")))[0].axes for ep in (1, 4)]
    assert axes == [1, 2]


def held(text: str, stack: TrainingStack) -> tuple[float, float]:
    memory = simulate(make_language(blocks=4), A100, from_text(text), stack=stack).memory
    return memory.parameters, memory.optimizer


def test_zero_of_one_rank_holds_what_no_zero_holds() -> None:
    for stack in (TrainingStack(master_weights=True), TrainingStack()):
        assert held("zero=0", stack) == held("zero=1", stack)


def test_shards_lie_beside_what_was_gathered_from_them() -> None:
    apart, beside = (held("dp=2 zero=1", TrainingStack(keeps_shards=each))[0] for each in (False, True))
    assert beside == pytest.approx(1.5 * apart)


def test_sequence_parallelism_gathers_once_more_in_backward() -> None:
    profile = make_stack(blocks=8, width=2048, batch=16, length=2048)
    node = A100.nodes[0]
    assert node.wire is not None
    slow = replace(A100, nodes=(replace(node, wire=replace(node.wire, rate=node.wire.rate / 100)),))

    def said(plan: Plan) -> float:
        return simulate(profile, slow, plan).time.exchange

    plain = from_text("tp=8")
    assert said(plain.replace(sequence=True)) > 1.15 * said(plain)
