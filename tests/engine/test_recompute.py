"""Blocks that are computed again give the same numbers under every plan, and hold as much less as the forecast says."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.engine.activation_checkpoint import checkpoint_activations
from echelon.engine.run import Run
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan, Recompute
from echelon.plan.text import from_text
from echelon.profiler import profile
from echelon.simulator import simulate
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.recompute_jobs import JOBS, careless, gpt, peak, trained
from tests.sampling import pairs, some
from tests.simulator.cases import make_cluster

ALONE = World()


@cache
def alone(name: str) -> dict[str, Any]:
    return trained(ALONE, name, Plan().to_json())


def again(ranks: RankPool, name: str, text: str, what: str = "block") -> dict[str, Any]:
    plan = complete(from_text(f"{text} recompute={what}"), JOBS[name]())
    found: dict[str, Any] = ranks.run(plan.ranks, trained, name, plan.to_json())[0]
    return found


def apart(found: dict[str, Any], true: dict[str, Any]) -> float:
    """The largest relative difference."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], true["losses"], strict=True))
    for kind in ("parameters", "buffers"):
        assert found[kind].keys() == true[kind].keys()
        for name, value in true[kind].items():
            worst = max(worst, float((found[kind][name] - value).abs().max() / value.abs().max().clamp(min=1e-6)))
    return worst


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit by bit."""
    kinds = ("parameters", "buffers")
    equal = [torch.equal(value, other[kind][name]) for kind in kinds for name, value in one[kind].items()]
    return one["losses"] == other["losses"] and all(equal)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["block", "selective"])
@pytest.mark.parametrize("text", ["dp=1 micro=2", "pp=2 micro=2"])
def test_buffers_that_a_block_reads_and_changes_are_those_of_its_first_forward(
    ranks: RankPool, text: str, what: str
) -> None:
    assert same(again(ranks, "moving", text, what), again(ranks, "moving", text, "none"))


@pytest.mark.parametrize("what", ["block", "selective"])
def test_a_buffer_that_the_first_forward_makes_is_not_there_in_the_second(ranks: RankPool, what: str) -> None:
    assert same(again(ranks, "making", "dp=1", what), alone("making"))


def test_a_copy_of_the_model_computes_with_its_own_weights_and_closing_leaves_nothing_behind() -> None:
    model = careless().model()  # type: ignore[operator]
    run = Run(replace(careless(), model=model), Plan(recompute="block"), ALONE)
    copied, x = copy.deepcopy(run.model), torch.ones(2, 16)
    before = copied(x)
    with torch.no_grad():
        for value in run.model.parameters():
            value.zero_()
    assert torch.equal(copied(x), before)
    run.close()
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    some("recompute", [
        "dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=2 micro=2", "dp=2 zero=3", "dp=2 zero=3 micro=2", "tp=2", "pp=2 micro=2",
        "pp=2 micro=2 schedule=gpipe", "pp=2 micro=2 schedule=interleaved",
    ], 4),
)  # fmt: skip
def test_the_numbers_are_the_same(ranks: RankPool, text: str) -> None:
    assert apart(again(ranks, "gpt", text), alone("gpt")) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", some("recompute bits", ["dp=1", "dp=1 micro=3", "dp=2", "dp=2 zero=3", "tp=2", "pp=2 micro=2"], 2)
)
def test_what_is_kept_of_a_block_does_not_change_a_bit(ranks: RankPool, text: str) -> None:
    kept, selected = (again(ranks, "cut heads", text, what) for what in ("none", "selective"))
    assert same(kept, selected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "what"),
    pairs(["dp=2 tp=2 zero=3", "dp=2 pp=2 zero=3 micro=2", "tp=2 pp=2 micro=2"], ["block", "selective"], each=1),
)
def test_the_numbers_are_the_same_in_combinations(ranks: RankPool, text: str, what: str) -> None:
    assert apart(again(ranks, "gpt", text, what), alone("gpt")) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("what", ["block", "selective"])
def test_batch_norms_count_a_batch_once(ranks: RankPool, what: str) -> None:
    assert apart(again(ranks, "resnet", "dp=1", what), alone("resnet")) < 1e-9
    assert apart(again(ranks, "resnet", "tp=2", what), alone("resnet")) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("what", ["block", "selective"])
@pytest.mark.parametrize("name", ["dropout", "attention dropout", "in place"])
def test_what_is_drawn_or_changed_in_place_is_the_same_the_second_time(name: str, what: Recompute) -> None:
    assert same(trained(ALONE, name, Plan(recompute=what).to_json()), alone(name))


@pytest.mark.slow
def test_memory_falls_as_forecast() -> None:
    job = gpt(layers=8, width=64, context=64, batch=16)
    cluster = make_cluster(cores=1)
    node = cluster.nodes[0]
    # Bytes as they are, without what an allocator adds.
    bare = replace(node.devices[0], block_padding=0.0, retained=0.0)
    cluster = replace(cluster, nodes=(replace(node, devices=(bare,)),))
    known = profile(job)
    found = {}
    for what in get_args(Recompute):
        memory = simulate(known, cluster, Plan(recompute=what)).memory
        found[what] = peak(ALONE, job, Plan(recompute=what))
        assert found[what] == pytest.approx(memory.activations + memory.temporary, rel=0.1), what
    assert found["block"] < 0.4 * found["none"]
    assert 1.3 * found["block"] < found["selective"] < 0.85 * found["none"]


@pytest.mark.parametrize("what", ["block", "selective"])
def test_the_second_forward_runs_under_the_modes_of_the_first(what: Any) -> None:
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})) * 2 if func is torch.tanh else func(*args, **(kwargs or {}))

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x).square()

    found = []
    for how in ("none", what):
        block, x = Block(), torch.ones(3, dtype=torch.float64, requires_grad=True)
        checkpoint_activations([block], how)
        with Doubled():
            block(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
