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

from echelon.engine.checkpoint.function_state import FunctionState, Place, in_words, places_apart, snapshot
from echelon.engine.checkpoint.held_state import Changes
from echelon.engine.checkpoint.run_attributes import model_snapshot, set_trainable, trainable
from echelon.engine.parallel.shard_layout import local
from echelon.errors import DivergenceError
from echelon.plan.certificate import Finding
from echelon.verifier.candidate_run import Trial
from echelon.verifier.reference import Reference

#: Of the loss, or of the largest gradient: smaller differences do not count as reading.
_BOUND = 1e-9
#: How many times the difference between two equal passes another one must be.
_ROUNDINGS = 16
#: Places that are tried one by one, to name those that are read.
_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadState:
    """State that the loss reads and that ranks or micro-batches do not keep as one device does."""

    names: tuple[str, ...]
    cause: str
    worst: float
    step: int

    @property
    def words(self) -> str:
        """Where and why, for the certificate."""
        names = ", ".join(self.names)
        return (
            f"{names} (step {self.step}): the loss reads what it keeps there between calls, and {self.cause}; make it a buffer of the model, "
            "or keep batches whole (dp=1 without micro)"
        )

    @property
    def finding(self) -> Finding:
        """For the certificate."""
        where = f"{self.names[0]} (step {self.step})"
        return Finding(kind="state", tensors=len(self.names), worst=self.worst, where=where, bound=_BOUND)


def find_read_state(trial: Trial, number: int, reference: Reference | None) -> ReadState | None:
    """State of the loss that differs and is read; the same on every rank. `number`: the last step. `reference`: rank 0's, if there is one."""
    run = trial.run
    if run.data.size == 1 and len(trial.batch(number).micros) == 1:
        return None
    with trial.switched():
        mine = run.attributes.functions.fingerprints()
    changed = list(dict.fromkeys(place for each in run.ranks.gather(list(mine)) for place in each))
    if not changed:
        return None
    apart = places_apart(run.data.gather(mine))
    with run.ranks.together():
        whole = _reference_values(reference, changed) if run.world.main else None
    whole = run.ranks.gather(whole)[0]
    with trial.switched():
        return _Probe(trial, number).find(apart, whole)


def _reference_values(reference: Reference | None, places: Sequence[Place]) -> Changes | None:
    if reference is None:
        return None
    with reference.active():
        return FunctionState(reference.job, reference.model).values(places)


class _Probe:
    """Repeats a step with other state of the loss."""

    def __init__(self, trial: Trial, number: int) -> None:
        self._trial, self._run, self._number = trial, trial.run, number
        self._functions = self._run.attributes.functions
        self._start = _start(trial)
        self._failed = False

    def find(self, apart: Sequence[Place], whole: Changes | None) -> ReadState | None:
        """`apart`: places that the data ranks hold differently. `whole`: what the reference holds."""
        ranks, data = self._run.ranks, self._run.data
        own = self._passed({})
        noise = self._difference(own, self._passed({}))
        everyone: list[Changes] = data.gather(self._functions.values(apart)) if any(ranks.gather(bool(apart))) else []
        cause = f"the {data.size} data ranks hold different values, each from its own samples"
        candidates = [(each, cause) for each in (everyone[:1] + everyone[-1:])]
        if whole:
            candidates.append((whole, "calls with parts of a batch leave other values than one call with the whole"))
        for state, cause in candidates:
            if self._reads(state, own, noise):
                return self._named(state, cause, own, noise)
        return None

    def _named(self, state: Changes, cause: str, own: list[Tensor], noise: float) -> ReadState:
        ranks = self._run.ranks
        places = list(dict.fromkeys(
            place for each in ranks.gather([(name, label) for name, labels in state.items() for label in labels]) for place in each
        ))  # fmt: skip
        read = [place for place in places[:_NAMED] if len(places) > 1 and self._reads(_only(state, place), own, noise)]
        names = tuple(dict.fromkeys(in_words(place) for place in read or places[:_NAMED]))
        worst = self._difference(own, self._passed(state))
        return ReadState(names=names, cause=cause, worst=worst, step=self._number + 1)

    def _reads(self, state: Changes, own: list[Tensor], noise: float) -> bool:
        """Whether the step computes something else with this state; a pass that fails shows nothing."""
        found = self._passed(state)
        failed = any(self._run.ranks.gather(self._failed))
        return not failed and self._difference(own, found) > max(_BOUND, _ROUNDINGS * noise)

    def _passed(self, state: Changes) -> list[Tensor]:
        """Loss and gradients with this state in the place of the rank's own."""
        run = self._run
        self._failed = False
        self._start()
        if state and not self._functions.adopt(state, run.device):
            self._failed = True
            self._start()
        own, run.job = run.job, dataclasses.replace(run.job, loss=self._guarded(run.job.loss))
        try:
            return self._trial.repeat(self._number)
        except DivergenceError:  # on every rank: a part of the batch has another kind of loss now
            self._failed = True
            return []
        finally:
            run.job = own
            self._start()

    def _guarded(self, loss: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """The loss, or a NaN where it fails with state of other shapes: the other ranks wait for this one's gradient."""
        if loss is None:
            return None

        def guarded(output: Any, batch: Any) -> Any:
            try:
                return loss(output, batch)
            except Exception:
                self._failed = True
                found = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]
                return torch.stack([each.sum() for each in found]).sum() * torch.nan

        return guarded

    def _difference(self, one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
        """How far two passes are apart on any rank: of the loss, or of the largest gradient."""
        return max(self._run.ranks.gather(_relative(one, other)))


def _relative(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    if len(one) != len(other) or any(a.shape != b.shape for a, b in zip(one, other, strict=True)):
        return 1.0
    loss, grads = (_apart([one[0]], [other[0]]), _apart(one[1:], other[1:]))
    return max(loss, grads)


def _apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.numel()]
    largest = max((float(each.abs().max()) for pair in pairs for each in pair), default=0.0)
    apart = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    return apart / largest if largest > 0 else 0.0


def _only(state: Changes, place: Place) -> Changes:
    name, label = place
    return {name: {label: state[name][label]}} if label in state.get(name, {}) else {}


@torch.no_grad()
def _start(trial: Trial) -> Callable[[], None]:
    """Note what a pass changes on this rank; returns what puts it back."""
    run = trial.run
    model = [value for value in (*run.model.parameters(), *run.model.buffers()) if not value.is_meta]
    tensors = [(local(value.detach()), local(value.detach()).clone()) for value in model]
    held, flags, functions = model_snapshot(run.model), trainable(run.model), snapshot(run.job, run.model)

    @torch.no_grad()
    def put_back() -> None:
        held.put_back()
        for value, copied in tensors:
            if not torch.equal(value, copied):
                value.copy_(copied)
        set_trainable(run.model, flags)
        functions()

    return put_back
