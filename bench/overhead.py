"""What echelon costs: its step time against a plain PyTorch loop in one process, and against its peers on two ranks.

    python -m bench.overhead [--only gpt,mlp] [--seconds 120] [--json overhead.json]
    python -m bench.overhead --device cuda            # one GPU: GPT-124M in bf16, with and without torch.compile

Both sides of a ratio have the same settings: threads, data in memory, optimizer kernel (torch's default, then fused).
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import ROUNDS, Contender, Row, Timing, among, milliseconds, publish, ratio, take_turns, tell
from bench.contenders import PEERS, Echelon, Plain, Train, quietly
from bench.ranks import race
from bench.workloads import WORKLOADS
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.testing.rank_pool import RankPool
from echelon.world import World

ONE_PROCESS, TWO_RANKS = 1.01, 1.02  # the project's limits
#: Steps per turn: long enough that a turn's edges do not count, short enough that the machine does not drift within a round.
BLOCK = {"gpt": 2, "resnet": 2, "mlp": 4, "gpt124m": 10}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; 0 when every limit holds."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead", description="echelon's step time against its peers'"
    )
    parser.add_argument("--only", type=among(*BLOCK), default="gpt,resnet,mlp", help="workloads, separated by commas")
    parser.add_argument(
        "--ranks",
        type=among("1", "2"),
        default="1,2",
        help="1: against a plain loop; 2: against DDP, Accelerate, Lightning",
    )
    parser.add_argument(
        "--kernel", type=among("default", "fused"), default="default,fused", help="optimizer kernels: default, fused"
    )
    parser.add_argument("--peers", type=among(*PEERS), default=",".join(PEERS), help="contenders on two ranks")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds (A B B A) of each race")
    parser.add_argument("--seconds", type=float, default=180.0, help="time limit of each race")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    rows = _cuda(asked) if asked.device == "cuda" else _cpu(asked)
    used = sorted({row.what["workload"] for row in rows})
    notes = ["ratio of step times: median [95 % interval] over the rounds; the upper end is held against the limit"]
    notes += [f"{name}: {WORKLOADS[name].what}" for name in used]
    return publish("Step time of echelon", rows, json_path=asked.json, notes=notes)


def _cpu(asked: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for name in asked.only:
        for kernel in asked.kernel:
            fused = kernel == "fused"
            if "1" in asked.ranks:
                rows += _one_process(name, fused, asked)
            if "2" in asked.ranks:
                rows += _two_ranks(name, fused, asked)
    return rows


def _one_process(name: str, fused: bool, asked: argparse.Namespace) -> list[Row]:
    plain, ours, whole = race_alone(name, fused=fused, rounds=asked.rounds, seconds=asked.seconds)
    return [
        _row(_what(name, "one process", fused, "plain loop"), ours, plain, ONE_PROCESS),
        _row(_what(name, "one process", fused, "plain loop; with event log and TensorBoard"), whole, plain, None),
    ]


def race_alone(name: str, *, fused: bool, rounds: int, seconds: float) -> list[Timing]:
    """A plain loop, echelon's step, and `echelon.train` with all that it writes, in turns in this process."""
    workload = WORKLOADS[name]
    contenders: list[Contender] = [
        Plain(workload, fused=fused),
        Echelon(workload, World(), Plan(fused=fused)),
        Train(workload, World(), fused=fused),
    ]
    return _race(contenders, name, rounds, seconds)


def race_on_gpu(name: str, *, rounds: int, seconds: float, compile: bool) -> list[Timing]:
    """A plain loop and echelon's step in turns on one GPU, both in bf16 with the fused optimizer."""
    workload = WORKLOADS[name]
    contenders: list[Contender] = [
        Plain(workload, fused=True, device="cuda:0", bf16=True, compile=compile),
        Echelon(workload, World(), Plan(precision="bf16", compile=compile), device="cuda:0"),
    ]
    return _race(contenders, name, rounds, seconds, warmup=10, barrier=torch.cuda.synchronize)


def _race(contenders: list[Contender], name: str, rounds: int, seconds: float, **how: Any) -> list[Timing]:
    settings = torch.get_num_threads(), torch.get_float32_matmul_precision()
    timings = take_turns(contenders, block=BLOCK[name], rounds=rounds, seconds=seconds, **how)
    after = torch.get_num_threads(), torch.get_float32_matmul_precision()
    assert settings == after, f"a contender changed the settings of all: {settings} became {after}"
    for contender in contenders:
        contender.close()
    contenders.clear()
    gc.collect()
    return timings


def _two_ranks(name: str, fused: bool, asked: argparse.Namespace) -> list[Row]:
    with RankPool() as pool:
        timings = pool.run(
            2, race_together, name, fused, asked.peers, asked.rounds, asked.seconds, timeout=asked.seconds * 3 + 300
        )[0]
    ours, *theirs = timings
    fastest = min(theirs, key=lambda timing: timing.step)
    return [
        _row(
            _what(name, "two ranks", fused, f"{peer.name}{', the fastest' if peer is fastest else ''}"),
            ours,
            peer,
            TWO_RANKS if peer is fastest else None,
        )
        for peer in theirs
    ]


def race_together(
    world: World, name: str, fused: bool, peers: Sequence[str], rounds: int, seconds: float
) -> list[Timing]:
    """On each rank of a started world: echelon and its peers in turns. CPU seconds are of all ranks together."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "NODE_RANK": "0",
    }  # asked for, though the ranks have met
    workload = WORKLOADS[name]

    with quietly():
        contenders: list[Contender] = [Echelon(workload, world, Plan(mesh=Mesh(dp=world.size), fused=fused))]
        contenders += [PEERS[peer](workload, world, fused=fused) for peer in peers]
        return race(contenders, block=BLOCK[name], rounds=rounds, seconds=seconds)


def _cuda(asked: argparse.Namespace) -> list[Row]:
    rows = []
    for compiled in (False, True):
        plain, ours = race_on_gpu("gpt124m", rounds=asked.rounds, seconds=asked.seconds, compile=compiled)
        where = f"one GPU, bf16{', torch.compile' if compiled else ''}"
        rows.append(_row(_what("gpt124m", where, True, "plain loop"), ours, plain, ONE_PROCESS))
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return rows


def _what(name: str, where: str, fused: bool, against: str) -> dict[str, str]:
    kernel = "fused" if fused else "default"
    return {"workload": name, "where": where, "optimizer": kernel, "echelon against": against}


def _row(what: dict[str, str], ours: Timing, theirs: Timing, limit: float | None) -> Row:
    wall, cpu = ratio(ours, theirs), ratio(ours, theirs, "cpu")
    times = (
        f"{milliseconds(ours.step)} / {milliseconds(theirs.step)}, CPU time {cpu.median:.3f}, {len(ours.wall)} rounds"
    )
    detail = {"ours": ours, "theirs": theirs, "wall": wall, "cpu": cpu}
    return tell(Row(what=what, value=wall.high, text=f"{wall}\n{times}", limit=limit, detail=detail))


if __name__ == "__main__":
    raise SystemExit(main())
