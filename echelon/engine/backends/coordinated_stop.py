"""Stop ranks that do not wait for each other after the same step."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.engine.process_groups import Communicator

#: Steps that a rank may be ahead of the slowest where the plan has no bound.
MAX_STEPS_AHEAD = 64


class CoordinatedStop:
    """Every rank reports every step and reads the sum of the reports later. Only a rank that is as far ahead as the plan allows waits for it, so all
    can stop that many steps after the request."""

    def __init__(self, communicator: Communicator, staleness: int | None) -> None:
        self._communicator = communicator
        self._max_steps_ahead = MAX_STEPS_AHEAD if staleness is None else staleness + 1
        self._pending: deque[tuple[int, Tensor, dist.Work]] = deque()
        self._stop_step: int | None = None

    def report(self, step: int, stop_requested: bool) -> bool:
        """Report `step` as finished; returns whether all ranks stop after it."""
        if self._communicator.size == 1:
            return stop_requested
        flag = torch.tensor([float(stop_requested)])
        work = dist.all_reduce(flag, group=self._communicator.process_group, async_op=True)
        assert work is not None
        self._pending.append((step, flag, work))
        while self._pending and (len(self._pending) > self._max_steps_ahead or self._pending[0][2].is_completed()):
            self._receive_oldest()
        return self._stop_step is not None and step >= self._stop_step

    def wait(self) -> None:
        """Wait until all have reported as many steps; every rank must call it after the same step."""
        while self._pending:
            self._receive_oldest()

    def _receive_oldest(self) -> None:
        step, flag, work = self._pending.popleft()
        work.wait()
        if float(flag) > 0 and self._stop_step is None:
            self._stop_step = step + self._max_steps_ahead + 1
