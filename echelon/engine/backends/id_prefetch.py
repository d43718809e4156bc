"""Which rows a batch will read, before forward has read them.

In the first step it is seen which part of the batch reaches a table untouched (a tensor of it, some columns of one). Of later batches the
same part is taken before they are computed, so that all rows come in one message, and those of the next batch while this one is at work.
What reaches a table in other ways (hashed, cast, gathered) is asked for in forward: slower, and the same numbers.
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
class View:
    """A part of a batch: of the tensor number `leaf`, from `offset` on, with these strides; the first dim is the samples'."""

    leaf: int
    offset: int
    shape: tuple[int, ...]  #: without the samples' dim
    strides: tuple[int, ...]  #: with it
    flat: bool = False  #: all of the tensor, in one dim

    def of(self, leaves: Sequence[Any]) -> Tensor | None:
        """That part of another batch; None where it has none."""
        source = leaves[self.leaf] if self.leaf < len(leaves) else None
        if not isinstance(source, Tensor) or source.dim() == 0:
            return None
        if self.flat:
            return source.reshape(-1)
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides[1:], strict=True))
        if source.stride(0) != self.strides[0] or not source.numel() or last >= max(source.stride(0), 1):
            return None
        return source.as_strided((source.shape[0], *self.shape), self.strides, source.storage_offset() + self.offset)


def find(ids: Tensor, leaves: Sequence[Any]) -> View | None:
    """Where in the batch the ids come from; None: they were made from it."""
    home = ids.untyped_storage().data_ptr()
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.dtype != ids.dtype:
            continue
        if leaf.untyped_storage().data_ptr() != home or not home:
            continue
        offset = int(ids.storage_offset()) - int(leaf.storage_offset())
        if offset == 0 and ids.numel() == leaf.numel() and ids.is_contiguous() and leaf.is_contiguous():
            return View(number, 0, (), (), flat=True)
        if ids.dim() and ids.shape[0] == leaf.shape[0] and ids.stride(0) == leaf.stride(0) and offset >= 0:
            return View(number, offset, tuple(ids.shape[1:]), tuple(ids.stride()))
    return None


class Foresight:
    """What was learned of how batches reach tables."""

    def __init__(self) -> None:
        self._views: dict[str, set[View]] = {}
        self._leaves: list[Any] = []
        #: Tables some of whose ids were made from the batch.
        self._hidden: set[str] = set()

    def look(self, batch: Any) -> None:
        """The next forwards are of this batch, as the model gets it."""
        self._leaves = tree_leaves(batch)

    def note(self, table: str, ids: Tensor) -> None:
        """A table is read."""
        if table in self._hidden:
            return
        view = find(ids, self._leaves)
        if view is None:
            self._hidden.add(table)
            self._views.pop(table, None)
        else:
            self._views.setdefault(table, set()).add(view)

    def ids(self, batches: Sequence[Any]) -> Mapping[str, np.ndarray]:
        """By table the ids that these batches will read, each once, in order; tables that are not foreseen are left out."""
        found: dict[str, list[Tensor]] = {}
        for leaves in map(tree_leaves, batches):
            for table, views in self._views.items():
                for view in views:
                    part = view.of(leaves)
                    if part is not None:
                        found.setdefault(table, []).append(part.reshape(-1))
        return {table: torch.unique(torch.cat(parts)).cpu().long().numpy() for table, parts in found.items()}
