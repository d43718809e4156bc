"""The pool itself: reuse, isolation, blame, and that nothing outlives anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from echelon.errors import DataError
from echelon.testing.rank_pool import RankError, RankPool
from echelon.world import World, read_world


def total(world: World, value: float) -> tuple[int, float]:
    tensor = torch.tensor(value * (world.rank + 1))
    dist.all_reduce(tensor)
    sys.stdout.write(f"rank {world.rank} of {world.size}\n")
    return os.getpid(), tensor.item()


def state(world: World) -> tuple[World, bool, int, torch.dtype, float]:
    drawn = torch.rand(()).item()
    torch.set_default_dtype(torch.float64)
    return read_world(), dist.is_initialized(), torch.get_num_threads(), torch.zeros(()).dtype, drawn


def refuse(world: World, culprit: int) -> None:
    if world.rank == culprit:
        raise DataError(f"sample {culprit} is bad")
    dist.barrier()


def refuse_everywhere(world: World) -> int:
    raise DataError(f"{os.getpid()}")


def leave(world: World, culprit: int, code: int) -> None:
    if world.rank == culprit:
        sys.stderr.write("the last words")
        os.kill(os.getpid(), signal.SIGKILL) if code < 0 else os._exit(code)
    dist.barrier()


def hang(world: World, culprit: int) -> None:
    if world.rank == culprit:
        time.sleep(3600)


def doubled(world: World, tensor: torch.Tensor, *, times: int) -> torch.Tensor:
    return tensor * times + world.rank


def test_ranks_are_reused_and_meet_in_worlds_of_any_size(ranks: RankPool) -> None:
    first = ranks.run(2, total, 1.0)
    second = ranks.run(2, "tests.testing.test_ranks:total", 2.0)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert [value for _, value in second] == [6.0, 6.0]
    assert ranks.outputs == ["rank 0 of 2\n", "rank 1 of 2\n"]
    assert [value for _, value in ranks.run(3, total, 1.0)] == [6.0] * 3


def test_arguments_and_results_may_be_tensors(ranks: RankPool) -> None:
    first, second = ranks.run(2, doubled, torch.ones(3), times=2)
    assert torch.equal(first, torch.full((3,), 2.0))
    assert torch.equal(second, torch.full((3,), 3.0))


def test_a_run_starts_clean(ranks: RankPool) -> None:
    for size in (2, 1, 2):
        results = ranks.run(size, state)
        for rank, (world, grouped, threads, dtype, drawn) in enumerate(results):
            assert (world.rank, world.size, grouped, threads) == (rank, size, size > 1, 1)
            assert dtype == torch.float64
            assert drawn == results[0][4]
    assert not any(grouped for _, grouped, *_ in ranks.run(2, state, init_process_group=False))


def test_the_first_to_fail_is_blamed_with_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed:[\s\S]*sample 1 is bad") as caught:
        ranks.run(2, refuse, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, DataError)
    assert [value for _, value in ranks.run(2, total, 1.0)] == [3.0, 3.0]


def test_ranks_that_all_refuse_are_kept(ranks: RankPool) -> None:
    before = {pid for pid, _ in ranks.run(2, total, 1.0)}
    with pytest.raises(RankError, match=r"rank [01] of 2"):
        ranks.run(2, refuse_everywhere)
    assert {pid for pid, _ in ranks.run(2, total, 1.0)} == before


@pytest.mark.slow
@pytest.mark.parametrize(("code", "words"), [(3, "exited with 3"), (-9, "was killed by SIGKILL")])
def test_a_rank_that_dies_is_blamed_with_its_output(ranks: RankPool, code: int, words: str) -> None:
    with pytest.raises(RankError, match=rf"rank 1 of 2 {words}[\s\S]*the last words"):
        ranks.run(2, leave, 1, code)
    assert [value for _, value in ranks.run(2, total, 1.0)] == [3.0, 3.0]


@pytest.mark.slow
def test_a_hang_ends_with_the_timeout(ranks: RankPool) -> None:
    ranks.run(2, total, 1.0)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 did not finish within 1 s"):
        ranks.run(2, hang, 1, timeout=1.0)
    assert time.monotonic() - began < 60
    assert [value for _, value in ranks.run(2, total, 1.0)] == [3.0, 3.0]


@pytest.mark.slow
def test_no_process_outlives_the_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\n"
        "from echelon.testing.rank_pool import RankPool\n"
        "pool = RankPool()\n"
        "pool.run(2, 'tests.testing.test_ranks:total', 1.0)\n"
        "print(*[pid for pid, _ in pool.run(2, 'tests.testing.test_ranks:total', 1.0)], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONPATH=path),
        timeout=120,
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
