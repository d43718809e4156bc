"""Whether anybody asks to stop, known for the same step on ranks that do not wait for each other."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.engine.process_groups import Group

#: Steps that a rank may be ahead of the slowest where the plan has no bound.
LEAD = 64


class Agreement:
    """Every rank tells of every step, in order. What all of them said is looked at when it is there; only a rank that is `lead` steps ahead
    waits for it, so that what was asked at a step can be done by all after `lead` more."""

    def __init__(self, group: Group, staleness: int | None) -> None:
        self._group = group
        self._lead = LEAD if staleness is None else staleness + 1
        self._told: deque[tuple[int, Tensor, dist.Work]] = deque()
        self._stop: int | None = None

    def tell(self, step: int, asked: bool) -> bool:
        """This rank is done with `step`; whether all ranks stop after it."""
        if self._group.size == 1:
            return asked
        value = torch.tensor([float(asked)])
        work = dist.all_reduce(value, group=self._group.group, async_op=True)
        assert work is not None
        self._told.append((step, value, work))
        while self._told and (len(self._told) > self._lead or self._told[0][2].is_completed()):
            self._hear()
        return self._stop is not None and step >= self._stop

    def settle(self) -> None:
        """Wait until all have told as much as this rank; every rank must call it after the same step."""
        while self._told:
            self._hear()

    def _hear(self) -> None:
        step, value, work = self._told.popleft()
        work.wait()
        if float(value) > 0 and self._stop is None:
            self._stop = step + self._lead + 1
