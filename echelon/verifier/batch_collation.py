"""Batches for one device where collation mixes samples or draws (mixup, cutmix): collated part by part, as the ranks of a plan do, and joined.

What is mixed with what is the data's affair and follows from the plan's parts, as an augmentation follows from its seed. What is proved is that
the model trains on these numbers as one device would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.data.sample_digest import digest
from echelon.plan.batch_split import split_batch
from echelon.plan.plan import Plan
from echelon.tree import map_tensors, tree_flatten, tree_unflatten
from echelon.verifier.reference_data import ReferenceData


class UnjoinableError(Exception):
    """Batches that do not make one: padded to other lengths, without a row for each sample, or with values of their own."""


def join_batches(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Collated batches, `sizes[i]` samples in the i-th, joined into one; raises Unjoinable."""
    if len(batches) == 1:
        return batches[0]
    trees = [tree_flatten(batch) for batch in batches]
    if any(structure != trees[0][1] for _, structure in trees):
        raise UnjoinableError
    return tree_unflatten(
        [_concatenate(leaves, sizes) for leaves in zip(*(leaves for leaves, _ in trees), strict=True)], trees[0][1]
    )


def _concatenate(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = leaves[0]
    if not isinstance(first, Tensor) or first.dim() == 0:
        raise UnjoinableError
    if any(leaf.shape[1:] != first.shape[1:] for leaf in leaves):
        raise UnjoinableError
    if any(len(leaf) != size for leaf, size in zip(leaves, sizes, strict=True)):
        raise UnjoinableError  # no row of its own for each sample: others count its rows, as offsets of bags do
    return torch.cat(list(leaves))


class RankCollatedData(ReferenceData):
    """Another feed's samples, collated as a plan parts them."""

    def __init__(self, data: ReferenceData, plan: Plan) -> None:
        self._data, self._plan = data, plan
        self.batch_size, self.total_steps = data.batch_size, data.total_steps

    def samples_in(self, step: int) -> int:
        return self._data.samples_in(step)

    def choose_steps(self, count: int) -> tuple[int, ...]:
        return self._data.choose_steps(count)

    def read(self, step: int, positions: np.ndarray) -> Any:
        requested = set(positions.tolist())
        selected = [
            (micro_batch, requested.intersection(micro_batch.tolist()))
            for micro_batch in _micro_batch_positions(self._plan, self.samples_in(step))
        ]
        micro_batches = [micro_batch for micro_batch, positions_in_part in selected if positions_in_part]
        joined_batch = join_batches(
            [self._data.read(step, micro_batch) for micro_batch in micro_batches],
            [len(micro_batch) for micro_batch in micro_batches],
        )
        rows_by_position = {
            batch_position: row
            for row, batch_position in enumerate(
                position
                for micro_batch, positions_in_part in selected
                if positions_in_part
                for position in micro_batch.tolist()
            )
        }
        rows = [rows_by_position[batch_position] for batch_position in positions.tolist()]
        if rows == list(range(len(rows_by_position))):
            return joined_batch
        return map_tensors(lambda value: value[torch.tensor(rows)], joined_batch)


def collate_as_ranks(data: ReferenceData, plan: Plan) -> ReferenceData:
    """`data`, or where it makes a difference the one that collates as the ranks of `plan` do."""
    micro_batches = _micro_batch_positions(plan, data.samples_in(0))
    if len(micro_batches) == 1:
        return data
    try:
        sizes = [len(micro_batch) for micro_batch in micro_batches]
        digest_of_parts, digest_again = (
            digest(join_batches([data.read(0, micro_batch) for micro_batch in micro_batches], sizes)) for _ in range(2)
        )
    except UnjoinableError:
        return data
    digest_of_whole = digest(data.read(0, np.arange(data.samples_in(0))))
    return (
        RankCollatedData(data, plan) if digest_of_parts == digest_again and digest_of_parts != digest_of_whole else data
    )


def _micro_batch_positions(plan: Plan, samples: int) -> list[np.ndarray]:
    ranges_by_rank = split_batch(samples, plan.mesh.dp, plan.micro, plan.data.batch_shares)
    return [
        np.arange(sample_range.start, sample_range.stop)
        for rank_ranges in ranges_by_rank
        for sample_range in rank_ranges
        if sample_range.stop > sample_range.start
    ]
