"""What a gradient or a loss would be if a known mistake had been made, computed by the reference: the plan's is held against each.

A micro-batch at a time the reference gives the sums that everything is made of, for one tensor. Weighed and left out in other ways they are
the mistakes that others have shipped; a match to six digits is no chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.engine.checkpoint.run_attributes import ModelState, snapshot_model
from echelon.plan.batch_split import split_batch
from echelon.verifier.compare import to_float64
from echelon.verifier.reference import Reference

#: Stands for state that each call of forward or of the loss changes; `causes` has the words, which name it.
STATE_PER_CALL = "state per call"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSum:
    """What one micro-batch of one data rank adds."""

    rank: int
    index: int
    samples: int
    count: float
    #: Not divided by anything.
    value: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBug:
    """A mistake in words, and the value that it would give."""

    description: str
    value: Tensor


def sum_micro_batches(reference: Reference, step: int, name: str) -> list[MicroBatchSum]:
    """The step's micro-batches, for the parameter `name` or, where that is empty, for the loss. The reference is as before the step.

    Nothing where samples of several ranks are normalised together: their sums do not come apart.
    """
    if reference.couples_samples and reference.plan.batchnorm == "sync":
        return []
    sums = []
    plan, state = reference.plan, _ForwardState(reference.model)
    for rank, sample_ranges in enumerate(
        split_batch(reference.data.samples_in(step), plan.mesh.dp, plan.micro, plan.data.batch_shares)
    ):
        state.restore()  # each rank has its own copy of what forward changes
        for index, sample_range in enumerate(sample_ranges):
            reference.model.zero_grad(set_to_none=True)
            batch = reference.read_batch(step, np.arange(sample_range.start, sample_range.stop))
            with reference.deterministic():
                loss_sum, count = reference.compute_loss(batch, sample_range.size)
                if name:
                    loss_sum.backward()
            value = _float64_gradient(reference.model, name) if name else to_float64(loss_sum)
            sums.append(MicroBatchSum(rank=rank, index=index, samples=sample_range.size, count=count, value=value))
    reference.model.zero_grad(set_to_none=True)
    state.restore()
    return sums


class _ForwardState:
    """What forward may change of a model: parameters, buffers and what modules keep otherwise."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._attributes = model, ModelState(model)
        self._tensors = {name: value.detach().clone() for name, value in _named_tensors(model)}
        self._snapshot = snapshot_model(model)

    def changed_names(self) -> list[str]:
        """The names of what is different now."""
        changed_tensors = [
            name
            for name, value in _named_tensors(self._model)
            if not torch.equal(value, self._tensors.get(name, value))
        ]
        changed_attributes = (name.removeprefix("model.") for name in self._attributes.changed_slots())
        return list(dict.fromkeys([*changed_tensors, *changed_attributes]))

    @torch.no_grad()
    def restore(self) -> None:
        self._snapshot.restore()
        for name, value in _named_tensors(self._model):
            if name in self._tensors and value.shape == self._tensors[name].shape:
                value.copy_(self._tensors[name])


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def changed_by_forward(reference: Reference, step: int) -> tuple[str, ...]:
    """What one forward of a step's batch changes of the model beside the statistics of batch norms, which a plan accounts for."""
    state = _ForwardState(reference.model)
    positions = reference.position_groups(reference.data.samples_in(step))[0]
    with torch.no_grad(), reference.deterministic():
        reference.compute_loss(reference.read_batch(step, positions), len(positions))
    batch_norm_buffers = {
        f"{path}.{name}"
        for path, module in reference.model.named_modules()
        if isinstance(module, _BatchNorm)
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    return tuple(name for name in state.changed_names() if name not in batch_norm_buffers)


def loss_changes_on_repeat(reference: Reference, step: int) -> bool:
    """Whether the same micro-batch gives another loss when it is computed again: something was kept that is not the model's."""
    plan = reference.plan
    sample_range = split_batch(reference.data.samples_in(step), plan.mesh.dp, plan.micro, plan.data.batch_shares)[0][0]
    batch, state, losses = (
        reference.read_batch(step, np.arange(sample_range.start, sample_range.stop)),
        _ForwardState(reference.model),
        [],
    )
    for _ in range(2):
        state.restore()
        with torch.no_grad(), reference.deterministic():
            losses.append(reference.compute_loss(batch, sample_range.size)[0])
    return not torch.equal(*losses)


def wrong_weightings(sums: list[MicroBatchSum]) -> Iterator[KnownBug]:
    """The step's micro-batches in wrong proportions."""
    if not sums:
        return
    ranks, micro_batch_count = (
        max(micro_sum.rank for micro_sum in sums) + 1,
        max(micro_sum.index for micro_sum in sums) + 1,
    )
    samples = sum(micro_sum.samples for micro_sum in sums)
    # The right sum, of parts that were computed one after another: where that is not the reference's, each call left something behind.
    yield from _divided_sums(sums, sums, STATE_PER_CALL)
    yield KnownBug(
        description="it is the mean of the micro-batches' means, weighed by samples: the loss is averaged inside each micro-batch, whatever it "
        "counts; return (sum, count) and divide once, by the whole batch's count",
        value=_sum_tensors(micro_sum.value / micro_sum.count * (micro_sum.samples / samples) for micro_sum in sums),
    )
    yield KnownBug(
        description="it is the plain mean of the micro-batches' means: a smaller micro-batch weighs as much as the others; weigh each by its share "
        "of the batch",
        value=_sum_tensors(micro_sum.value / micro_sum.count / len(sums) for micro_sum in sums),
    )
    for rank in range(ranks if ranks > 1 else 0):
        rank_sums = [micro_sum for micro_sum in sums if micro_sum.rank == rank]
        yield from _divided_sums(
            rank_sums, sums, f"it is what data rank {rank}'s own samples give: the sum over dp is missing"
        )
    for index in range(micro_batch_count if micro_batch_count > 1 else 0):
        other_sums = [micro_sum for micro_sum in sums if micro_sum.index != index]
        yield from _divided_sums(other_sums, sums, f"micro-batch {index + 1} of {micro_batch_count} is left out")
    for index in range(micro_batch_count if micro_batch_count > 2 else 0):
        same_index = [micro_sum for micro_sum in sums if micro_sum.index == index]
        yield from _divided_sums(
            same_index, sums, f"only micro-batch {index + 1} of {micro_batch_count} counts: they are not added up"
        )


def tied_weight_gradients(reference: Reference, step: int, name: str) -> Iterator[KnownBug]:
    """The gradient of a tied weight through one of its uses alone."""
    names = aliases_of(reference.model, name)
    if len(names) < 2:
        return
    weight = reference.model.get_parameter(name)
    owners = [
        (reference.model.get_submodule(tied_name.rpartition(".")[0]), tied_name.rpartition(".")[2])
        for tied_name in names
    ]
    copies = [nn.Parameter(weight.detach().clone()) for _ in names]
    for (module, key), value in zip(owners, copies, strict=True):
        module._parameters[key] = value
    try:
        reference.backward(step)
    finally:
        for module, key in owners:
            module._parameters[key] = weight
    for tied_name, value in zip(names, copies, strict=True):
        if value.grad is not None:
            description = f"it is the gradient of {tied_name} alone, of a weight that {' and '.join(names)} share: an untied weight; add up the gradients of all uses"
            yield KnownBug(description=description, value=to_float64(value.grad))
    reference.model.zero_grad(set_to_none=True)


def aliases_of(model: nn.Module, name: str) -> list[str]:
    """All names of a parameter."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [alias for alias, value in parameters.items() if name in parameters and value is parameters[name]]


def _divided_sums(included: list[MicroBatchSum], all_sums: list[MicroBatchSum], description: str) -> Iterator[KnownBug]:
    """Divided by what the whole batch counts, or by what these count."""
    total = _sum_tensors(micro_sum.value for micro_sum in included)
    for count in (sum(micro_sum.count for micro_sum in all_sums), sum(micro_sum.count for micro_sum in included)):
        if count:
            yield KnownBug(description=description, value=total / count)


def _sum_tensors(values: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0)


def _float64_gradient(model: nn.Module, name: str) -> Tensor:
    value = model.get_parameter(name)
    return to_float64(torch.zeros_like(value) if value.grad is None else value.grad)
