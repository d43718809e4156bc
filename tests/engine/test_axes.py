"""A step under any combination of axes is the step of one process, and what one plan saved any other loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import evaluated, resumed, saved, trained
from tests.sampling import one_of_each, pairs, some

BOUND = 1e-9
AXES = [
    "tp=2",
    "pp=2 micro=2",
    "dp=2 tp=2",
    "dp=2 tp=2 zero=1 micro=3",
    "dp=2 tp=2 zero=3",
    "dp=2 pp=2 micro=2",
    "dp=2 pp=2 zero=1 micro=2",
    "dp=2 pp=2 zero=3 micro=2",
    "tp=2 pp=2 micro=3",
]
NAMES = ["tokens", "tied", "clip", "two", "groups", "schedule", "lora"]
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    if not left:
        return 0.0  # plain SGD keeps nothing
    scale = max(value.abs().max().item() for value in left.values())
    return max((left[name] - right[name]).abs().max().item() for name in left) / scale


def axes(plan: str) -> tuple[int, ...]:
    """Which axes a plan has, and whether it shards over the data axis."""
    parsed = from_text(plan)
    return (parsed.mesh.dp > 1, parsed.mesh.tp > 1, parsed.mesh.pp > 1, parsed.zero > 0)


@pytest.fixture(scope="module")
def alone() -> Any:
    known: dict[str, dict[str, Any]] = {}

    def get(name: str) -> dict[str, Any]:
        if name not in known:
            known[name] = trained(World(), name, "dp=1")
        return known[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "name"), pairs(AXES, NAMES, each=1, table="axes"))
def test_every_combination_of_axes_is_one_device(ranks: RankPool, alone: Any, name: str, plan: str) -> None:
    one, many = alone(name), ranks.run(from_text(plan).ranks, "tests.engine.jobs:trained", name, plan)
    assert many[0]["losses"] == pytest.approx(one["losses"], rel=BOUND)
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND
    assert difference(one["optimizer"], many[0]["optimizer"]) < BOUND
    assert many[0]["rates"] == one["rates"]
    # Every rank reports the one true value.
    assert all(rank["losses"] == many[0]["losses"] for rank in many)


SCHEDULED = [
    # As many micro-batches as there are stages: with fewer another schedule takes its place.
    "dp=2 pp=2 micro=1 schedule=zero-bubble",
    "dp=2 pp=2 zero=1 micro=1 schedule=interleaved",
    "dp=2 pp=2 zero=3 micro=1 schedule=gpipe",
    "tp=2 pp=2 micro=2 schedule=zero-bubble",
    "tp=2 pp=2 micro=2 schedule=interleaved",
]


@pytest.mark.journey
@pytest.mark.parametrize(
    "plan",
    [
        *(f"pp=2 micro=2 schedule={schedule}" for schedule in SCHEDULES),
        *one_of_each("schedules with axes", SCHEDULED, axes),
    ],
)
def test_every_schedule_is_one_device(ranks: RankPool, alone: Any, plan: str) -> None:
    one, many = alone("tied"), ranks.run(from_text(plan).ranks, "tests.engine.jobs:trained", "tied", plan)
    assert many[0]["losses"] == pytest.approx(one["losses"], rel=BOUND)
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["pp=4 micro=2", "dp=2 pp=3 zero=1 micro=2"])
def test_a_tied_weight_stays_one_though_stages_between_do_not_hold_it(ranks: RankPool, alone: Any, plan: str) -> None:
    one, many = alone("tied"), ranks.run(from_text(plan).ranks, "tests.engine.jobs:trained", "tied", plan)
    assert many[0]["losses"] == pytest.approx(one["losses"], rel=BOUND)
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", some("between", ["pp=2 micro=2", "pp=3 micro=2", "dp=2 pp=2 zero=1 micro=2", "dp=2 pp=2 zero=3 micro=2"], 2)
)
def test_a_weight_that_is_used_between_units_is_where_it_is_used(ranks: RankPool, alone: Any, plan: str) -> None:
    one, many = alone("borrowed"), ranks.run(from_text(plan).ranks, "tests.engine.jobs:trained", "borrowed", plan)
    assert many[0]["losses"] == pytest.approx(one["losses"], rel=BOUND)
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_")  # a processor without such instructions
@pytest.mark.parametrize(
    ("plan", "precision"),
    some(
        "half",
        [
            ("tp=2", "bf16"),
            ("pp=2 micro=2", "fp16"),
            ("dp=2 tp=2 zero=3", "fp16"),
            ("dp=2 pp=2 zero=1 micro=2", "bf16"),
        ],
        2,
    ),
)
def test_half_precision_stays_near_one_device(ranks: RankPool, plan: str, precision: str) -> None:
    one = trained(World(), "tokens", f"precision={precision}", double=False)
    count, text = from_text(plan).ranks, f"{plan} precision={precision}"
    many = ranks.run(count, "tests.engine.jobs:trained", "tokens", text, double=False)
    assert many[0]["losses"] == pytest.approx(one["losses"], rel=0.01)
    assert all(rank["losses"] == many[0]["losses"] for rank in many)
    # The steps' changes are seen above the rounding.
    start = trained(World(), "tokens", "precision=fp32", double=False, steps=0)["parameters"]
    moved = max((one["parameters"][name] - value).abs().max().item() for name, value in start.items())
    apart = max((many[0]["parameters"][name] - one["parameters"][name]).abs().max().item() for name in start)
    assert apart < 0.5 * moved


@pytest.mark.slow
@pytest.mark.parametrize("plan", some("norms", ["dp=2 tp=2", "dp=2 pp=2", "dp=2 tp=2 pp=2", "dp=2 pp=2 zero=3"], 2))
def test_batch_norm_is_synchronised_over_the_data_axis_alone(ranks: RankPool, alone: Any, plan: str) -> None:
    count, text = from_text(plan).ranks, f"{plan} batchnorm=sync"
    one, many = alone("norm"), ranks.run(count, "tests.engine.jobs:trained", "norm", text)
    assert difference(one["buffers"], many[0]["buffers"]) < BOUND
    assert difference(one["parameters"], many[0]["parameters"]) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("plan", some("evaluated", ["tp=2", "pp=2 micro=2", "tp=2 pp=2", "dp=2 pp=2 micro=2"], 2))
def test_evaluation_is_the_same_on_every_rank(ranks: RankPool, plan: str) -> None:
    one = evaluated(World(), "tokens", "dp=1")
    for found in ranks.run(from_text(plan).ranks, "tests.engine.jobs:evaluated", "tokens", plan):
        assert found == pytest.approx(one, rel=BOUND)


PASSED_ON = [
    ("tp=2", "dp=1"),
    ("pp=2 micro=2", "dp=1"),
    ("dp=2 tp=2 zero=3", "dp=1"),
    ("dp=2 pp=2 zero=1 micro=2", "tp=2"),
    ("dp=1", "tp=2 pp=2 micro=2"),
    ("tp=2 pp=2 micro=2", "dp=3 zero=2"),
    ("dp=2 tp=2 zero=2", "pp=2 micro=2"),
]


def direction(row: tuple[str, str]) -> tuple[bool, bool, bool]:
    """Whole to parts, parts of tensors or of layers to the whole, or from one cut to another."""
    writer, reader = row
    return writer == "dp=1", reader == "dp=1", reader == "dp=1" and "tp" in writer


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), one_of_each("passed on", PASSED_ON, direction))
def test_what_one_plan_saved_another_loads_exactly(ranks: RankPool, tmp_path: Path, writer: str, reader: str) -> None:
    def call(plan: str, function: str, *arguments: Any) -> Any:
        count = from_text(plan).ranks
        if count == 1:
            return {"saved": saved, "resumed": resumed}[function](World(), "tied", plan, *arguments)
        return ranks.run(count, f"tests.engine.jobs:{function}", "tied", plan, *arguments)[0]

    folder = str(tmp_path / "here")
    call(writer, "saved", folder, 2)
    same, other = call(writer, "resumed", folder), call(reader, "resumed", folder)
    for kind in ("parameters", "buffers", "optimizer"):
        mine, theirs = getattr(same["first"], kind), getattr(other["first"], kind)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert other["losses"] == pytest.approx(same["losses"], rel=1e-4)
