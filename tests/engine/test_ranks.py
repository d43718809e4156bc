"""Ranks agree on how to talk by the devices they have, not by how many each of them sees."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from echelon.engine.parallel.gradient_allreduce import GradientAllReduce
from echelon.engine.process_groups import WorldCommunicator, choose_backend, open_shared_store
from echelon.engine.run import Run
from echelon.errors import WorldError
from echelon.plan.plan import Plan
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import JOBS


def test_nccl_needs_a_gpu_for_each_rank() -> None:
    assert choose_backend(["a", "b", "c"]) == "cpu:gloo,cuda:nccl"
    assert choose_backend(["a", "b", "a"]) == "gloo"
    assert choose_backend(["cpu", "cpu"]) == "gloo"


def test_a_rank_without_a_gpu_is_named() -> None:
    with pytest.raises(WorldError, match="rank 0 has a GPU and rank 2 has none"):
        choose_backend(["a", "b", "cpu"])


def joined(world: World) -> tuple[str, list[int], bool]:
    """Join, where nobody made a process group before."""
    ranks = WorldCommunicator(world, torch.device("cpu"))
    try:
        return dist.get_backend(), ranks.all_gather_object(world.rank), ranks.via_host
    finally:
        ranks.close()


def test_ranks_join_and_leave(ranks: RankPool) -> None:
    found = ranks.run(3, "tests.engine.test_ranks:joined", init_process_group=False)
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


def test_a_second_training_does_not_meet_the_first_ones_addresses(ranks: RankPool) -> None:
    assert ranks.run(2, "tests.engine.test_ranks:joined_twice", init_process_group=False) == [[[0, 1]] * 2] * 2


def left_waiting(world: World) -> str:
    """Rank 1 abandons the others, although something still refers to the process groups; the others wait for it in a collective."""
    ranks = WorldCommunicator(world, torch.device("cpu"))
    pair = ranks.split_by(lambda rank: 0 if rank < 2 else None)
    kept = (dist.group.WORLD, pair)
    met(world, "connected")  # a rank that still connects would fail in that, not in the collective
    try:
        if world.rank == 1:
            ranks.abort()
            return "abandoned"
        (pair or ranks).all_reduce(torch.ones(()))
        return "summed"
    except RuntimeError as error:
        ranks.abort()
        return str(error)
    finally:
        ranks.close()
        met(world, "done")  # references that go would close the connections too
        del kept


def met(world: World, purpose: str) -> None:
    """Wait until every rank is here, without any process group."""
    store = open_shared_store(world, purpose)
    store.set(str(world.rank), "here")
    store.wait([str(each) for each in range(world.size)])


def test_no_rank_waits_for_one_that_abandoned_it(ranks: RankPool) -> None:
    alone, abandoned, other = ranks.run(3, "tests.engine.test_ranks:left_waiting", init_process_group=False, timeout=60)
    assert abandoned == "abandoned"
    assert "Connection closed by peer" in alone
    assert "Connection closed by peer" in other


def shared(world: World) -> tuple[bool, float]:
    """Two ranks on one GPU."""
    ranks = WorldCommunicator(world)
    try:
        return ranks.via_host, float(ranks.all_reduce(torch.ones((), device=ranks.device)))
    finally:
        ranks.close()


def abandoned_in_the_middle(world: World, count: int, size: int) -> float:
    """Leave as many worlds as `count` while broadcasts of unlike number are under way; returns the longest time that it took."""
    draw, longest = random.Random(0), 0.0
    for _ in range(count):
        ranks = WorldCommunicator(world)
        ranks.barrier()
        counts, source = [draw.randrange(1, 4) for _ in range(world.size)], draw.randrange(world.size)
        # each is one message; an operation of several fails by those that have not begun
        pending = [dist.broadcast(torch.ones(size), source, async_op=True) for _ in range(counts[world.rank])]
        begin = time.monotonic()
        with contextlib.suppress(Exception):
            if world.rank == draw.randrange(world.size):
                for each in pending:
                    each.wait()
                ranks.all_gather_object("waits for a rank that is gone")
        ranks.abort()
        longest = max(longest, time.monotonic() - begin)
        del pending
    return longest


@pytest.mark.slow
@pytest.mark.parametrize(("count", "size"), [(15, 200_000), (5, 20_000_000)], ids=["small", "large"])
def test_no_rank_waits_for_one_that_has_left_in_the_middle(ranks: RankPool, count: int, size: int) -> None:
    took = ranks.run(2, "tests.engine.test_ranks:abandoned_in_the_middle", count, size, init_process_group=False)
    assert max(took) < 20


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs exactly one CUDA device")
def test_ranks_that_share_a_gpu_talk_through_the_host(ranks: RankPool) -> None:
    assert ranks.run(2, "tests.engine.test_ranks:shared", init_process_group=False) == [(True, 2.0)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_rank_exchanges_shards_and_measures_by_nccl(tmp_path: Path) -> None:
    """The code that several GPUs run, over a group of one."""
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
        whole, sharded = copy.deepcopy(plain), copy.deepcopy(plain)
        x = torch.randn(16, 64, device="cuda")
        plain(x).square().mean().backward()
        exchange = GradientAllReduce(list(whole.parameters()), 1, dist.group.WORLD)
        exchange.sync_next_backward()
        whole(x).square().mean().backward()
        exchange.wait()
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=init_device_mesh("cuda", (1,)))
        sharded(x).square().mean().backward()
        for one, other, part in zip(plain.parameters(), whole.parameters(), sharded.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert isinstance(part.grad, DTensor)
            assert torch.equal(one.grad, other.grad)
            assert torch.equal(one.grad, part.grad.full_tensor())
        total = torch.ones((), device="cuda")
        assert "cuda:nccl" in dist.get_backend_config()
        dist.all_reduce(total)
        assert total.item() == 1
        exchange.close()
        with Run(JOBS["clip"](), Plan(), World()) as run:
            assert run.device.type == "cuda"
            assert all(math.isfinite(float(run.step(batch).loss)) for batch in run.batches(2))
    finally:
        dist.destroy_process_group()
