"""The samples of a spot check: all of a step, or as many as one device can compute in time."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import torch
from torch import Tensor

from echelon.data.loader import MicroBatch, StepBatch
from echelon.data.sample_digest import digest
from echelon.engine.run import Run
from echelon.plan.plan import Plan
from echelon.plan.stages import stage_count
from echelon.tree import map_tensors, tree_leaves
from echelon.verifier.reference_data import (
    ReferenceData,
    UnjoinableError,
    has_row_per_sample,
    join_batches,
    positions_of,
)

#: How often a part is read again before it counts as steady: a coin flip about one sample passes once in 65,000 times.
_REREADS = 8
#: Micro-batches of each rank in a reduced step: two show gradient accumulation.
_MICRO_BATCHES = 2


class GatheredBatch(ReferenceData):
    """One step's samples as the ranks read them, joined on rank 0."""

    def __init__(self, batch: Any, samples: int, total_steps: int) -> None:
        self._batch = batch
        self.batch_size, self.total_steps = samples, total_steps

    def samples_in(self, step: int) -> int:
        return self.batch_size

    def read(self, step: int, positions: numpy.ndarray) -> Any:
        if len(positions) == self.batch_size:
            return self._batch
        rows = torch.from_numpy(positions)
        return map_tensors(lambda value: value[rows.to(value.device)], self._batch)


def reduce_batch(run: Run, batch: StepBatch, sample_share: float) -> tuple[StepBatch, Plan] | None:
    """A step on about `sample_share` of the samples, and the plan that splits them; None: samples cannot be told apart. Every data rank keeps
    equally many, and several micro-batches if it has several. Every rank must call it."""
    plan = run.plan
    count = min(len(batch.micro_batches), stage_count(plan) if plan.mesh.pp > 1 else _MICRO_BATCHES)
    micros = batch.micro_batches[:count]
    leaves = [(leaf, micro.samples) for micro in micros for leaf in tree_leaves(micro.batch)]
    is_separable = all(has_row_per_sample(leaf, samples) for leaf, samples in leaves)
    local_samples = min(micro.samples for micro in micros) if is_separable else 0
    min_samples = min(run.ranks.all_gather_object(local_samples))
    if min_samples == 0 or plan.compile:  # other shapes would be compiled again
        return None
    # At least two: batch norm and some code treat a single one specially.
    size = min(max(int(sample_share * batch.samples / (plan.mesh.dp * count)), 2), min_samples)
    reduced = tuple(MicroBatch(map_tensors(lambda value: value[:size], micro.batch), size) for micro in micros)
    reduced_batch = dataclasses.replace(batch, micro_batches=reduced, samples=size * count * plan.mesh.dp)
    return reduced_batch, plan.replace(micro=size, batch_shares=())


@dataclasses.dataclass(slots=True)
class MicroBatchReading:
    """A micro-batch as a data rank read it."""

    rank: int
    batch: Any
    samples: int
    #: Whether the rank reads the same again and again; None: it cannot read it again, or was not asked to.
    is_steady: bool | None = None


def collect_readings(run: Run, batch: StepBatch, data: ReferenceData | None = None) -> list[MicroBatchReading]:
    """What the data ranks read for the step, in the order of its samples, on rank 0; nothing elsewhere. Each rank reads its part again from
    `data`, to see whether it is steady. Every rank must call it."""
    rank, readings = run.data_parallel.rank, list[MicroBatchReading]()
    if run.model_parallel.rank == 0:
        readings = [MicroBatchReading(rank, micro.batch, micro.samples) for micro in batch.micro_batches]
    if data is not None:
        with run.ranks.raise_on_all_ranks():
            for reading, part in zip(readings, run.plan.split_batch(batch.samples)[rank], strict=False):
                reading.is_steady = _is_steady(reading.batch, batch.step, positions_of(part), data)
    readings_by_rank = run.ranks.gather_object([reading for reading in readings if reading.samples]) or ()
    gathered = [reading for rank_readings in readings_by_rank for reading in rank_readings]
    return sorted(gathered, key=lambda reading: reading.rank)


def join_readings(run: Run, batch: StepBatch, readings: list[MicroBatchReading]) -> GatheredBatch | None:
    """The parts as one batch; None where they cannot be joined."""
    if not readings:
        return None
    try:
        joined = join_batches([reading.batch for reading in readings], [reading.samples for reading in readings])
    except UnjoinableError:
        return None
    return GatheredBatch(joined, batch.samples, run.total_steps)


def is_rereadable(run: Run, batch: StepBatch, data: ReferenceData) -> bool:
    """Whether rank 0 can read this step's samples again: a data set with entropy of its own returns others."""
    first_part = run.plan.split_batch(batch.samples)[0][0]
    return digest(data.read(batch.step, positions_of(first_part))) == digest(batch.micro_batches[0].batch)


def find_misreading_rank(step: int, readings: list[MicroBatchReading], data: ReferenceData) -> int | None:
    """A data rank that repeatedly reads other samples than rank 0 reads in its place, while another rank's agree. Data with random numbers of
    its own differs between two reads; data that has changed meanwhile differs for every rank. Where a rank cannot read again, most of its
    samples must differ."""
    agrees_by_rank, start = dict[int, bool](), 0
    wrong_rank: int | None = None
    for reading in readings:
        positions = numpy.arange(start, start + reading.samples)
        start += reading.samples
        own_batch = data.read(step, positions)
        own_digest = digest(own_batch)
        is_same = own_digest == digest(reading.batch)
        agrees_by_rank[reading.rank] = agrees_by_rank.get(reading.rank, True) and is_same
        is_steady = _most_samples_differ(reading, own_batch) if reading.is_steady is None else reading.is_steady
        if wrong_rank is None and reading.rank and not is_same and is_steady:
            is_repeatable = all(digest(data.read(step, positions)) == own_digest for _ in range(_REREADS))
            wrong_rank = reading.rank if is_repeatable else None
    return wrong_rank if any(agrees_by_rank.values()) else None


def _is_steady(batch: Any, step: int, positions: numpy.ndarray, data: ReferenceData) -> bool | None:
    expected, second_reading = digest(batch), data.read_as_rank(step, positions)
    if second_reading is None:
        return None
    later_readings = (data.read_as_rank(step, positions) for _ in range(_REREADS - 1))
    return digest(second_reading) == expected and all(digest(reading) == expected for reading in later_readings)


def _most_samples_differ(reading: MicroBatchReading, other_batch: Any) -> bool:
    differ = torch.zeros(reading.samples, dtype=torch.bool)
    for leaf, other in zip(tree_leaves(reading.batch), tree_leaves(other_batch), strict=False):
        if has_row_per_sample(leaf, reading.samples) and isinstance(other, Tensor):
            if leaf.shape != other.shape:
                return True
            differ |= (leaf.cpu() != other.cpu()).reshape(reading.samples, -1).any(1)
    return 2 * int(differ.sum()) > reading.samples
