"""Trains on a small part of the data first, then on all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Protocol

from echelon.data.loader import StepBatch


class StepLoader(Protocol):
    def steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        """The batches of steps `start` to `stop` (exclusive)."""
        ...


class WarmupLoader:
    """`warmup_steps` steps of one loader, then those of another, numbered consecutively."""

    def __init__(self, warmup_loader: StepLoader, warmup_steps: int, main_loader: StepLoader) -> None:
        self._warmup_loader, self._warmup_steps, self._main_loader = warmup_loader, warmup_steps, main_loader

    def steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        """The batches of steps `start` to `stop` (exclusive) of either loader."""
        iterators: list[Iterator[StepBatch]] = []
        if start < self._warmup_steps:
            warmup_batches = self._warmup_loader.steps(start, min(stop, self._warmup_steps))
            iterators.append(replace(batch, epoch=0) for batch in warmup_batches)  # epochs count all of the data
        if stop > self._warmup_steps:
            main_batches = self._main_loader.steps(max(start - self._warmup_steps, 0), stop - self._warmup_steps)
            iterators.append(replace(batch, step=batch.step + self._warmup_steps) for batch in main_batches)
        return chain.from_iterable(iterators)

    def locate_step(self, step: int) -> tuple[StepLoader, int]:
        """The loader that reads a step, and the step's number there."""
        if step < self._warmup_steps:
            return self._warmup_loader, step
        return self._main_loader, step - self._warmup_steps
