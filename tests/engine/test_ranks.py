"""Ranks agree on how to talk by the devices they have, not by how many each of them sees."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from echelon.engine.ranks import Ranks, choose_backend
from echelon.errors import WorldError
from echelon.testing.ranks import Pool
from echelon.world import World


def test_nccl_needs_a_gpu_for_each_rank() -> None:
    assert choose_backend(["a", "b", "c"]) == "cpu:gloo,cuda:nccl"
    assert choose_backend(["a", "b", "a"]) == "gloo"
    assert choose_backend(["cpu", "cpu"]) == "gloo"


def test_a_rank_without_a_gpu_is_named() -> None:
    with pytest.raises(WorldError, match="rank 0 has a GPU and rank 2 has none"):
        choose_backend(["a", "b", "cpu"])


def joined(world: World) -> tuple[str, list[int], bool]:
    """Join, where nobody made a process group before."""
    ranks = Ranks(world, torch.device("cpu"))
    try:
        return dist.get_backend(), ranks.gather(world.rank), ranks.staged
    finally:
        ranks.close()


def test_ranks_join_and_leave(ranks: Pool) -> None:
    found = ranks.run(3, "tests.engine.test_ranks:joined", group=False)
    assert found == [("gloo", [0, 1, 2], False)] * 3


def joined_twice(world: World) -> list[list[int]]:
    """Join again where the first training's addresses still lie: a store's file goes with its last reader."""
    kept, _, _ = next(dist.rendezvous(world.address, world.rank, world.size))
    found = []
    for _ in range(2):
        time.sleep(0.5 * (world.rank == 0))  # whoever comes early would read what the late one wrote last time
        found.append(joined(world)[1])
    del kept
    return found


def test_a_second_training_does_not_meet_the_first_ones_addresses(ranks: Pool) -> None:
    assert ranks.run(2, "tests.engine.test_ranks:joined_twice", group=False) == [[[0, 1]] * 2] * 2


def shared(world: World) -> tuple[bool, float]:
    """Two ranks on one GPU."""
    ranks = Ranks(world)
    try:
        return ranks.staged, float(ranks.sum(torch.ones((), device=ranks.device)))
    finally:
        ranks.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs exactly one CUDA device")
def test_ranks_that_share_a_gpu_talk_through_the_host(ranks: Pool) -> None:
    assert ranks.run(2, "tests.engine.test_ranks:shared", group=False) == [(True, 2.0)] * 2
