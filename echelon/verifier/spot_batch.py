"""The samples of a spot check: all of a step, or as many as one device can compute in the time there is."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.data.digest import digest
from echelon.data.loader import Micro, StepBatch
from echelon.engine.run import Run
from echelon.plan.plan import Plan
from echelon.plan.split import split
from echelon.plan.stages import stage_count
from echelon.tree import map_tensors, tree_leaves
from echelon.verifier.collation import joined
from echelon.verifier.feed import Feed

#: Micro-batches of each rank in a reduced step: two show what accumulation does.
_ROUNDS = 2


class Gathered(Feed):
    """One step's samples as the ranks read them, joined on rank 0."""

    def __init__(self, batch: Any, samples: int, total: int) -> None:
        self._batch, self._samples = batch, samples
        self.batch, self.total = samples, total

    def size(self, step: int) -> int:
        return self._samples

    def take(self, step: int, positions: numpy.ndarray) -> Any:
        if len(positions) == self._samples:
            return self._batch
        rows = torch.from_numpy(positions)
        return map_tensors(lambda value: value[rows.to(value.device)], self._batch)


def fewer(run: Run, batch: StepBatch, share: float) -> tuple[StepBatch, Plan] | None:
    """A step on about `share` of the samples, and the plan by which they are split; None where samples cannot be told apart.

    Every data rank keeps as many as the others, and several micro-batches if it has several. Every rank must call it.
    """
    plan = run.plan
    rounds = min(len(batch.micros), stage_count(plan) if plan.mesh.pp > 1 else _ROUNDS)
    micros = batch.micros[:rounds]
    mine = (
        min(micro.samples for micro in micros)
        if all(_is_rows(leaf, micro.samples) for micro in micros for leaf in tree_leaves(micro.batch))
        else 0
    )
    least = min(run.ranks.gather(mine))
    if least == 0 or plan.compile:  # other shapes would be compiled once more
        return None
    # Two at least: batch norm and some code treat a single one apart.
    each = min(max(int(share * batch.samples / (plan.mesh.dp * rounds)), 2), least)
    cut = tuple(Micro(map_tensors(lambda value: value[:each], micro.batch), each) for micro in micros)
    samples = each * rounds * plan.mesh.dp
    return dataclasses.replace(batch, micros=cut, samples=samples), dataclasses.replace(plan, micro=each, shares=())


def _is_rows(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples


def gathered(run: Run, batch: StepBatch) -> Gathered | None:
    """What the data ranks read for the step, as one batch on rank 0; None elsewhere. Every rank must call it."""
    mine = [(micro.batch, micro.samples) for micro in batch.micros if micro.samples] if run.core.rank == 0 else []
    everyone: list[Any] | None = [None] * run.world.size if run.world.main else None
    if run.world.size > 1:
        dist.gather_object((run.data.rank, mine), everyone)
    elif everyone is not None:
        everyone = [(0, mine)]
    if everyone is None:
        return None
    parts = [part for _, each in sorted(everyone, key=lambda item: item[0]) for part in each]
    return Gathered(joined(*zip(*parts, strict=True)), batch.samples, run.total_steps)


def reads_the_same(run: Run, batch: StepBatch, feed: Feed) -> bool:
    """Whether rank 0 can read this step's samples once more: a data set with entropy of its own gives others."""
    part = split(batch.samples, run.plan.mesh.dp, run.plan.micro, run.plan.shares)[0][0]
    again = feed.take(batch.step, numpy.arange(part.start, part.stop))
    return digest(again) == digest(batch.micros[0].batch)
