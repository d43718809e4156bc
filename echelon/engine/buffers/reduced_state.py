"""State that forward changes by a known rule, with the values that it has on one device, which calls the model once a step.

Each part of the batch starts from the state before the step. The results are reduced over micro-batches here and over ranks in the step's message:

    same       equal, whatever the samples are         a counter of calls, spectral norm, a teacher's weights
    mean       averaged over samples                   a running mean, a center
    sum        changes are summed                      a counter of samples, a histogram
    max, min   the largest or smallest                 an observer of ranges
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from echelon.engine.buffers.slots import find_state_slots, make_writable
from echelon.engine.process_groups import Communicator

RULES = ("same", "mean", "sum", "max", "min")


class ReducedState:
    """The state of one model whose rules are known."""

    resync_flag: Tensor | None = None

    def __init__(self, model: nn.Module, ranks: Communicator, rules: Mapping[str, str]) -> None:
        slots = find_state_slots(model)
        self._slots = {name: slots[name] for name in rules if name in slots}
        self.rules = {name: rules[name] for name in self._slots}
        self._ranks = ranks
        self._before: dict[str, Tensor] = {}
        self._accumulated: dict[str, Tensor] = {}
        # The largest of ranks' values is not a sum: each rank sends its own in a place of its own.
        sent = {name: rule for name, rule in self.rules.items() if rule != "same"}
        copies = {name: ranks.size if rule in ("max", "min") else 1 for name, rule in sent.items()}
        self._packed_numels = {name: self._tensor(name).numel() * count for name, count in copies.items()}
        self.size = sum(self._packed_numels.values())

    def _tensor(self, name: str) -> Tensor:
        return make_writable(self._slots[name])

    @torch.no_grad()
    def begin_step(self) -> None:
        """Before the step's first forward."""
        self._before = {name: self._tensor(name).detach().clone() for name in self.rules}
        self._accumulated = {}

    @torch.no_grad()
    def begin_micro_batch(self) -> None:
        """Before a later micro-batch's forward: restore the state."""
        if self._accumulated:
            for name, value in self._before.items():
                self._tensor(name).copy_(value)

    @torch.no_grad()
    def end_micro_batch(self, sample_fraction: float) -> None:
        """After a micro-batch's forward; `sample_fraction`: its part of the batch's samples."""
        for name, rule in self.rules.items():
            value = self._tensor(name).detach().to(torch.float64, copy=True)
            accumulated = self._accumulated.get(name)
            if rule == "mean":
                value = value * sample_fraction
            elif rule == "sum":
                value = value - self._before[name].double()
            if accumulated is not None and rule != "same":
                reduce = {"max": torch.maximum, "min": torch.minimum}.get(rule, torch.add)
                value = reduce(accumulated, value)
            self._accumulated[name] = value

    def pack(self) -> Tensor:
        """What this rank adds to the step's message."""
        values = [self._packed_value(name).to(self._ranks.device) for name in self._packed_numels]
        return torch.cat(values) if values else torch.zeros(0, dtype=torch.float64, device=self._ranks.device)

    def _packed_value(self, name: str) -> Tensor:
        value = self._accumulated[name].reshape(-1)
        if self.rules[name] not in ("max", "min"):
            return value
        rank_values = value.new_zeros(self._ranks.size, len(value))
        rank_values[self._ranks.rank] = value
        return rank_values.view(-1)

    @torch.no_grad()
    def unpack(self, sums: Tensor) -> None:
        """Take the values of all ranks."""
        for name, value in zip(self._packed_numels, sums.split(list(self._packed_numels.values())), strict=True):
            tensor, rule = self._tensor(name), self.rules[name]
            if rule in ("max", "min"):
                rank_values = value.view(self._ranks.size, -1)
                value = rank_values.amax(0) if rule == "max" else rank_values.amin(0)
            elif rule == "sum":
                value = value + self._before[name].double().reshape(-1).to(value)
            value = value if tensor.is_floating_point() else value.round()
            tensor.copy_(value.view_as(tensor))

    def resync(self) -> None:
        """Nothing is deferred here."""
