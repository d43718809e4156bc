"""A small part of the data first, then all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Protocol

from echelon.data.loader import StepBatch


class StepLoader(Protocol):
    """What gives the batches of steps."""

    def steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        """Those from `start` to `stop`, exclusive."""
        ...


class WarmupLoader:
    """`count` steps of `first`, then those of `then`, numbered on."""

    def __init__(self, warmup_loader: StepLoader, warmup_steps: int, main_loader: StepLoader) -> None:
        self._warmup_loader, self._warmup_steps, self._main_loader = warmup_loader, warmup_steps, main_loader

    def steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        """The batches of steps `start` to `stop` (exclusive), whichever part they fall into."""
        iterators: list[Iterator[StepBatch]] = []
        if start < self._warmup_steps:
            iterators.append(reset_epochs(self._warmup_loader.steps(start, min(stop, self._warmup_steps))))
        if stop > self._warmup_steps:
            main_batches = self._main_loader.steps(max(start - self._warmup_steps, 0), stop - self._warmup_steps)
            iterators.append(replace(batch, step=batch.step + self._warmup_steps) for batch in main_batches)
        return chain.from_iterable(iterators)

    def locate_step(self, step: int) -> tuple[StepLoader, int]:
        """What gives a step, and its number there."""
        return (
            (self._warmup_loader, step) if step < self._warmup_steps else (self._main_loader, step - self._warmup_steps)
        )


def reset_epochs(batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
    """Epochs are counted over all of the data: before its first there is none but that."""
    return (replace(batch, epoch=0) for batch in batches)
