"""Collate batches for one device as the ranks of a plan do, where collation mixes samples or draws (mixup, cutmix).

Which samples are mixed is up to the data and follows from the plan's micro-batches, as an augmentation follows from its seed. The proof is
that the model trains on the result as one device would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.data.sample_digest import digest
from echelon.plan.plan import Plan
from echelon.tree import map_tensors, tree_flatten, tree_unflatten
from echelon.verifier.reference_data import ReferenceData, WrappedData, has_row_per_sample, micro_batches, positions_of


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
