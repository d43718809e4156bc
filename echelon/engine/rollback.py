"""Undo what forward changed in a model's buffers, for a step that has to be computed again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.engine.buffers import Place, Still

#: A tensor, and what it held.
_Copy = tuple[Tensor | None, Tensor | None]


#: Of a buffer that no step has changed a copy is kept up to this size in bytes.
_LARGEST = 2**26


class Rollback:
    """Copies of the buffers: of those that steps change one for each step, of the others one for all."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, Place] = {
            f"{path}.{key}" if path else key: (module._buffers, key)
            for path, module in model.named_modules()
            for key, value in module._buffers.items()
            if value is None or not value.is_meta
        }
        #: None: no step has been looked at.
        self._still: Still | None = None
        self._kept: dict[str, _Copy] = {}
        self._constant: dict[str, _Copy] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Before a step's first forward."""
        if self._still is None:
            self._still = Still(self._places)
            self._kept = {name: self._copy(name) for name in self._places}
            self._constant = {name: each for name, each in self._kept.items() if _is_small(each[0])}
            return
        if not self._still.holds():
            self._still = self._still.without(self._still.changed())
            self._constant = {name: each for name, each in self._constant.items() if name in self._still.places}
        self._kept = {name: self._copy(name) for name in self._places if name not in self._still.places}

    def _copy(self, name: str) -> _Copy:
        owner, key = self._places[name]
        value = owner.get(key)
        return value, None if value is None else value.clone()

    def missing(self) -> str | None:
        """The name of a buffer that changed since the last `keep` and of which there is no copy."""
        assert self._still is not None
        known = self._kept.keys() | self._constant.keys()
        return next((name for name in self._still.changed() if name not in known), None)

    @torch.no_grad()
    def undo(self) -> None:
        """Put the buffers back as they were at the last `keep`."""
        assert self._still is not None
        changed = {name: self._constant[name] for name in self._still.changed() if name in self._constant}
        for name, (tensor, value) in (self._kept | changed).items():
            owner, key = self._places[name]
            # Not where it is the same: a write would make it one that changes.
            if tensor is not None and value is not None and not torch.equal(tensor, value):
                tensor.copy_(value)
            owner[key] = tensor


def _is_small(tensor: Tensor | None) -> bool:
    return tensor is None or tensor.nbytes <= _LARGEST
