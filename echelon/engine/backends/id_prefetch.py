"""Predict the embedding ids of a batch, to prefetch rows before forward asks for them.

The first step shows which part of the batch reaches a table unchanged (a tensor of it, some columns of one); the same part of later batches
is fetched in one message before they are computed. Ids that reach a table in other ways (hashed, cast, gathered) are fetched in forward: slower,
with the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.tree import tree_leaves


@dataclass(frozen=True, slots=True)
class BatchView:
    """A part of a batch: of the leaf `leaf_index`, from `offset` on, with these strides; the first dim is the samples'."""

    leaf_index: int
    offset: int
    shape: tuple[int, ...]  #: without the samples' dim
    strides: tuple[int, ...]  #: with it
    is_flat: bool = False  #: all of the tensor, in one dim

    def extract(self, leaves: Sequence[Any]) -> Tensor | None:
        """The same part of another batch; None where it has none."""
        source = leaves[self.leaf_index] if self.leaf_index < len(leaves) else None
        if not isinstance(source, Tensor) or source.dim() == 0:
            return None
        if self.is_flat:
            return source.reshape(-1)
        extents = [(size - 1) * stride for size, stride in zip(self.shape, self.strides[1:], strict=True)]
        last_element = self.offset + sum(extents)
        if source.stride(0) != self.strides[0] or not source.numel() or last_element >= max(source.stride(0), 1):
            return None
        return source.as_strided((source.shape[0], *self.shape), self.strides, source.storage_offset() + self.offset)


def find_batch_view(ids: Tensor, leaves: Sequence[Any]) -> BatchView | None:
    """Where in the batch the ids come from; None: they were computed from it."""
    storage_address = ids.untyped_storage().data_ptr()
    for leaf_index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.dtype != ids.dtype:
            continue
        if leaf.untyped_storage().data_ptr() != storage_address or not storage_address:
            continue
        offset = int(ids.storage_offset()) - int(leaf.storage_offset())
        if offset == 0 and ids.numel() == leaf.numel() and ids.is_contiguous() and leaf.is_contiguous():
            return BatchView(leaf_index, 0, (), (), is_flat=True)
        if ids.dim() and ids.shape[0] == leaf.shape[0] and ids.stride(0) == leaf.stride(0) and offset >= 0:
            return BatchView(leaf_index, offset, tuple(ids.shape[1:]), tuple(ids.stride()))
    return None


class IdPredictor:
    """Learns which parts of a batch reach which tables."""

    def __init__(self) -> None:
        #: By table; None: some of its ids were computed from the batch.
        self._views: dict[str, set[BatchView] | None] = {}
        self._batch_leaves: list[Any] = []

    def set_micro_batch(self, batch: Any) -> None:
        """Set the batch of the next forward, as the model gets it."""
        self._batch_leaves = tree_leaves(batch)

    def observe_lookup(self, table: str, ids: Tensor) -> None:
        """Learn from a lookup in forward."""
        views = self._views.setdefault(table, set())
        if views is None:
            return
        view = find_batch_view(ids, self._batch_leaves)
        if view is None:
            self._views[table] = None
        else:
            views.add(view)

    def predict_ids(self, batches: Sequence[Any]) -> Mapping[str, np.ndarray]:
        """By table the unique ids that these batches will read, in order; unpredictable tables are left out."""
        predicted, batch_leaves = {}, list(map(tree_leaves, batches))
        for table, views in self._views.items():
            extracted = [view.extract(leaves) for leaves in batch_leaves for view in views or ()]
            ids = [part.reshape(-1) for part in extracted if part is not None]
            if ids:
                predicted[table] = torch.unique(torch.cat(ids)).cpu().long().numpy()
        return predicted
