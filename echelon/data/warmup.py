"""A small part of the data first, then all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Protocol

from echelon.data.loader import StepBatch


class Batches(Protocol):
    """What gives the batches of steps."""

    def steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        """Those from `start` to `stop`, exclusive."""
        ...


class Warmed:
    """`count` steps of `first`, then those of `then`, numbered on."""

    def __init__(self, first: Batches, count: int, then: Batches) -> None:
        self._first, self._count, self._then = first, count, then

    def steps(self, start: int, stop: int) -> Iterator[StepBatch]:
        """The batches of steps `start` to `stop` (exclusive), whichever part they fall into."""
        parts: list[Iterator[StepBatch]] = []
        if start < self._count:
            parts.append(replace_epochs(self._first.steps(start, min(stop, self._count))))
        if stop > self._count:
            rest = self._then.steps(max(start - self._count, 0), stop - self._count)
            parts.append(replace(batch, step=batch.step + self._count) for batch in rest)
        return chain.from_iterable(parts)

    def part_of(self, step: int) -> tuple[Batches, int]:
        """What gives a step, and its number there."""
        return (self._first, step) if step < self._count else (self._then, step - self._count)


def replace_epochs(batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
    """Epochs are counted over all of the data: before its first there is none but that."""
    return (replace(batch, epoch=0) for batch in batches)
