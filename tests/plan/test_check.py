"""Every reason why a plan cannot be executed comes at once, with where, what, why and what instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from echelon.errors import PlanError
from echelon.plan.check import check, require
from echelon.plan.cluster import Cluster, Curve, Device, Node, Point
from echelon.plan.plan import Plan
from echelon.plan.profile import Amount, Moment, Parameter, Profile
from echelon.plan.text import from_text
from tests.plan.strategies import plans

PROFILE = Profile(
    model="m" * 64, name="job", batch=16, precision="fp32", device="cpu", parameters=(Parameter(name="w", shape=(4, 4)),),
    modules=(), operators=(), moments=(Moment(where="", phase="forward", alive=Amount(), kept=Amount(), gradients=0.0),),
    optimizers=(), samples=100,
)  # fmt: skip


def machine(kind: str, count: int) -> Cluster:
    curve = Curve(operation="matmul", points=(Point((64.0, 64.0, 64.0), 1e9),))
    device = Device(kind=kind, name=kind, memory=2**30, cores=count, curves=(curve,))  # type: ignore[arg-type]
    devices = (device,) if kind == "cpu" else (device,) * count
    return Cluster(name="here", nodes=(Node(name="n", cores=count, memory=2**30, devices=devices),), versions={})


@pytest.mark.parametrize(
    ("plan", "path", "words"),
    [
        ("tp=2", "tp", "the tensor axis is not executed yet; use dp instead"),
        ("pp=2", "pp", "the pipeline axis is not executed yet"),
        ("dp=2 zero=1 keep", "keep_gradients", "zero=1 keeps full gradients as it is"),
        ("dp=32", "dp", "a batch of 16 gives some rank no sample; use dp=16 or less"),
        ("dp=2 micro=9", "micro", "a rank's share of batch=16 over dp=2 is 8 samples; use micro=8 or less"),
        ("dp=8", "dp", "the last batch of an epoch has 4 of 100 samples; use dp=4 or less"),
    ],
)
def test_each_problem_is_named(plan: str, path: str, words: str) -> None:
    found = [problem for problem in check(from_text(plan), PROFILE) if problem.path == path]
    assert words in str(found[0])
    with pytest.raises(PlanError, match="cannot be executed") as caught:
        require(from_text(plan), PROFILE)
    assert found[0] in caught.value.problems


def test_a_plan_of_another_model_names_both() -> None:
    (problem,) = check(Plan(model="x" * 64), PROFILE)
    assert "xxxxxxxxxxxx" in str(problem)
    assert "mmmmmmmmmmmm" in str(problem)


def test_more_ranks_than_devices() -> None:
    wide = replace(PROFILE, batch=64, samples=64)
    (problem,) = check(from_text("dp=4"), wide, machine("cuda", 2))
    assert "the plan needs 4 devices and there are 2; use dp=2 or less" in str(problem)
    (problem,) = check(from_text("dp=4"), wide, machine("cpu", 2))
    assert problem.severity == "warning"  # proves numbers, not speed
    (problem,) = check(from_text("dp=32 threads=1"), wide, machine("cpu", 2))
    assert problem.severity == "error"
    assert "32 devices and there are 2 cores" in str(problem)


def test_half_precision_without_instructions_is_a_warning() -> None:
    found = check(from_text("precision=bf16"), replace(PROFILE, precision="bf16"), machine("cpu", 2))
    assert [problem.severity for problem in found] == ["warning"]
    assert "no bf16 instructions" in str(found[0])


def test_a_plan_without_a_precision_takes_the_jobs() -> None:
    half = replace(PROFILE, precision="bf16")
    assert check(Plan(), half) == ()
    assert "this CPU has no bf16 instructions" in str(check(Plan(), half, machine("cpu", 2))[0])
    (problem,) = check(Plan(precision="fp32"), half)
    assert "the job asks for bf16" in str(problem)


def test_a_batch_whose_samples_see_each_other_is_not_parted() -> None:
    coupled = replace(PROFILE, coupled=True, samples=0)
    for text, path in (("dp=2", "dp"), ("micro=8", "micro"), ("dp=2 micro=4", "dp")):
        (problem,) = check(from_text(text), coupled)
        assert (problem.path, problem.severity) == (path, "error")
        assert "a sample's loss depends on the others of its batch" in str(problem)
        assert "use dp=1 without micro; or give the loss as (sum, count)" in str(problem)
        assert check(from_text(text), replace(coupled, coupled=False, norms=("1",))) == ()
    for text in ("dp=1", "micro=16"):
        assert check(from_text(text), coupled) == ()


def test_untraced_models_are_sharded_whole() -> None:
    untraced = replace(PROFILE, traced="real")
    assert "add `whole`" in str(check(from_text("dp=2 zero=3"), untraced)[0])
    assert check(from_text("dp=2 zero=3 whole"), untraced) == ()


@given(plans)
def test_a_check_never_fails_and_says_something_for_other_axes(plan: Plan) -> None:
    problems = check(plan, PROFILE, machine("cpu", 2))
    others = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(plan.mesh, axis) > 1]
    assert set(others) <= {problem.path for problem in problems}


def test_a_batch_of_more_than_there_is_is_a_warning() -> None:
    (problem,) = check(Plan(), replace(PROFILE, batch=1000, samples=40))
    assert problem.severity == "warning"
    assert str(problem).startswith("batch=1000: the data set has 40 samples: a step takes them all")
    assert check(Plan(), replace(PROFILE, batch=40, samples=40)) == ()
    assert check(Plan(), replace(PROFILE, batch=1000, samples=0)) == ()  # a stream
