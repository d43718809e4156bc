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
from echelon.plan.batch_split import split
from echelon.plan.plan import Plan
from echelon.tree import map_tensors, tree_flatten, tree_unflatten
from echelon.verifier.reference_data import Feed


class Unjoinable(Exception):  # noqa: N818 (says of batches what they are)
    """Batches that do not make one: padded to other lengths, without a row for each sample, or with values of their own."""


def joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Collated batches, `sizes[i]` samples in the i-th, joined into one; raises Unjoinable."""
    if len(parts) == 1:
        return parts[0]
    trees = [tree_flatten(part) for part in parts]
    if any(structure != trees[0][1] for _, structure in trees):
        raise Unjoinable
    return tree_unflatten(
        [_together(leaves, sizes) for leaves in zip(*(leaves for leaves, _ in trees), strict=True)], trees[0][1]
    )


def _together(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = leaves[0]
    if not isinstance(first, Tensor) or first.dim() == 0:
        raise Unjoinable
    if any(leaf.shape[1:] != first.shape[1:] for leaf in leaves):
        raise Unjoinable
    if any(len(leaf) != size for leaf, size in zip(leaves, sizes, strict=True)):
        raise Unjoinable  # no row of its own for each sample: others count its rows, as offsets of bags do
    return torch.cat(list(leaves))


class Parted(Feed):
    """Another feed's samples, collated as a plan parts them."""

    def __init__(self, feed: Feed, plan: Plan) -> None:
        self._feed, self._plan = feed, plan
        self.batch, self.total = feed.batch, feed.total

    def size(self, step: int) -> int:
        return self._feed.size(step)

    def steps(self, count: int) -> tuple[int, ...]:
        return self._feed.steps(count)

    def take(self, step: int, positions: np.ndarray) -> Any:
        wanted = set(positions.tolist())
        found = [(part, wanted.intersection(part.tolist())) for part in _parts(self._plan, self.size(step))]
        parts = [part for part, some in found if some]
        whole = joined([self._feed.take(step, part) for part in parts], [len(part) for part in parts])
        places = {
            number: place for place, number in enumerate(n for part, some in found if some for n in part.tolist())
        }
        rows = [places[number] for number in positions.tolist()]
        if rows == list(range(len(places))):
            return whole
        return map_tensors(lambda value: value[torch.tensor(rows)], whole)


def as_ranks_collate(feed: Feed, plan: Plan) -> Feed:
    """`feed`, or where it makes a difference the one that collates as the ranks of `plan` do."""
    parts = _parts(plan, feed.size(0))
    if len(parts) == 1:
        return feed
    try:
        sizes = [len(part) for part in parts]
        apart, again = (digest(joined([feed.take(0, part) for part in parts], sizes)) for _ in range(2))
    except Unjoinable:
        return feed
    whole = digest(feed.take(0, np.arange(feed.size(0))))
    return Parted(feed, plan) if apart == again and apart != whole else feed


def _parts(plan: Plan, size: int) -> list[np.ndarray]:
    shares = split(size, plan.mesh.dp, plan.micro, plan.shares)
    return [np.arange(part.start, part.stop) for share in shares for part in share if part.stop > part.start]
