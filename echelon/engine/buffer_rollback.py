"""Undo what forward changed in a model's buffers, for a step that has to be computed again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.engine.buffer_sync import Place, Still


class Rollback:
    """Copies of the buffers that steps change. The first step looks at all of them."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, Place] = {
            f"{path}.{key}" if path else key: (module._buffers, key)
            for path, module in model.named_modules()
            for key, value in module._buffers.items()
            if value is None or not value.is_meta
        }
        #: None: no step has been looked at.
        self._still: Still | None = None
        self._kept: dict[str, tuple[Tensor | None, Tensor | None]] = {}

    def keep(self) -> None:
        """Before a step's first forward."""
        if self._places:
            self._keep()

    @torch.no_grad()
    def _keep(self) -> None:
        if self._still is not None and not self._still.holds():
            self._still = self._still.without(self._still.changed())
        names = self._places if self._still is None else self._places.keys() - self._still.places.keys()
        self._kept = {}
        for name in names:
            owner, key = self._places[name]
            value = owner.get(key)
            self._kept[name] = value, None if value is None else value.clone()
        if self._still is None:
            self._still = Still(self._places)

    @torch.no_grad()
    def undo(self) -> str | None:
        """Put the buffers back as they were at the last `keep`; returns the name of one that changed for the first time and cannot be."""
        if not self._places:
            return None
        assert self._still is not None
        for name, (tensor, value) in self._kept.items():
            owner, key = self._places[name]
            # Not where it is the same: a write would make it one that changes.
            if tensor is not None and value is not None and not torch.equal(tensor, value):
                tensor.copy_(value)
            owner[key] = tensor
        # The copies of this step cover what changed before it.
        return next((name for name in self._still.changed() if name not in self._kept), None)
