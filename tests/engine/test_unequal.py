"""Losses that average over unequal counts train as on whole batches, on any number of ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine import unequal
from tests.sampling import some


def _differs(found: Any, name: str) -> str:
    if isinstance(found, str):
        return found
    expected = unequal.by_hand(name)
    worst = max(abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True))
    for key, value in expected["parameters"].items():
        worst = max(worst, float((found["parameters"][key] - value).abs().max()))
    return "" if worst < 1e-12 else f"{worst:.1e}"


#: With local batch norm the reference is the same micro-batches, not the whole batch.
EXACT = [name for name in unequal.JOBS if name != "batch norm"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_micro_batches_train_as_the_whole_batch(name: str) -> None:
    found = unequal.trained(World(), [name], "dp=1 micro=3")[name]
    assert not _differs(found, name)


@pytest.mark.slow
@pytest.mark.parametrize("plan", some("unequal", ["dp=2", "dp=2 zero=3 micro=3", "tp=2 micro=5", "pp=2 micro=4"], 1))
def test_ranks_train_as_the_whole_batch(ranks: RankPool, plan: str) -> None:
    found = ranks.run(2, "tests.engine.unequal:trained", EXACT, plan)[0]
    assert {name: _differs(found[name], name) for name in EXACT} == dict.fromkeys(EXACT, "")


#: What no single weight makes right, with what is said of it.
REFUSED = {
    "many tasks": "no single weight per rank or micro-batch gives the loss of the whole batch",
    "two counts": "the loss adds up averages over unequal counts, nllloss over",
    "a factor of its own": "the loss is not a mean over samples: its weight per sample changes from part to part, mean divided by",
    "a term on some parts": "the loss adds up different averages on different parts of the batch",
}


@pytest.mark.parametrize("name", REFUSED)
def test_averages_that_no_weight_makes_right_are_refused(name: str) -> None:
    found = unequal.trained(World(), [name], "dp=1 micro=3", jobs=unequal.REFUSED)[name]
    assert found.startswith("DivergenceError")
    assert REFUSED[name] in found
