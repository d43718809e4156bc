"""The samples of a spot check: all of a step, or as many as one device can compute in the time there is."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import torch
from torch import Tensor

from echelon.data.loader import MicroBatch, StepBatch
from echelon.data.sample_digest import digest
from echelon.engine.run import Run
from echelon.plan.batch_split import SampleRange, split_batch
from echelon.plan.plan import Plan
from echelon.plan.stages import stage_count
from echelon.tree import map_tensors, tree_leaves
from echelon.verifier.batch_collation import UnjoinableError, join_batches
from echelon.verifier.reference_data import ReferenceData

#: How often a part is read again before it counts as steady: a coin that decides about one sample falls so once in 65,000 times.
_REREADS = 8
#: Micro-batches of each rank in a reduced step: two show what accumulation does.
_MICRO_BATCHES = 2


class GatheredBatch(ReferenceData):
    """One step's samples as the ranks read them, joined on rank 0."""

    def __init__(self, batch: Any, samples: int, total_steps: int) -> None:
        self._batch, self._batch_samples = batch, samples
        self.batch_size, self.total_steps = samples, total_steps

    def samples_in(self, step: int) -> int:
        return self._batch_samples

    def read(self, step: int, positions: numpy.ndarray) -> Any:
        if len(positions) == self._batch_samples:
            return self._batch
        rows = torch.from_numpy(positions)
        return map_tensors(lambda value: value[rows.to(value.device)], self._batch)


def reduce_batch(run: Run, batch: StepBatch, sample_share: float) -> tuple[StepBatch, Plan] | None:
    """A step on about `sample_share` of the samples, and the plan by which they are split; None where samples cannot be told apart.

    Every data rank keeps as many as the others, and several micro-batches if it has several. Every rank must call it.
    """
    plan = run.plan
    micro_batch_count = min(len(batch.micro_batches), stage_count(plan) if plan.mesh.pp > 1 else _MICRO_BATCHES)
    micros = batch.micro_batches[:micro_batch_count]
    local_samples = (
        min(micro_batch.samples for micro_batch in micros)
        if all(
            _has_row_per_sample(leaf, micro_batch.samples)
            for micro_batch in micros
            for leaf in tree_leaves(micro_batch.batch)
        )
        else 0
    )
    min_samples = min(run.ranks.all_gather_object(local_samples))
    if min_samples == 0 or plan.compile:  # other shapes would be compiled once more
        return None
    # Two at least: batch norm and some code treat a single one apart.
    micro_size = min(max(int(sample_share * batch.samples / (plan.mesh.dp * micro_batch_count)), 2), min_samples)
    reduced_micros = tuple(
        MicroBatch(map_tensors(lambda value: value[:micro_size], micro_batch.batch), micro_size)
        for micro_batch in micros
    )
    samples = micro_size * micro_batch_count * plan.mesh.dp
    return dataclasses.replace(batch, micro_batches=reduced_micros, samples=samples), plan.replace(
        micro=micro_size, batch_shares=()
    )


def _has_row_per_sample(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatchReading:
    """A micro-batch as a data rank read it."""

    rank: int
    batch: Any
    samples: int
    #: Whether the rank reads the same again and again; None: it cannot read it again, or was not asked to.
    is_steady: bool | None = None


def collect_readings(run: Run, batch: StepBatch, data: ReferenceData | None = None) -> list[MicroBatchReading]:
    """What the data ranks read for the step, in the order of its samples, on rank 0; nothing elsewhere. `data`: from which each rank reads its part
    again, to see whether that is steady. Every rank must call it."""
    readings = (
        [MicroBatchReading(run.data_parallel.rank, micro.batch, micro.samples) for micro in batch.micro_batches]
        if run.model_parallel.rank == 0
        else []
    )
    if data is not None:
        with run.ranks.raise_on_all_ranks():
            spans = split_batch(batch.samples, run.plan.mesh.dp, run.plan.micro, run.plan.data.batch_shares)[
                run.data_parallel.rank
            ]
            readings = [
                dataclasses.replace(reading, is_steady=_is_reading_steady(reading, batch.step, span, data))
                for reading, span in zip(readings, spans, strict=False)
            ]
    non_empty = [reading for reading in readings if reading.samples]
    readings_by_rank = run.ranks.gather_object(non_empty)
    return sorted(
        (reading for rank_readings in readings_by_rank or () for reading in rank_readings),
        key=lambda reading: reading.rank,
    )


def join_readings(run: Run, batch: StepBatch, readings: list[MicroBatchReading]) -> GatheredBatch | None:
    """The parts as one batch; None where they do not make one."""
    if not readings:
        return None
    try:
        joined = join_batches([reading.batch for reading in readings], [reading.samples for reading in readings])
    except UnjoinableError:
        return None
    return GatheredBatch(joined, batch.samples, run.total_steps)


def is_rereadable(run: Run, batch: StepBatch, data: ReferenceData) -> bool:
    """Whether rank 0 can read this step's samples once more: a data set with entropy of its own gives others."""
    sample_range = split_batch(batch.samples, run.plan.mesh.dp, run.plan.micro, run.plan.data.batch_shares)[0][0]
    second_reading = data.read(batch.step, numpy.arange(sample_range.start, sample_range.stop))
    return digest(second_reading) == digest(batch.micro_batches[0].batch)


def find_misreading_rank(step: int, readings: list[MicroBatchReading], data: ReferenceData) -> int | None:
    """A data rank that reads other samples again and again than rank 0 reads in its place, while another rank's are the same.

    Data that draws by itself differs between two readings; data that has changed meanwhile differs for every rank. Where a rank cannot read
    again, most of its samples must differ.
    """
    agreement_by_rank, start = dict[int, bool](), 0
    wrong_rank: int | None = None
    for reading in readings:
        positions = numpy.arange(start, start + reading.samples)
        start += reading.samples
        own_reading = data.read(step, positions)
        is_same = digest(own_reading) == digest(reading.batch)
        agreement_by_rank[reading.rank] = agreement_by_rank.get(reading.rank, True) and is_same
        is_steady = _most_samples_differ(reading, own_reading) if reading.is_steady is None else reading.is_steady
        if wrong_rank is None and reading.rank and not is_same and is_steady:
            is_repeatable = all(digest(data.read(step, positions)) == digest(own_reading) for _ in range(_REREADS))
            wrong_rank = reading.rank if is_repeatable else None
    return wrong_rank if any(agreement_by_rank.values()) else None


def _is_reading_steady(reading: MicroBatchReading, step: int, span: SampleRange, data: ReferenceData) -> bool | None:
    positions = numpy.arange(span.start, span.stop)
    expected_digest, second_reading = digest(reading.batch), data.read_as_rank(step, positions)
    if second_reading is None:
        return None
    return digest(second_reading) == expected_digest and all(
        digest(data.read_as_rank(step, positions)) == expected_digest for _ in range(_REREADS - 1)
    )


def _most_samples_differ(reading: MicroBatchReading, other_batch: Any) -> bool:
    differ = torch.zeros(reading.samples, dtype=torch.bool)
    for leaf, other_leaf in zip(tree_leaves(reading.batch), tree_leaves(other_batch), strict=False):
        if _has_row_per_sample(leaf, reading.samples) and isinstance(other_leaf, Tensor):
            if leaf.shape != other_leaf.shape:
                return True
            differ |= (leaf.cpu() != other_leaf.cpu()).reshape(reading.samples, -1).any(1)
    return 2 * int(differ.sum()) > reading.samples
