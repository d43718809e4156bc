"""What a rank holds of the training state, as `python -m bench.memory` measures it."""

from __future__ import annotations

from bench.memory import LIMIT, hold
from bench.workloads import WORKLOADS
from echelon.testing.ranks import Pool


def test_fully_sharded_the_largest_rank_holds_a_quarter(ranks: Pool) -> None:
    alone = ranks.run(1, hold, "gpt", 0)[0]
    replicated, sharded = (max(held["state"] for held in ranks.run(4, hold, "gpt", zero)) for zero in (0, 3))
    assert (
        alone["state"] == 16 * alone["parameters"] // 4 + 4 * _parameters()
    )  # AdamW: two moments and a step count each
    assert replicated >= alone["state"]
    assert sharded <= LIMIT * alone["state"] / 4


def _parameters() -> int:
    return len(list(WORKLOADS["gpt"].model().parameters()))
