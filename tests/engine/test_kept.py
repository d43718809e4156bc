"""State that calls change is kept as one device keeps it, on any number of ranks and micro-batches, or the run ends."""

from __future__ import annotations

import re
from typing import Any

import pytest

from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine import kept


def _differs(found: Any, name: str) -> str:
    if isinstance(found, str):
        return found
    expected = kept.by_hand(name)
    worst = {key: float((found[key].double() - value.double()).abs().max()) for key, value in expected.items()}
    return ", ".join(f"{key} {error:.1e}" for key, error in worst.items() if error > 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", kept.MODELS)
def test_micro_batches_keep_state_as_the_whole_batch_does(name: str) -> None:
    assert not _differs(kept.trained(World(), [name], "dp=1 micro=4")[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2 micro=3", "dp=2 shares=2:1"])
def test_ranks_keep_state_as_one_device_does(ranks: RankPool, plan: str) -> None:
    found = ranks.run(2, "tests.engine.kept:trained", list(kept.MODELS), plan)[0]
    assert {name: _differs(found[name], name) for name in kept.MODELS} == dict.fromkeys(kept.MODELS, "")


@pytest.mark.slow
@pytest.mark.parametrize("plan", kept.KEPT_LATE)
def test_state_that_begins_to_change_is_kept_or_ends_the_run(ranks: RankPool, plan: str) -> None:
    names = list(kept.LATE)
    found = ranks.run(int(plan[3]), "tests.engine.kept:trained", names, plan)[0]
    for name in names:
        if name in kept.KEPT_LATE[plan]:
            assert not _differs(found[name], name), name
        else:
            assert re.match(
                r"DivergenceError: (step \d: \S+ has changed for the first time, and .*; declare its rule|forward writes to parameter teacher)",
                found[name],
            ), (name, found[name])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=1 micro=1", "dp=2 micro=1"])
def test_micro_batches_of_one_sample_keep_state(ranks: RankPool, plan: str) -> None:
    found = ranks.run(int(plan[3]), "tests.engine.kept:trained", list(kept.MODELS), plan)[0]
    assert {name: _differs(found[name], name) for name in kept.MODELS} == dict.fromkeys(kept.MODELS, "")


@pytest.mark.parametrize("name", kept.REFUSED)
def test_state_without_a_rule_ends_the_run(name: str) -> None:
    found = kept.trained(World(), [name], "dp=1 micro=4")[name]
    assert found.startswith("UnshardableStateError: buffer state: ")


def test_a_rule_that_changes_is_named() -> None:
    found = kept.trained(World(), ["sum then mean"], "dp=1 micro=4")["sum then mean"]
    assert "was the sum of what calls leave for its parts at first, and is the mean now" in found
    assert "buffer_reductions = {'state': 'mean'}" in found


def test_ranks_do_not_average_state_without_a_rule(ranks: RankPool) -> None:
    for found in ranks.run(2, "tests.engine.kept:trained", list(kept.REFUSED), "dp=2"):
        assert all(found[name].startswith("UnshardableStateError: buffer state: ") for name in kept.REFUSED), found
