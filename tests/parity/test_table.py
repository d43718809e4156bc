"""A sample of the parity table; `python -m bench.parity` runs all of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from bench.parity import LIMIT, Cell, Record, cells, differences, groups, reference, run
from echelon.testing.rank_pool import RankPool


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_sample_of_the_table(ranks: RankPool, count: int) -> None:
    chosen = random.Random(count).sample(cells([count]), 8)
    off = {cell: found for cell, found in run(chosen, ranks).items() if max(found.values()) > LIMIT}
    assert not off


def test_the_sample_meets_every_value_of_every_axis() -> None:
    chosen = [cell for count in (1, 2, 4) for cell in random.Random(count).sample(cells([count]), 8)]
    for axis in Cell.__slots__:
        assert {getattr(cell, axis) for cell in chosen} == {getattr(cell, axis) for cell in cells()}, axis


def test_the_comparison_sees_a_mistake_in_each_kind() -> None:
    cell = cells([2])[1]
    right = reference(cell)
    assert max(differences(right, right).values()) == 0
    for kind, field in (
        ("parameter", "parameters"),
        ("buffer", "buffers"),
        ("optimizer", "optimizer"),
        ("loss", "losses"),
    ):
        values = dict(getattr(right, field))
        name = next(iter(values))
        values[name] = values[name] + 1e-6
        assert differences(replace(right, **{field: values}), right)[kind] > LIMIT
    wrong = [{name: value * (1 + 1e-6) for name, value in step.items()} for step in right.gradients]
    assert differences(replace(right, gradients=wrong), right)["gradient"] > LIMIT
    missing: Record = replace(right, parameters={})
    assert differences(missing, right)["parameter"] == float("inf")


def test_groups_cover_the_batch_once_in_order() -> None:
    for cell in cells():
        for size in (32, 29):
            positions = [position for group in groups(cell, size) for position in group]
            assert sorted(positions) == list(range(size))
            assert cell.norm == "sync" or positions == list(range(size))


def test_local_and_synchronised_references_differ() -> None:
    local, sync = (
        reference(Cell(ranks=2, zero=0, accumulation=1, uneven=True, clip=False, optimizer="sgd", norm=norm))
        for norm in ("local", "sync")
    )
    assert differences(local, sync)["gradient"] > 1e-3
    assert not torch.equal(local.buffers["bn1.running_mean"], sync.buffers["bn1.running_mean"])
