"""Contenders that are several ranks each, in turns in the same processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bench.common import Contender, Timing, take_turns


def race(contenders: Sequence[Contender], *, block: int, rounds: int, seconds: float) -> list[Timing]:
    """`take_turns` on every rank of a started world, which go on and end together. CPU seconds are of all ranks together."""

    def agree(more: bool) -> bool:
        word = torch.tensor(int(more))
        dist.broadcast(word, 0)
        return bool(word)

    timings = take_turns(contenders, block=block, rounds=rounds, seconds=seconds, barrier=dist.barrier, agree=agree)
    for contender in contenders:
        contender.close()
    cpu = torch.tensor([timing.cpu for timing in timings], dtype=torch.float64)
    dist.all_reduce(cpu)
    return [
        Timing(name=timing.name, wall=timing.wall, cpu=tuple(total.tolist()))
        for timing, total in zip(timings, cpu, strict=True)
    ]
