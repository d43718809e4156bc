"""What a rank holds of the training state, as `python -m bench.memory` measures it."""

from __future__ import annotations

import pytest

from bench.memory import CUT, LIMIT, _states, hold
from bench.workloads import WORKLOADS
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from tests.sampling import only_whole


@only_whole  # `python -m bench.memory` measures it
def test_fully_sharded_the_largest_rank_holds_a_quarter(ranks: RankPool) -> None:
    alone = ranks.run(1, hold, "gpt", Plan())[0]
    plans = (from_text("dp=4"), from_text("dp=4 zero=3"))
    replicated, sharded = (max(held["state"] for held in ranks.run(4, hold, "gpt", plan)) for plan in plans)
    assert (
        alone["state"] == 16 * alone["parameters"] // 4 + 4 * _parameters()
    )  # AdamW: two moments and a step count each
    assert replicated >= alone["state"]
    assert sharded <= LIMIT * alone["state"] / 4


@only_whole  # in CI tests/engine/test_pipeline.py holds what ranks have
@pytest.mark.parametrize("plan", ["tp=2", "pp=2 micro=2"])
def test_cut_over_tp_or_pp_the_largest_rank_holds_half(ranks: RankPool, plan: str) -> None:
    alone, cut = _states(ranks, CUT, [plan])
    assert (alone.limit, cut.limit) == (None, LIMIT)
    assert cut.detail is not None
    assert alone.detail is not None
    for part in ("parameters", "state"):
        assert cut.detail[part] <= LIMIT * alone.detail[part] / 2, cut.text
        assert cut.detail[part] >= 0.95 * alone.detail[part] / 2, "less than there is"


def _parameters() -> int:
    return len(list(WORKLOADS["gpt"].model().parameters()))
