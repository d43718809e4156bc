"""Find out whether the loss reads state that depends on how batches are divided.

A loss, or `inputs`, may keep values between calls: a log of losses, which no call reads, or a memory of each sample (ELR, temporal ensembling,
self-paced learning), which a later epoch reads, perhaps on another rank. The first steps agree in both cases. So after them:

    1  digests of what calls changed are gathered from the data ranks
    2  the last step's forward and backward are repeated with each rank's own state, then with the state of the first rank, of the last rank,
       and of the reference, which got whole batches
    3  a loss or gradient that changes with the state shows that the loss reads it: the plan is refused
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.engine.checkpoint.function_state import (
    FunctionState,
    SlotName,
    describe_slot,
    find_differing_slots,
    snapshot_functions,
)
from echelon.engine.checkpoint.held_state import StateChanges
from echelon.engine.checkpoint.run_attributes import read_trainable, set_trainable, snapshot_model
from echelon.engine.parallel.shard_layout import to_local
from echelon.errors import DivergenceError
from echelon.plan.certificate import Finding
from echelon.verifier.candidate_run import CandidateRun
from echelon.verifier.reference import Reference

#: Of the loss, or of the largest gradient: smaller differences do not count as reading.
_READ_BOUND = 1e-9
#: How many times the difference between two equal passes another one must be.
_NOISE_FACTOR = 16
#: Places that are tried one by one, to name those that are read.
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergentLossState:
    """State that the loss reads and that ranks or micro-batches do not keep as one device does."""

    locations: tuple[str, ...]
    cause: str
    largest_difference: float
    step: int

    @property
    def description(self) -> str:
        """Where and why, for the certificate."""
        locations = ", ".join(self.locations)
        return (
            f"{locations} (step {self.step}): the loss reads what it keeps there between calls, and {self.cause}; make it a buffer of the model, "
            "or keep batches whole (dp=1 without micro)"
        )

    @property
    def finding(self) -> Finding:
        """For the certificate."""
        where = f"{self.locations[0]} (step {self.step})"
        return Finding(
            kind="state",
            tensors=len(self.locations),
            max_difference=self.largest_difference,
            where=where,
            bound=_READ_BOUND,
        )


def find_divergent_loss_state(
    candidate: CandidateRun, step: int, reference: Reference | None
) -> DivergentLossState | None:
    """State of the loss that differs and is read; the same on every rank. `step`: the last step. `reference`: rank 0's, if there is one."""
    run = candidate.run
    if run.data_parallel.size == 1 and len(candidate.read_batch(step).micro_batches) == 1:
        return None
    with candidate.active():
        fingerprints = run.attributes.functions.digest_changes()
    changed = list(dict.fromkeys(slot for slots in run.ranks.all_gather_object(list(fingerprints)) for slot in slots))
    if not changed:
        return None
    differing = find_differing_slots(run.data_parallel.all_gather_object(fingerprints))
    with run.ranks.raise_on_all_ranks():
        reference_values = _read_reference_values(reference, changed) if run.world.is_main else None
    reference_values = run.ranks.all_gather_object(reference_values)[0]
    with candidate.active():
        return _LossStateProbe(candidate, step).find(differing, reference_values)


def _read_reference_values(reference: Reference | None, slots: Sequence[SlotName]) -> StateChanges | None:
    if reference is None:
        return None
    with reference.active():
        return FunctionState(reference.job, reference.model).read_slots(slots)


class _LossStateProbe:
    """Repeats a step with other state of the loss."""

    def __init__(self, candidate: CandidateRun, step: int) -> None:
        self._candidate, self._run, self._step = candidate, candidate.run, step
        self._functions = self._run.attributes.functions
        self._restore = _snapshot_candidate(candidate)
        self._failed = False

    def find(self, differing: Sequence[SlotName], reference_values: StateChanges | None) -> DivergentLossState | None:
        """`differing`: places that the data ranks hold differently. `reference_values`: what the reference holds."""
        ranks, data = self._run.ranks, self._run.data_parallel
        own_pass = self._repeat_with({})
        noise = self._difference(own_pass, self._repeat_with({}))
        values_by_rank: list[StateChanges] = (
            data.all_gather_object(self._functions.read_slots(differing))
            if any(ranks.all_gather_object(bool(differing)))
            else []
        )
        cause = f"the {data.size} data ranks hold different values, each from its own samples"
        candidates = [(values, cause) for values in (values_by_rank[:1] + values_by_rank[-1:])]
        if reference_values:
            candidates.append(
                (reference_values, "calls with parts of a batch leave other values than one call with the whole")
            )
        for state, cause in candidates:
            if self._is_read(state, own_pass, noise):
                return self._describe(state, cause, own_pass, noise)
        return None

    def _describe(self, state: StateChanges, cause: str, own_pass: list[Tensor], noise: float) -> DivergentLossState:
        ranks = self._run.ranks
        slots = list(dict.fromkeys(
            slot for rank_slots in ranks.all_gather_object([(name, label) for name, labels in state.items() for label in labels]) for slot in rank_slots
        ))  # fmt: skip
        read_slots = [
            slot
            for slot in slots[:_MAX_NAMED]
            if len(slots) > 1 and self._is_read(_select_slot(state, slot), own_pass, noise)
        ]
        locations = tuple(dict.fromkeys(describe_slot(slot) for slot in read_slots or slots[:_MAX_NAMED]))
        largest_difference = self._difference(own_pass, self._repeat_with(state))
        return DivergentLossState(
            locations=locations, cause=cause, largest_difference=largest_difference, step=self._step + 1
        )

    def _is_read(self, state: StateChanges, own_pass: list[Tensor], noise: float) -> bool:
        """Whether the step computes something else with this state; a pass that fails shows nothing."""
        other_pass = self._repeat_with(state)
        failed = any(self._run.ranks.all_gather_object(self._failed))
        return not failed and self._difference(own_pass, other_pass) > max(_READ_BOUND, _NOISE_FACTOR * noise)

    def _repeat_with(self, state: StateChanges) -> list[Tensor]:
        """Loss and gradients with this state in the place of the rank's own."""
        run = self._run
        self._failed = False
        self._restore()
        if state and not self._functions.write_slots(state, run.device):
            self._failed = True
            self._restore()
        own_job, run.job = run.job, dataclasses.replace(run.job, loss=self._guard_loss(run.job.loss))
        try:
            return self._candidate.repeat_backward(self._step)
        except DivergenceError:  # on every rank: a part of the batch has another kind of loss now
            self._failed = True
            return []
        finally:
            run.job = own_job
            self._restore()

    def _guard_loss(self, loss: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """The loss, or a NaN where it fails with state of other shapes: the other ranks wait for this one's gradient."""
        if loss is None:
            return None

        def guarded(output: Any, batch: Any) -> Any:
            try:
                return loss(output, batch)
            except Exception:
                self._failed = True
                tensors = [
                    tensor
                    for tensor in tree_leaves(output)
                    if isinstance(tensor, Tensor) and tensor.is_floating_point()
                ]
                return torch.stack([tensor.sum() for tensor in tensors]).sum() * torch.nan

        return guarded

    def _difference(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
        """How far two passes are apart on any rank: of the loss, or of the largest gradient."""
        return max(self._run.ranks.all_gather_object(_relative_difference(first, second)))


def _relative_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    if len(first) != len(second) or any(a.shape != b.shape for a, b in zip(first, second, strict=True)):
        return 1.0
    loss, grads = (_scaled_difference([first[0]], [second[0]]), _scaled_difference(first[1:], second[1:]))
    return max(loss, grads)


def _scaled_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.numel()]
    largest = max((float(tensor.abs().max()) for pair in pairs for tensor in pair), default=0.0)
    difference = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    return difference / largest if largest > 0 else 0.0


def _select_slot(state: StateChanges, slot: SlotName) -> StateChanges:
    name, label = slot
    return {name: {label: state[name][label]}} if label in state.get(name, {}) else {}


@torch.no_grad()
def _snapshot_candidate(candidate: CandidateRun) -> Callable[[], None]:
    """Note what a pass changes on this rank; returns what puts it back."""
    run = candidate.run
    model_tensors = [value for value in (*run.model.parameters(), *run.model.buffers()) if not value.is_meta]
    tensors = [(to_local(value.detach()), to_local(value.detach()).clone()) for value in model_tensors]
    attributes, trainable_flags, restore_functions = (
        snapshot_model(run.model),
        read_trainable(run.model),
        snapshot_functions(run.job, run.model),
    )

    @torch.no_grad()
    def restore() -> None:
        attributes.restore()
        for value, copy in tensors:
            if not torch.equal(value, copy):
                value.copy_(copy)
        set_trainable(run.model, trainable_flags)
        restore_functions()

    return restore
