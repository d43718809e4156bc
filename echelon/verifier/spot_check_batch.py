"""The samples of a spot check: all of a step, or as many as one device can compute in the time there is."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import torch
from torch import Tensor

from echelon.data.loader import Micro, StepBatch
from echelon.data.sample_digest import digest
from echelon.engine.run import Run
from echelon.plan.batch_split import Span, split
from echelon.plan.plan import Plan
from echelon.plan.stages import stage_count
from echelon.tree import map_tensors, tree_leaves
from echelon.verifier.batch_collation import Unjoinable, joined
from echelon.verifier.reference_data import Feed

#: How often a part is read again before it counts as steady: a coin that decides about one sample falls so once in 65,000 times.
_READINGS = 8
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


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch as a data rank read it."""

    rank: int
    batch: Any
    samples: int
    #: Whether the rank reads the same again and again; None: it cannot read it again, or was not asked to.
    steady: bool | None = None


def collect_parts(run: Run, batch: StepBatch, feed: Feed | None = None) -> list[Part]:
    """What the data ranks read for the step, in the order of its samples, on rank 0; nothing elsewhere. `feed`: from which each rank reads its part
    again, to see whether that is steady. Every rank must call it."""
    mine = [Part(run.data.rank, micro.batch, micro.samples) for micro in batch.micros] if run.core.rank == 0 else []
    if feed is not None:
        with run.ranks.together():
            spans = split(batch.samples, run.plan.mesh.dp, run.plan.micro, run.plan.shares)[run.data.rank]
            mine = [
                dataclasses.replace(part, steady=_is_steady(part, batch.step, span, feed))
                for part, span in zip(mine, spans, strict=False)
            ]
    read = [part for part in mine if part.samples]
    everyone = run.ranks.collect(read)
    return sorted((part for parts in everyone or () for part in parts), key=lambda part: part.rank)


def joined_parts(run: Run, batch: StepBatch, parts: list[Part]) -> Gathered | None:
    """The parts as one batch; None where they do not make one."""
    if not parts:
        return None
    try:
        together = joined([part.batch for part in parts], [part.samples for part in parts])
    except Unjoinable:
        return None
    return Gathered(together, batch.samples, run.total_steps)


def reads_the_same(run: Run, batch: StepBatch, feed: Feed) -> bool:
    """Whether rank 0 can read this step's samples once more: a data set with entropy of its own gives others."""
    part = split(batch.samples, run.plan.mesh.dp, run.plan.micro, run.plan.shares)[0][0]
    again = feed.take(batch.step, numpy.arange(part.start, part.stop))
    return digest(again) == digest(batch.micros[0].batch)


def misreading_rank(step: int, parts: list[Part], feed: Feed) -> int | None:
    """A data rank that reads other samples again and again than rank 0 reads in its place, while another rank's are the same.

    Data that draws by itself differs between two readings; data that has changed meanwhile differs for every rank. Where a rank cannot read
    again, most of its samples must differ.
    """
    agrees, start = dict[int, bool](), 0
    wrong: int | None = None
    for part in parts:
        positions = numpy.arange(start, start + part.samples)
        start += part.samples
        once = feed.take(step, positions)
        same = digest(once) == digest(part.batch)
        agrees[part.rank] = agrees.get(part.rank, True) and same
        steady = _most_differ(part, once) if part.steady is None else part.steady
        if wrong is None and part.rank and not same and steady:
            alike = all(digest(feed.take(step, positions)) == digest(once) for _ in range(_READINGS))
            wrong = part.rank if alike else None
    return wrong if any(agrees.values()) else None


def _is_steady(part: Part, step: int, span: Span, feed: Feed) -> bool | None:
    positions = numpy.arange(span.start, span.stop)
    found, again = digest(part.batch), feed.take_as_rank(step, positions)
    if again is None:
        return None
    return digest(again) == found and all(
        digest(feed.take_as_rank(step, positions)) == found for _ in range(_READINGS - 1)
    )


def _most_differ(part: Part, read: Any) -> bool:
    differ = torch.zeros(part.samples, dtype=torch.bool)
    for mine, other in zip(tree_leaves(part.batch), tree_leaves(read), strict=False):
        if _is_rows(mine, part.samples) and isinstance(other, Tensor):
            if mine.shape != other.shape:
                return True
            differ |= (mine.cpu() != other.cpu()).reshape(part.samples, -1).any(1)
    return 2 * int(differ.sum()) > part.samples
