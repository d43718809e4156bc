"""Compute what a gradient or a loss would be under known bugs, to compare the plan's with each.

The reference computes, for one tensor, the sum that each micro-batch contributes. Weighted wrongly or left out, these sums make the bugs
that others have shipped; a match to six digits is no coincidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.engine.checkpoint.run_attributes import ModelState
from echelon.verifier.compare import to_float64
from echelon.verifier.forward_state import ForwardState
from echelon.verifier.reference import Reference
from echelon.verifier.reference_data import positions_of

#: Stands for state that each call of forward or of the loss changes; `explain_failure` words it.
STATE_PER_CALL = "state per call"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSum:
    """What one micro-batch of one data rank contributes."""

    rank: int
    index: int
    samples: int
    count: float
    value: Tensor


class KnownBug(NamedTuple):
    description: str
    value: Tensor


def sum_micro_batches(reference: Reference, step: int, name: str) -> list[MicroBatchSum]:
    """The step's micro-batches, for the parameter `name` or, if that is empty, for the loss. The reference is in its state before the step.
    Empty where samples of several ranks are normalized together: their sums cannot be separated."""
    if reference.couples_samples and reference.plan.batchnorm == "sync":
        return []
    sums, state = [], ForwardState(reference.model)
    for rank, parts in enumerate(reference.plan.split_batch(reference.data.samples_in(step))):
        state.restore()  # each rank has its own copy of what forward changes
        for index, part in enumerate(parts):
            reference.model.zero_grad(set_to_none=True)
            batch = reference.read_batch(step, positions_of(part))
            with reference.deterministic():
                loss_sum, count = reference.compute_loss(batch, part.size)
                if name:
                    loss_sum.backward()
            tensor = reference.model.get_parameter(name) if name else loss_sum
            if name:
                tensor = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            sums.append(MicroBatchSum(rank=rank, index=index, samples=part.size, count=count, value=to_float64(tensor)))
    reference.model.zero_grad(set_to_none=True)
    state.restore()
    return sums


def changed_by_forward(reference: Reference, step: int) -> tuple[str, ...]:
    """What one forward of a step's batch changes in the model, but for the statistics of batch norms, which a plan accounts for."""
    model = reference.model
    state, attributes = ForwardState(model), ModelState(model)
    positions = reference.position_groups(reference.data.samples_in(step))[0]
    with torch.no_grad(), reference.deterministic():
        reference.compute_loss(reference.read_batch(step, positions), len(positions))
    batch_norm_buffers = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    changed_attributes = ("".join(slot).removeprefix("model.") for slot in attributes.changed_slots())
    changed = dict.fromkeys([*state.changed_tensors(), *changed_attributes])
    return tuple(name for name in changed if name not in batch_norm_buffers)


def loss_changes_on_repeat(reference: Reference, step: int) -> bool:
    """Whether the same micro-batch has another loss when computed again: something was kept outside the model."""
    part = reference.plan.split_batch(reference.data.samples_in(step))[0][0]
    batch, state, losses = reference.read_batch(step, positions_of(part)), ForwardState(reference.model), []
    for _ in range(2):
        state.restore()
        with torch.no_grad(), reference.deterministic():
            losses.append(reference.compute_loss(batch, part.size)[0])
    return not torch.equal(*losses)


def wrong_weightings(sums: list[MicroBatchSum]) -> Iterator[KnownBug]:
    """The step's micro-batches in wrong proportions."""
    if not sums:
        return
    ranks, count = max(item.rank for item in sums) + 1, max(item.index for item in sums) + 1
    samples = sum(item.samples for item in sums)
    # The right sum, of parts that were computed one after another: where that is not the reference's, each call left something behind.
    yield from _divided_sums(sums, sums, STATE_PER_CALL)
    yield KnownBug(
        description="it is the mean of the micro-batches' means, weighted by samples: the loss is averaged inside each micro-batch, whatever it "
        "counts; return (sum, count) and divide once, by the whole batch's count",
        value=_add_up(item.value / item.count * (item.samples / samples) for item in sums),
    )
    yield KnownBug(
        description="it is the plain mean of the micro-batches' means: a smaller micro-batch weighs as much as the others; weight each by its share "
        "of the batch",
        value=_add_up(item.value / item.count / len(sums) for item in sums),
    )
    for rank in range(ranks if ranks > 1 else 0):
        own, giver = [item for item in sums if item.rank == rank], f"data rank {rank}'s own samples"
        yield from _divided_sums(own, sums, f"it is what {giver} give: the sum over dp is missing")
    for index in range(count if count > 1 else 0):
        others = [item for item in sums if item.index != index]
        yield from _divided_sums(others, sums, f"micro-batch {index + 1} of {count} is left out")
    for index in range(count if count > 2 else 0):
        same = [item for item in sums if item.index == index]
        yield from _divided_sums(same, sums, f"only micro-batch {index + 1} of {count} counts: they are not added up")


def tied_weight_gradients(reference: Reference, step: int, name: str) -> Iterator[KnownBug]:
    """The gradients of a tied weight through one of its uses alone."""
    names = aliases_of(reference.model, name)
    if len(names) < 2:
        return
    weight = reference.model.get_parameter(name)
    paths = [alias.rpartition(".") for alias in names]
    owners = [(reference.model.get_submodule(path), key) for path, _, key in paths]
    copies = [nn.Parameter(weight.detach().clone()) for _ in names]
    for (module, key), value in zip(owners, copies, strict=True):
        module._parameters[key] = value
    try:
        reference.backward(step)
    finally:
        for module, key in owners:
            module._parameters[key] = weight
    for alias, value in zip(names, copies, strict=True):
        if value.grad is not None:
            description = f"it is the gradient of {alias} alone, of a weight that {' and '.join(names)} share: an untied weight; add up the gradients of all uses"
            yield KnownBug(description=description, value=to_float64(value.grad))
    reference.model.zero_grad(set_to_none=True)


def aliases_of(model: nn.Module, name: str) -> list[str]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [alias for alias, value in parameters.items() if name in parameters and value is parameters[name]]


def _divided_sums(included: list[MicroBatchSum], all_sums: list[MicroBatchSum], description: str) -> Iterator[KnownBug]:
    total = _add_up(item.value for item in included)
    for count in (sum(item.count for item in all_sums), sum(item.count for item in included)):
        if count:
            yield KnownBug(description=description, value=total / count)


def _add_up(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0)
