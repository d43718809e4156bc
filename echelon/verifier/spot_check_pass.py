"""Run forward and backward of a checked step on the ranks: as in training, and once more without random numbers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from echelon.data.loader import StepBatch
from echelon.engine.data_setup import find_generators
from echelon.engine.full_state import gather_full_tensors
from echelon.engine.run import Run
from echelon.tree import copy_tensors
from echelon.trials.determinism import DeterministicMode, randomness_disabled
from echelon.trials.isolation import IsolatedJob
from echelon.trials.random_state import read_host_random_state, read_torch_random_states
from echelon.verifier.forward_state import ForwardState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """Loss and gradients, whole on rank 0. `is_deterministic`: no random numbers were drawn. `without_randomness`: they were disabled."""

    loss: Tensor
    gradients: dict[str, Tensor]
    is_deterministic: bool
    without_randomness: bool


class PassState:
    """What a pass changes on this rank: the model, and the state of the job's functions."""

    def __init__(self, run: Run) -> None:
        self.model, self.functions = ForwardState(run.model), IsolatedJob(run.job, shared_model=run.model)


def run_checked_pass(run: Run, batch: StepBatch, batch_copy: StepBatch) -> tuple[Tensor, PassResult]:
    """The step's own forward and backward, and what of it can be compared. Every rank must call it."""
    state = PassState(run)
    has_drawn, loss = _backward(run, batch)
    if has_drawn:
        return loss, run_without_randomness(run, copy_batch(batch_copy), state)
    gradients = _gather_gradients(run)
    return loss, PassResult(loss=loss, gradients=gradients, is_deterministic=True, without_randomness=False)


def run_without_randomness(run: Run, batch: StepBatch, state: PassState) -> PassResult:
    """Forward and backward from `state` without random numbers; the run's present state is put back. Every rank must call it."""
    trained = [*run.model.parameters(), *run.loss_parameters.values()]
    gradients_before = [(value, value.grad, value.grad.clone()) for value in trained if value.grad is not None]
    model_before = ForwardState(run.model)
    generators = [(generator, generator.get_state()) for generator in find_generators(run.model)]
    state.model.restore()
    for value in trained:
        value.grad = None
    try:
        # A loss that counts its calls must not count this one.
        functions, fixed = state.functions, DeterministicMode(fix_random=True)
        with run.using_job(functions.job), functions.active(), randomness_disabled(run.model), fixed():
            has_drawn, loss = _backward(run, batch)
    finally:
        for generator, generator_state in generators:
            generator.set_state(generator_state)
    gradients = _gather_gradients(run)
    for value in trained:
        value.grad = None
    for value, grad, saved in gradients_before:
        grad.copy_(saved)  # in place: the exchange keeps gradients in its own buckets
        value.grad = grad
    model_before.restore()
    return PassResult(loss=loss, gradients=gradients, is_deterministic=not has_drawn, without_randomness=True)


def copy_batch(batch: StepBatch) -> StepBatch:
    """The batch with tensors of its own: forward may change its inputs."""
    micro_batches = (dataclasses.replace(micro, batch=copy_tensors(micro.batch)) for micro in batch.micro_batches)
    return dataclasses.replace(batch, micro_batches=tuple(micro_batches))


def _gather_gradients(run: Run) -> dict[str, Tensor]:
    parameters = run.model.named_parameters()
    return gather_full_tensors(run, {name: value.grad for name, value in parameters if value.grad is not None})


def _backward(run: Run, batch: StepBatch) -> tuple[bool, Tensor]:
    """Whether a rank draws random numbers, from any generator, in forward and backward as in training; and the loss."""
    generators, states = find_generators(run.model), list[Any]()

    def read_state() -> None:
        states.append((read_torch_random_states(generators), read_host_random_state()))

    @contextlib.contextmanager
    def around_seeding() -> Iterator[None]:
        read_state()
        yield
        read_state()

    run.seed_context = around_seeding  # a pipeline seeds before every micro-batch
    try:
        loss = run.backward(batch)
    finally:
        run.seed_context = None
    read_state()
    has_drawn = any(after != before_next for after, before_next in zip(states[1::2], states[2::2], strict=True))
    return any(run.ranks.all_gather_object(has_drawn)), loss
