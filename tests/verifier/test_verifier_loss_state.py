"""Plans under which the loss reads state that ranks or micro-batches keep otherwise are refused; logs and caches are not."""

from __future__ import annotations

import pytest

from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.verifier.loss_memory import proved

APART = "data ranks hold different values"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "place"),
    [
        ("elr", "dp=2", "memory of loss="),
        ("elr", "dp=2 zero=3 whole", "memory of loss="),
        ("prior", "dp=2 micro=2", "PRIOR of loss="),
        ("inputs", "dp=2", "seen of inputs="),
    ],
)
def test_memory_of_samples_that_ranks_hold_apart_is_refused(ranks: RankPool, name: str, plan: str, place: str) -> None:
    """The first steps agree: every rank reads what it wrote itself until the next epoch."""
    (found, other) = ranks.run(2, proved, name, plan)
    assert found == other
    assert found.startswith(f"{place} (step "), found
    assert APART in found


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2 shares=3:1", "dp=2 zero=2 whole", "pp=2 micro=2"])
@pytest.mark.parametrize("name", ["log", "mask", "features"])
def test_state_that_no_call_reads_from_another_rank_is_no_reason(ranks: RankPool, name: str, plan: str) -> None:
    if name != "log" and plan.startswith("pp"):
        pytest.skip("stages are found with other sizes, and the loss reads features of another stage")
    assert ranks.run(2, proved, name, plan) == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "right"), [("elr", True), ("prior", True), ("log", True), ("ranked", False)])
def test_micro_batches_leave_what_the_whole_batch_leaves(name: str, right: bool) -> None:
    found = proved(World(), name, "dp=1 micro=2")
    assert (not found) == right, found
    assert right or "relative of loss=" in found
