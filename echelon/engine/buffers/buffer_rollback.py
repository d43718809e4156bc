"""Undo what forward changed in a model's buffers, before a step is computed again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.engine.buffers.buffer_sync import BufferVersions
from echelon.engine.buffers.slots import named_slots


class BufferRollback:
    """Copies of the buffers that steps change; before the first step, of all of them."""

    def __init__(self, model: nn.Module) -> None:
        slots = {name: slot for name, _, slot in named_slots(model)}
        self._slots = {n: slot for n, slot in slots.items() if slot.tensor is None or not slot.tensor.is_meta}
        #: Buffers that no step has changed; None before the first step.
        self._constants: BufferVersions | None = None
        self._saved: dict[str, tuple[Tensor | None, Tensor | None]] = {}

    @torch.no_grad()
    def save(self) -> None:
        """Before a step's first forward."""
        if self._constants is not None and not self._constants.is_unchanged():
            self._constants = self._constants.without(self._constants.changed_names())
        names = self._slots if self._constants is None else self._slots.keys() - self._constants.slots.keys()
        self._saved = {}
        for name in names:
            buffer = self._slots[name].tensor
            self._saved[name] = buffer, None if buffer is None else buffer.clone()
        if self._constants is None:
            self._constants = BufferVersions(self._slots)

    @torch.no_grad()
    def undo(self) -> str | None:
        """Restore the buffers of the last `save`; returns the name of one that changed for the first time and has no copy."""
        assert self._constants is not None
        for name, (buffer, copy) in self._saved.items():
            buffers, key = self._slots[name]
            # Not where they are equal: a write would make it one that changes.
            if buffer is not None and copy is not None and not torch.equal(buffer, copy):
                buffer.copy_(copy)
            buffers[key] = buffer
        # The copies of this step cover what changed before it.
        return next((name for name in self._constants.changed_names() if name not in self._saved), None)
