"""Read the job's global batches on one device, and choose the steps that a proof runs.

Where collation mixes samples or draws (mixup, cutmix), batches are collated as the ranks of the plan do: which samples are mixed follows
from the plan's micro-batches, as an augmentation follows from its seed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.data.open_data import is_stream, open_source
from echelon.data.sample_digest import digest
from echelon.data.stream import Stream
from echelon.job import Job
from echelon.plan.batch_split import SampleRange
from echelon.plan.plan import Plan
from echelon.tree import copy_tensors, map_tensors, tree_flatten, tree_unflatten
from echelon.trials.trial_context import single_process_world


class ReferenceData(ABC):
    """Reads any samples of any step's global batch. `total_steps`: steps of the whole training, for schedules."""

    batch_size: int
    total_steps: int

    @abstractmethod
    def samples_in(self, step: int) -> int: ...

    @abstractmethod
    def read(self, step: int, positions: np.ndarray) -> Any:
        """The samples at these positions of the step's global batch, collated together."""

    def read_as_rank(self, step: int, positions: np.ndarray) -> Any:
        """The same as one of several ranks reads them. None: they cannot be read again that way."""
        return None

    def choose_steps(self, count: int) -> tuple[int, ...]:
        return tuple(range(min(count, self.total_steps)))

    def repeated_digest(self, step: int, positions: np.ndarray) -> str | None:
        """The digest of these samples; None: two reads differ."""
        first, second = (digest(self.read(step, positions)) for _ in range(2))
        return first if first == second else None


class WrappedData(ReferenceData):
    def __init__(self, data: ReferenceData) -> None:
        self._data = data
        self.batch_size, self.total_steps = data.batch_size, data.total_steps

    def samples_in(self, step: int) -> int:
        return self._data.samples_in(step)

    def choose_steps(self, count: int) -> tuple[int, ...]:
        return self._data.choose_steps(count)


class CachedData(WrappedData):
    """Reads samples once, for several runs on the same samples."""

    def __init__(self, data: ReferenceData) -> None:
        super().__init__(data)
        self._cache: dict[tuple[int, bytes], Any] = {}

    def read(self, step: int, positions: np.ndarray) -> Any:
        key = step, positions.tobytes()
        if key not in self._cache:
            self._cache[key] = self._data.read(step, positions)
        return copy_tensors(self._cache[key])  # forward may change its inputs


def micro_batches(plan: Plan, samples: int) -> list[SampleRange]:
    """The micro-batches of all data ranks, in the order of the batch."""
    return [sample_range for rank_ranges in plan.split_batch(samples) for sample_range in rank_ranges]


def positions_of(sample_range: SampleRange) -> np.ndarray:
    return np.arange(sample_range.start, sample_range.stop)


def has_row_per_sample(leaf: Any, samples: int) -> bool:
    """Whether a leaf of a batch is a tensor whose rows are the samples."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples


def open_reference_data(job: Job) -> ReferenceData:
    return _IterableData(job) if is_stream(job.data) else _MapStyleData(job)


class _MapStyleData(ReferenceData):
    def __init__(self, job: Job) -> None:
        self._source = open_source(job.data, collate=job.collate, seed=job.seed)
        self._order = self._source.make_order(batch=job.batch_size, seed=job.seed, drop_last=job.drop_last)
        self.batch_size = job.batch_size
        self.total_steps = job.steps if job.steps is not None else (job.epochs or 0) * self._order.steps_per_epoch

    def samples_in(self, step: int) -> int:
        return self._order.batch_size(step)

    @single_process_world()
    def read(self, step: int, positions: np.ndarray) -> Any:
        return self.read_as_rank(step, positions)

    def read_as_rank(self, step: int, positions: np.ndarray) -> Any:
        ids = self._order.ids(step, 0, self.samples_in(step))
        return self._source.read_batch(ids[positions], self._order.epoch_of(step))

    def choose_steps(self, count: int) -> tuple[int, ...]:
        """The first `count`, and the epoch's last where it is short: uneven splits are where weights go wrong."""
        steps = super().choose_steps(count)
        last = self._order.steps_per_epoch - 1
        is_short = last < self.total_steps and last not in steps and self.samples_in(last) < self.batch_size
        return (*steps, last) if is_short else steps


class _IterableData(ReferenceData):
    """Data that can only be read from its start; keeps what was read, because several runs read it."""

    def __init__(self, job: Job) -> None:
        self._reader = Stream(job.data, collate=job.collate, seed=job.seed).make_reader()
        self._batches: list[tuple[int, list[Any]]] = []
        self.batch_size, self.total_steps = job.batch_size, job.steps or 0
        self._min_samples = job.batch_size if job.drop_last else 1

    def samples_in(self, step: int) -> int:
        return len(self._read_until(step)[1])

    @single_process_world()
    def read(self, step: int, positions: np.ndarray) -> Any:
        first, samples = self._read_until(step)
        return self._reader.collate_batch([samples[i] for i in positions], first + int(positions[0]), pin=False)

    @single_process_world()
    def _read_until(self, step: int) -> tuple[int, list[Any]]:
        while len(self._batches) <= step:
            if not self._batches or len(self._batches[-1][1]) < self.batch_size:
                self._reader.start_next_epoch()
            first, samples = self._reader.samples_read, self._reader.read(self.batch_size)
            if len(samples) < self._min_samples:  # the last epoch ended with a whole batch, or its rest is dropped
                self._reader.start_next_epoch()
                first, samples = 0, self._reader.read(self.batch_size)
            self._batches.append((first, samples))
        return self._batches[step]


class UnjoinableError(Exception):
    """Batches cannot be joined: padded to other lengths, without a row per sample, or with values of their own."""


def join_batches(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join collated batches with `sizes[i]` samples in the i-th; raises UnjoinableError."""
    if len(batches) == 1:
        return batches[0]
    trees = [tree_flatten(batch) for batch in batches]
    if any(structure != trees[0][1] for _, structure in trees):
        raise UnjoinableError
    leaves_by_place = zip(*(leaves for leaves, _ in trees), strict=True)
    return tree_unflatten([_concatenate(leaves, sizes) for leaves in leaves_by_place], trees[0][1])


def _concatenate(leaves: Sequence[Any], sizes: Sequence[int]) -> Tensor:
    # Without a row per sample, others count its rows, as offsets of bags do.
    if not all(has_row_per_sample(leaf, size) for leaf, size in zip(leaves, sizes, strict=True)):
        raise UnjoinableError
    if any(leaf.shape[1:] != leaves[0].shape[1:] for leaf in leaves):
        raise UnjoinableError
    return torch.cat(list(leaves))


class RankCollatedData(WrappedData):
    """Samples of other data, collated by a plan's micro-batches."""

    def __init__(self, data: ReferenceData, plan: Plan) -> None:
        super().__init__(data)
        self._plan = plan

    def read(self, step: int, positions: np.ndarray) -> Any:
        parts = [positions_of(part) for part in micro_batches(self._plan, self.samples_in(step))]
        parts = [part for part in parts if np.isin(part, positions).any()]
        joined = join_batches([self._data.read(step, part) for part in parts], [len(part) for part in parts])
        row_of = {position: row for row, position in enumerate(np.concatenate(parts).tolist())}
        rows = [row_of[position] for position in positions.tolist()]
        return joined if rows == list(range(len(row_of))) else map_tensors(lambda t: t[torch.tensor(rows)], joined)


def collate_as_ranks(data: ReferenceData, plan: Plan) -> ReferenceData:
    """`data`, collated as the ranks of `plan` do if that makes a difference."""
    positions, rank_data = np.arange(data.samples_in(0)), RankCollatedData(data, plan)
    if sum(bool(part.size) for part in micro_batches(plan, len(positions))) == 1:
        return data
    try:
        first, second = (digest(rank_data.read(0, positions)) for _ in range(2))
    except UnjoinableError:
        return data
    return rank_data if first == second and first != digest(data.read(0, positions)) else data
