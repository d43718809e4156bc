"""The short form goes both ways, and a typing error is answered with what was meant."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from echelon.errors import PlanError
from echelon.plan.describe import describe_plan, diff_plans
from echelon.plan.mesh import Mesh
from echelon.plan.placement import Placement
from echelon.plan.plan import Plan
from echelon.plan.sequence_segment import SequenceSegment
from echelon.plan.text import from_text
from tests.plan.strategies import plans


@given(plans)
def test_round_trip(plan: Plan) -> None:
    assert from_text(str(plan)) == plan


@given(plans, plans)
def test_equal_plans_differ_in_nothing(left: Plan, right: Plan) -> None:
    assert diff_plans(left, left) == []
    assert bool(diff_plans(left, right)) == (left != right)


def test_as_people_write_it() -> None:
    plan = from_text("dp=2, zero=3  micro=8")
    assert (plan.mesh, plan.zero, plan.micro) == (Mesh(dp=2), 3, 8)
    assert str(plan) == "dp=2 zero=3 micro=8"
    assert from_text("") == Plan()
    assert str(Plan()) == "dp=1"
    assert str(Plan(precision="fp32")) == "dp=1 precision=fp32"  # else the job's own precision would be taken
    assert diff_plans(plan, replace(plan, zero=1)) == ["zero: 3 -> 1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=two", "dp='two' is not an integer"),
        ("zero=4", "zero=4: a ZeRO stage is 0, 1, 2 or 3"),
        ("dp=0", "dp=0: the size of an axis is an integer of at least 1"),
        ("micr=8", "did you mean micro?"),
        ("precision=int3", "is not one of fp32, tf32, bf16, fp16"),
        ("dp=2 dp=4", "dp is given twice"),
        ("compile=1", "'compile=1' is not part of a plan"),
        ("frobnicate", "a plan is made of dp=2"),
        ("dp = 2", "dp needs a number: dp=2, without spaces"),
        ("zero=3 dp", "dp needs a number: dp=2, without spaces"),
        ("micro=", "micro needs a number: micro=1, without spaces"),
        ("precision", "precision needs one of fp32, tf32, bf16, fp16, fp8: precision=fp32, without spaces"),
        ("DP=2", "'DP=2' is not part of a plan; did you mean dp?"),
        ("=2", "'=2' is not part of a plan"),
        ("dp=²", "dp='²' is not an integer"),
    ],
)
def test_wrong_text_is_answered(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message.replace("?", r"\?")):
        from_text(text)


def test_in_words() -> None:
    words = describe_plan(from_text("dp=4 zero=3 micro=2 threads=1 batchnorm=sync"), batch=64)
    assert "4 ranks" in words
    assert "a batch of 64: 8 micro-batches of up to 2 samples per rank" in words
    assert "batch-norm statistics are taken over all ranks" in words
    assert "micro-batches of 1 sample per rank" in describe_plan(from_text("micro=1"))
    assert "a batch of 16 cannot feed 17 data ranks" in describe_plan(from_text("dp=17"), batch=16)
    assert describe_plan(Plan()).startswith("one process")
    assert "computes in the precision of the job" in describe_plan(Plan())
    assert "computes in bf16" in describe_plan(Plan(precision="bf16"))


def test_ranks_of_other_axes_have_no_samples_of_their_own() -> None:
    assert describe_plan(from_text("dp=2")).startswith("2 ranks, each with its own samples\n")
    assert describe_plan(from_text("tp=2")).startswith(
        "2 ranks, all with the same samples\ntp=2: modules are cut into 2 shards"
    )
    segment = SequenceSegment(
        blocks=("h.0", "h.1", "h.2"), argument="0", dim=1, gathers=(), uses_rng=False, partial_gradients=()
    )
    parted = from_text("tp=2 sequence").replace(segments=(segment,))
    assert "sequence parallelism between the cut modules of h.0-2" in describe_plan(parted)
    assert describe_plan(from_text("dp=3 tp=2")).startswith("6 ranks, groups of 2 with the same samples\ntp=2: ")
    assert "every rank holds the whole model" not in describe_plan(from_text("tp=2"))


def test_a_pipeline_in_words() -> None:
    assert "pp=2: 2 stages, schedule gpipe" in describe_plan(from_text("pp=2 schedule=gpipe"))
    assert "pp=2: 4 stages, 2 per rank" in describe_plan(from_text("pp=2 schedule=interleaved"))


def test_cuts_differ_by_their_number() -> None:
    left = from_text("tp=2 pp=2")
    right = left.replace(placements=(Placement(path="a", cut="row"), Placement(path="b", cut="row")), stages=(3,))
    assert diff_plans(left, right) == ["placements: [] -> 2 modules", "stages: [] -> [3]"]
