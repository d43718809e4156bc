"""Find out whether the loss reads state that depends on how batches are divided.

A loss, or `inputs`, may keep values between calls: a log of losses, which no call reads, or a memory of each sample (ELR, temporal ensembling,
self-paced learning), which a later epoch reads, perhaps on another rank. The first steps agree in both cases. So the last step's forward and
backward are repeated with each rank's own state, then with that of the first rank, of the last rank, and of the reference, which computed
whole batches. If a loss or gradient changes with the state, the loss reads it, and the plan is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.engine.checkpoint.function_state import (
    FunctionState,
    describe_slot,
    find_differing_slots,
    snapshot_functions,
)
from echelon.engine.checkpoint.reachable_state import SlotName, StateChanges
from echelon.errors import DivergenceError
from echelon.plan.certificate import Finding
from echelon.tree import tree_tensors
from echelon.verifier.candidate_run import CandidateRun
from echelon.verifier.context import Objection
from echelon.verifier.forward_state import ForwardState
from echelon.verifier.reference import Reference

#: Relative to the loss, or to the largest gradient: smaller differences do not count as reading.
_READ_BOUND = 1e-9
#: Nor do differences below this many times that of two equal passes.
_NOISE_FACTOR = 16
#: Slots that are tried one by one, to report those that are read.
_MAX_NAMED = 8


def find_divergent_loss_state(candidate: CandidateRun, step: int, reference: Reference | None) -> Objection | None:
    """State of the loss that differs and is read; the same on every rank. `step`: the last one. `reference`: on rank 0, if there is one."""
    run = candidate.run
    if run.data_parallel.size == 1 and len(candidate.read_batch(step).micro_batches) == 1:
        return None
    with candidate.active():
        digests = run.attributes.functions.digest_changes()
    changed = list(dict.fromkeys(slot for slots in run.ranks.all_gather_object(list(digests)) for slot in slots))
    if not changed:
        return None
    differing = find_differing_slots(run.data_parallel.all_gather_object(digests))
    reference_values: StateChanges | None = None
    with run.ranks.raise_on_all_ranks():
        if run.world.is_main and reference is not None:
            with reference.active():
                reference_values = FunctionState(reference.job, reference.model).read_slots(changed)
    reference_values = run.ranks.broadcast_object(reference_values)
    with candidate.active():
        return _LossStateProbe(candidate, step).find(differing, reference_values)


class _LossStateProbe:
    def __init__(self, candidate: CandidateRun, step: int) -> None:
        self._candidate, self._run, self._step = candidate, candidate.run, step
        self._functions = self._run.attributes.functions
        self._model_state = ForwardState(self._run.model)
        self._restore_functions = snapshot_functions(self._run.job, self._run.model)
        self._failed = False

    def find(self, differing: Sequence[SlotName], reference_values: StateChanges | None) -> Objection | None:
        """`differing`: slots in which the data ranks differ. `reference_values`: the reference's."""
        ranks, data = self._run.ranks, self._run.data_parallel
        own_pass = self._repeat_with({})
        noise = self._difference(own_pass, self._repeat_with({}))
        states_by_rank: list[StateChanges] = []
        if any(ranks.all_gather_object(bool(differing))):
            states_by_rank = data.all_gather_object(self._functions.read_slots(differing))
        cause = f"the {data.size} data ranks hold different values, each from its own samples"
        candidates = [(state, cause) for state in states_by_rank[:1] + states_by_rank[-1:]]
        if reference_values:
            cause = "calls with parts of a batch leave other values than one call with the whole"
            candidates.append((reference_values, cause))
        for state, cause in candidates:
            if self._is_read(state, own_pass, noise):
                return self._describe(state, cause, own_pass, noise)
        return None

    def _describe(self, state: StateChanges, cause: str, own_pass: list[Tensor], noise: float) -> Objection:
        slots_by_rank = self._run.ranks.all_gather_object(list(state))
        slots: list[SlotName] = list(dict.fromkeys(slot for rank_slots in slots_by_rank for slot in rank_slots))
        named = slots[:_MAX_NAMED]
        if len(slots) > 1:
            named = [
                slot for slot in named if self._is_read({slot: state[slot]} if slot in state else {}, own_pass, noise)
            ] or named
        locations = list(dict.fromkeys(map(describe_slot, named)))
        difference, step = self._difference(own_pass, self._repeat_with(state)), self._step + 1
        where, count = f"{locations[0]} (step {step})", len(locations)
        return Objection(
            description=f"{', '.join(locations)} (step {step}): the loss reads what it keeps there between calls, and {cause}; make it a buffer of "
            "the model, or keep batches whole (dp=1 without micro)",
            finding=Finding(kind="state", tensors=count, max_difference=difference, where=where, bound=_READ_BOUND),
        )

    def _is_read(self, state: StateChanges, own_pass: list[Tensor], noise: float) -> bool:
        other_pass = self._repeat_with(state)
        failed = any(self._run.ranks.all_gather_object(self._failed))
        return not failed and self._difference(own_pass, other_pass) > max(_READ_BOUND, _NOISE_FACTOR * noise)

    def _repeat_with(self, state: StateChanges) -> list[Tensor]:
        """Loss and gradients with this state in place of the rank's own."""
        run = self._run
        self._restore()
        self._failed = bool(state) and not self._functions.write_slots(state, run.device)
        if self._failed:
            self._restore()
        guarded_job = dataclasses.replace(run.job, loss=self._guard_loss(run.job.loss))
        try:
            with run.using_job(guarded_job):
                return self._candidate.repeat_backward(self._step)
        except DivergenceError:  # on every rank: a part of the batch has another kind of loss now
            self._failed = True
            return []
        finally:
            self._restore()

    def _restore(self) -> None:
        self._model_state.restore()
        self._restore_functions()

    def _guard_loss(self, loss: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """The loss, or NaN where it fails on state of other shapes: the other ranks wait for this one's gradient."""
        if loss is None:
            return None

        def guarded(output: Any, batch: Any) -> Any:
            try:
                return loss(output, batch)
            except Exception:
                self._failed = True
                tensors = [tensor for tensor in tree_tensors(output) if tensor.is_floating_point()]
                return torch.stack([tensor.sum() for tensor in tensors]).sum() * torch.nan

        return guarded

    def _difference(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
        difference = 1.0
        if [value.shape for value in first] == [value.shape for value in second]:
            difference = max(_scaled_difference(first[:1], second[:1]), _scaled_difference(first[1:], second[1:]))
        return max(self._run.ranks.all_gather_object(difference))


def _scaled_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.numel()]
    largest = max((float(tensor.abs().max()) for pair in pairs for tensor in pair), default=0.0)
    difference = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    return difference / largest if largest > 0 else 0.0
