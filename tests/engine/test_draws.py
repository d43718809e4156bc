"""Ranks of the tensor axis draw the same random numbers for what they all have, and each its own for its part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from echelon.testing.rank_pool import RankPool
from tests.engine.rng_models import masks, resumed, trained
from tests.zoo.prove import completed


def same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left, right)


def test_masks_differ_between_a_column_and_its_row_and_nowhere_else(ranks: RankPool) -> None:
    left, right = ranks.run(2, masks, False, 8)
    for path, mask in left.items():
        assert same(mask, right[path]) != path.endswith("inside"), path
    assert not same(left["blocks.0.inside"], left["blocks.1.inside"])


@pytest.mark.parametrize("length", [8, 7])
def test_masks_differ_on_parts_of_the_sequence_and_are_one_behind_it(ranks: RankPool, length: int) -> None:
    """Ranks with parts of unequal length draw unequally often, too."""
    left, right = ranks.run(2, masks, True, length)
    assert left["blocks.0.before"].shape[1] == -(-length // 2)
    for path, mask in left.items():
        # Of 7 positions the second rank has 3: what it would have of the first one's mask is the beginning.
        theirs = right[path]
        common = tuple(slice(min(sizes)) for sizes in zip(mask.shape, theirs.shape, strict=True))
        assert same(mask[common], theirs[common]) == (path == "last"), path


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sequence", "tp=2 sequence recompute=block"])
def test_what_is_whole_stays_equal_over_ranks_under_dropout(ranks: RankPool, plan: str) -> None:
    document = completed("transformer", plan)
    (losses, left), (_, right) = ranks.run(2, trained, "transformer", document, 3)
    assert left
    assert all(torch.equal(value, right[name]) for name, value in left.items())
    if "recompute" in plan:
        kept, _ = ranks.run(2, trained, "transformer", completed("transformer", "tp=2 sequence"), 3)[0]
        assert losses == pytest.approx(kept, rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_draws_the_same(ranks: RankPool, tmp_path: Path) -> None:
    document = completed("transformer", "tp=2 sequence")
    (losses, one), *_ = ranks.run(2, trained, "transformer", document, 4)
    (again, two), *_ = ranks.run(2, resumed, "transformer", document, str(tmp_path / "here"), 4)
    assert losses == again
    assert all(torch.equal(value, two[name]) for name, value in one.items())
