"""What the host reads from sharded tensors is the same on every rank, and right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from echelon.engine.dtensor_reads import patch_host_reads
from echelon.engine.run import Run
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import JOBS


def reads(world: World) -> dict[str, Any]:
    value = torch.arange(1.0, 6.0, dtype=torch.float64)
    part = distribute_tensor(value, init_device_mesh("cpu", (world.size,)), [Shard(0)])
    undo = patch_host_reads()
    found = {
        "sum": part.sum().item(),
        "mean": float(part.mean()),
        "norm": part.norm().item(),
        "largest": part.max().item(),
        "square": float((part * part).sum()),
        "bool": bool((part > 4.5).any()),
        "element": part[4].item(),
    }
    undo()
    return found


def test_reductions_of_sharded_tensors_are_read_whole(ranks: RankPool) -> None:
    value = torch.arange(1.0, 6.0, dtype=torch.float64)
    for found in ranks.run(2, reads):
        assert found == {
            "sum": 15.0, "mean": 3.0, "norm": pytest.approx(value.norm().item()), "largest": 5.0, "square": 55.0, "bool": True, "element": 5.0,
        }  # fmt: skip


def norms(world: World, plan: str) -> list[float]:
    job = JOBS["mlp"]()
    with Run(job, from_text(plan), world, dtype=torch.float64) as run:
        return [value.norm().item() for value in run.model.parameters()]


def test_a_run_reads_whole_norms_of_its_parameters(ranks: RankPool) -> None:
    alone = norms(World(), "dp=1")
    assert all(each == pytest.approx(alone, rel=1e-12) for each in ranks.run(2, norms, "dp=2 zero=1"))
    assert not dist.is_initialized()
