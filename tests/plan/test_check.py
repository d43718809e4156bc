"""Every reason why a plan cannot be executed comes at once, with where, what, why and what instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from echelon.errors import PlanError
from echelon.plan import catalogue
from echelon.plan.check import check, require_executable
from echelon.plan.cluster import Cluster, Device, Node, RateCurve, RatePoint
from echelon.plan.describe import describe_plan
from echelon.plan.placement import Placement, ReplicatedModule, TensorSlice
from echelon.plan.plan import Plan
from echelon.plan.profile import Amount, MemorySnapshot, ParameterProfile, PipelineUnit, Profile
from echelon.plan.text import from_text
from tests.plan.strategies import plans

PROFILE = Profile(
    model="m" * 64, name="job", batch=16, precision="fp32", device="cpu", parameters=(ParameterProfile(name="w", shape=(4, 4)),),
    modules=(), operators=(), moments=(MemorySnapshot(module="", phase="forward", alive=Amount(), saved=Amount(), gradients=0.0),),
    optimizers=(), samples=100,
)  # fmt: skip


def machine(kind: str, count: int) -> Cluster:
    curve = RateCurve(operation="matmul", points=(RatePoint((64.0, 64.0, 64.0), 1e9),))
    device = Device(kind=kind, name=kind, memory=2**30, cores=count, curves=(curve,))  # type: ignore[arg-type]
    devices = (device,) if kind == "cpu" else (device,) * count
    return Cluster(name="here", nodes=(Node(name="n", cores=count, memory=2**30, devices=devices),), versions={})


@pytest.mark.parametrize(
    ("plan", "path", "words"),
    [
        ("cp=2", "cp", "the context axis is not executed yet; use dp instead"),
        ("ep=2 dp=2", "ep", "the expert axis is not executed yet"),
        ("pp=2", "pp", "the model cannot be cut into stages"),
        ("sequence", "sequence", "sequences are cut over tp, and tp is 1; use tp=2 or more, or leave `sequence` out"),
        (
            "tp=2 pp=2 sequence",
            "sequence",
            "pipeline stages pass full sequences; leave `sequence` out, or use pp=1",
        ),
        ("dp=2 zero=1 keep", "keep_gradients", "zero=1 keeps full gradients anyway"),
        ("dp=32", "dp", "a batch of 16 leaves some rank without a sample; use dp=16 or less"),
        ("dp=2 micro=9", "micro", "a rank's share of batch=16 over dp=2 is 8 samples; use micro=8 or less"),
        ("dp=8", "dp", "the last batch of an epoch has 4 of 100 samples; use dp=4 or less"),
    ],
)
def test_each_problem_is_named(plan: str, path: str, words: str) -> None:
    found = [problem for problem in check(from_text(plan), PROFILE) if problem.path == path]
    assert words in str(found[0])
    with pytest.raises(PlanError, match="cannot be executed") as caught:
        require_executable(from_text(plan), PROFILE)
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
    coupled = replace(PROFILE, samples_coupled=True, samples=0)
    for text, path in (("dp=2", "dp"), ("micro=8", "micro"), ("dp=2 micro=4", "dp")):
        (problem,) = check(from_text(text), coupled)
        assert (problem.path, problem.severity) == (path, "error")
        assert "a sample's loss depends on the others of its batch" in str(problem)
        assert "use dp=1 without micro; or return the loss as (sum, count)" in str(problem)
        assert check(from_text(text), replace(coupled, samples_coupled=False, batch_norms=("1",))) == ()
    for text in ("dp=1", "micro=16"):
        assert check(from_text(text), coupled) == ()


def test_a_batch_whose_samples_may_see_each_other_is_parted_with_a_warning() -> None:
    unknown = replace(PROFILE, samples_coupled=None, coupling_unknown_reason="the model is too large", samples=0)
    for text, path in (("dp=2", "dp"), ("micro=8", "micro")):
        (problem,) = check(from_text(text), unknown)
        assert (problem.path, problem.severity) == (path, "warning")
        assert "as in contrastive losses, is unknown: the model is too large" in str(problem)
    assert check(from_text("micro=16"), unknown) == ()
    with pytest.raises(ValueError, match="contradict"):
        replace(PROFILE, samples_coupled=None)


def test_untraced_models_are_sharded_whole() -> None:
    untraced = replace(
        PROFILE, varying_blocks_reason="the model could not be traced: if its samples decide which blocks run"
    )
    assert "if its samples decide which blocks run, sharding block by block would fail or deadlock; add `whole`" in str(
        check(from_text("dp=2 zero=3"), untraced)[0]
    )
    assert check(from_text("dp=2 zero=3 whole"), untraced) == ()


@given(plans)
def test_a_check_never_fails_and_says_something_for_other_axes(plan: Plan) -> None:
    problems = check(plan, PROFILE, machine("cpu", 2))
    others = [axis for axis in ("pp", "cp", "ep") if getattr(plan.mesh, axis) > 1]
    assert set(others) <= {problem.path for problem in problems}


def test_a_batch_of_more_than_there_is_is_a_warning() -> None:
    (problem,) = check(Plan(), replace(PROFILE, batch=1000, samples=40))
    assert problem.severity == "warning"
    assert str(problem).startswith("batch_size=1000: the data set has 40 samples: each step takes all of them")
    assert check(Plan(), replace(PROFILE, batch=40, samples=40)) == ()
    assert check(Plan(), replace(PROFILE, batch=1000, samples=0)) == ()  # a stream


STAGED = replace(PROFILE, samples=0, pipeline_units=tuple(PipelineUnit(path=f"blocks.{i}", cost=1.0) for i in range(5)))


def refused(plan: Plan, profile: Profile | None = None) -> list[str]:
    return [str(problem) for problem in check(plan, profile) if problem.severity == "error"]


def test_a_plan_that_is_still_to_be_completed_may_pass() -> None:
    assert refused(from_text("dp=2 tp=2 pp=2 zero=1 micro=1"), STAGED) == []


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("pp=6", "pp=6: 6 stages, and the model has 5 units that forward calls in sequence; use pp=5 or less, or dp=6 zero=3"),
        ("pp=3 schedule=interleaved", "6 stages, and the model has 5 units that forward calls in sequence; use schedule=1f1b"),
        ("dp=2 pp=2 zero=1 schedule=zero-bubble", "use schedule=interleaved, or zero=0"),
        ("pp=2 schedule=zero-bubble recompute=block", "use schedule=interleaved, or leave `recompute` out"),
        ("pp=2 compile", "leave `compile` out, or use pp=1"),
    ],
)  # fmt: skip
def test_pipelines_that_cannot_be(plan: str, words: str) -> None:
    (problem,) = refused(from_text(plan), STAGED)
    assert words in problem


def test_few_micro_batches_leave_a_pipeline_empty() -> None:
    (problem,) = check(from_text("pp=4"), STAGED)
    assert problem.severity == "warning"
    assert "1 micro-batch for 4 stages: ranks idle" in str(problem)
    assert "None" not in str(problem)
    assert "use micro=2" in str(problem)
    assert check(from_text("pp=4 micro=2"), STAGED) == ()
    assert check(from_text("pp=4 micro=3"), STAGED) == ()  # micro-batches need not divide the batch


@pytest.mark.parametrize(
    ("plan", "stages", "words"),
    [
        ("pp=2", (1, 2), "they make 3 stages, and schedule=1f1b needs one per rank of pp=2; give 1 stage starts"),
        ("pp=2 schedule=interleaved", (1, 2), "needs a multiple of pp=2; give 1 stage starts, or 3"),
        ("pp=3", (2, 2), "stage starts must ascend"),
        ("pp=2", (5,), "the model has 5 units, and each stage needs one"),
        ("dp=2", (2,), "stages are spread over pp, and pp is 1; use pp=2"),
    ],
)
def test_stages_that_cannot_be(plan: str, stages: tuple[int, ...], words: str) -> None:
    assert any(words in problem for problem in refused(from_text(plan).replace(stages=stages), STAGED))


def test_no_stage_of_a_document_begins_within_a_pair() -> None:
    cut = (Placement(path="blocks.1.up", cut="column"), Placement(path="blocks.2.down", cut="row"))
    plan = from_text("tp=2 pp=2 micro=4").replace(placements=cut)
    words = "one starts at blocks.2, inside a pair that tp cuts"
    assert any(words in each for each in refused(plan.replace(stages=(2,)), STAGED))
    assert not any("one starts at" in each for each in refused(plan.replace(stages=(3,)), STAGED))


def test_a_tensor_axis_that_divides_nothing_says_why_and_what_instead() -> None:
    (problem,) = refused(
        from_text("tp=7").replace(replicated=(ReplicatedModule(path="up", reason="3 outputs are too few for 7 ranks"),))
    )
    assert problem == (
        "tp=7: no module of this model can be cut (up: 3 outputs are too few for 7 ranks); use a smaller tp, or dp=7 zero=3, which also "
        "shares the memory"
    )


def test_cuts_of_another_model_name_the_module_and_the_model() -> None:
    wanted = from_text("tp=2").replace(
        placements=(Placement(path="blocks.0.up", cut="gather", slices=(TensorSlice("weight", 0),)),)
    )
    (problem,) = refused(wanted, STAGED)
    assert "placements=blocks.0.up: job (model mmmmmmmmmmmm) has no such module" in problem


def test_a_tensor_axis_that_cuts_little_is_a_warning() -> None:
    large = replace(
        STAGED,
        parameters=(ParameterProfile(name="a.weight", shape=(2, 2)), ParameterProfile(name="b.weight", shape=(99, 9))),
    )
    (problem,) = check(
        from_text("tp=2").replace(placements=(Placement(path="a", cut="gather", slices=(TensorSlice("weight", 0),)),)),
        large,
    )
    assert problem.severity == "warning"
    assert "only 0% of the parameters' bytes are cut" in str(problem)


def test_ranks_of_other_axes_count_as_devices() -> None:
    found = [
        str(each) for each in check(from_text("dp=2 tp=2"), STAGED, machine("cuda", 2)) if each.severity == "error"
    ]
    assert found == ["ranks=4: the plan needs 4 devices and there are 2; use axes whose product is 2 or less"]


def test_recomputation_needs_blocks_and_no_compiler() -> None:
    assert "leave one of `recompute` and `compile` out" in refused(from_text("recompute=block compile"))[0]
    (problem,) = check(from_text("recompute=block"), STAGED)
    assert (problem.severity, problem.path) == ("warning", "recompute")
    assert "no repeated blocks" in str(problem)


def test_shares_too_far_apart_for_a_micro_batch_are_refused_and_told_as_they_are() -> None:
    plan, profile = from_text("dp=2 shares=9:1 micro=1"), replace(PROFILE, batch=20)
    (problem,) = check(plan, profile)
    assert str(problem).startswith("micro=1: the smallest share of batch=20 makes 2 micro-batches")
    assert "use micro=9" in str(problem)
    assert not check(replace(plan, micro=9), profile)
    assert "of up to 9 samples per rank" in describe_plan(plan, batch=20)


def test_bf16_on_devices_without_units_for_it_is_warned_of() -> None:
    plan = from_text("dp=8 precision=bf16")
    (told,) = [each for each in check(plan, None, catalogue.parse_cluster("8xV100-32GB")) if each.path == "precision"]
    assert told.severity == "warning"
    assert "V100-32GB has no bf16 matrix units: products take 8 times as long as in fp16" in str(told)
    assert not check(plan, None, catalogue.parse_cluster("8xA100-80GB"))
    assert not check(from_text("precision=bf16"), None, catalogue.parse_cluster("XEON-8480"))
    assert check(from_text("precision=bf16"), None, catalogue.parse_cluster("XEON-8380"))


def test_experts_are_shared_evenly() -> None:
    names = [f"blocks.{b}.experts.{e}.weight" for b in range(2) for e in range(6)]
    profile = replace(
        PROFILE,
        parameters=tuple(ParameterProfile(name=name, shape=(4, 4)) for name in names),
        fsdp_units=("blocks.0", "blocks.1"),
        fsdp_unit_bytes=(1, 1),
    )
    said = [
        str(each) for each in check(from_text("dp=8 ep=4"), profile) if not each.not_implemented and each.path == "ep"
    ]
    assert said == ["ep=4: 6 experts per block cannot be divided evenly; use a divisor of 6"]
    assert not [
        each for each in check(from_text("dp=6 ep=3"), profile) if not each.not_implemented and each.path == "ep"
    ]
