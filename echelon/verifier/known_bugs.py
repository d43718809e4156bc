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

from echelon.engine.checkpoint.run_attributes import ModelState, model_snapshot
from echelon.plan.batch_split import split
from echelon.verifier.compare import wide
from echelon.verifier.reference import Reference

#: Stands for state that each call of forward or of the loss changes; `causes` has the words, which name it.
PER_CALL = "state per call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one micro-batch of one data rank adds."""

    rank: int
    turn: int
    samples: int
    count: float
    #: Not divided by anything.
    value: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A mistake in words, and the value that it would give."""

    words: str
    value: Tensor


def parts(reference: Reference, number: int, name: str) -> list[Part]:
    """The step's micro-batches, for the parameter `name` or, where that is empty, for the loss. The reference is as before the step.

    Nothing where samples of several ranks are normalised together: their sums do not come apart.
    """
    if reference.coupled and reference.plan.batchnorm == "sync":
        return []
    found = []
    plan, start = reference.plan, _State(reference.model)
    for rank, share in enumerate(split(reference.feed.size(number), plan.mesh.dp, plan.micro, plan.shares)):
        start.put_back()  # each rank has its own copy of what forward changes
        for turn, part in enumerate(share):
            reference.model.zero_grad(set_to_none=True)
            batch = reference.batch(number, np.arange(part.start, part.stop))
            with reference.still():
                total, count = reference.loss(batch, part.size)
                if name:
                    total.backward()
            value = _gradient(reference.model, name) if name else wide(total)
            found.append(Part(rank=rank, turn=turn, samples=part.size, count=count, value=value))
    reference.model.zero_grad(set_to_none=True)
    start.put_back()
    return found


class _State:
    """What forward may change of a model: parameters, buffers and what modules keep otherwise."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._held = model, ModelState(model)
        self._tensors = {name: value.detach().clone() for name, value in _tensors(model)}
        self._snapshot = model_snapshot(model)

    def changed(self) -> list[str]:
        """The names of what is different now."""
        found = [
            name for name, value in _tensors(self._model) if not torch.equal(value, self._tensors.get(name, value))
        ]
        held = (name.removeprefix("model.") for name in self._held.changed_places())
        return list(dict.fromkeys([*found, *held]))

    @torch.no_grad()
    def put_back(self) -> None:
        self._snapshot.put_back()
        for name, value in _tensors(self._model):
            if name in self._tensors and value.shape == self._tensors[name].shape:
                value.copy_(self._tensors[name])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def changed_by_forward(reference: Reference, number: int) -> tuple[str, ...]:
    """What one forward of a step's batch changes of the model beside the statistics of batch norms, which a plan accounts for."""
    start = _State(reference.model)
    piece = reference.pieces(reference.feed.size(number))[0]
    with torch.no_grad(), reference.still():
        reference.loss(reference.batch(number, piece), len(piece))
    norms = {
        f"{path}.{name}"
        for path, module in reference.model.named_modules()
        if isinstance(module, _BatchNorm)
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    return tuple(name for name in start.changed() if name not in norms)


def moves(reference: Reference, number: int) -> bool:
    """Whether the same micro-batch gives another loss when it is computed again: something was kept that is not the model's."""
    plan = reference.plan
    part = split(reference.feed.size(number), plan.mesh.dp, plan.micro, plan.shares)[0][0]
    batch, start, values = reference.batch(number, np.arange(part.start, part.stop)), _State(reference.model), []
    for _ in range(2):
        start.put_back()
        with torch.no_grad(), reference.still():
            values.append(reference.loss(batch, part.size)[0])
    return not torch.equal(*values)


def weighings(found: list[Part]) -> Iterator[Suspect]:
    """The step's micro-batches in wrong proportions."""
    if not found:
        return
    ranks, turns = max(part.rank for part in found) + 1, max(part.turn for part in found) + 1
    samples = sum(part.samples for part in found)
    # The right sum, of parts that were computed one after another: where that is not the reference's, each call left something behind.
    yield from _of(found, found, PER_CALL)
    yield Suspect(
        words="it is the mean of the micro-batches' means, weighed by samples: the loss is averaged inside each micro-batch, whatever it "
        "counts; return (sum, count) and divide once, by the whole batch's count",
        value=_total(part.value / part.count * (part.samples / samples) for part in found),
    )
    yield Suspect(
        words="it is the plain mean of the micro-batches' means: a smaller micro-batch weighs as much as the others; weigh each by its share "
        "of the batch",
        value=_total(part.value / part.count / len(found) for part in found),
    )
    for rank in range(ranks if ranks > 1 else 0):
        own = [part for part in found if part.rank == rank]
        yield from _of(own, found, f"it is what data rank {rank}'s own samples give: the sum over dp is missing")
    for turn in range(turns if turns > 1 else 0):
        rest = [part for part in found if part.turn != turn]
        yield from _of(rest, found, f"micro-batch {turn + 1} of {turns} is left out")
    for turn in range(turns if turns > 2 else 0):
        only = [part for part in found if part.turn == turn]
        yield from _of(only, found, f"only micro-batch {turn + 1} of {turns} counts: they are not added up")


def uses(reference: Reference, number: int, name: str) -> Iterator[Suspect]:
    """The gradient of a tied weight through one of its uses alone."""
    tied = names_of(reference.model, name)
    if len(tied) < 2:
        return
    weight = reference.model.get_parameter(name)
    places = [(reference.model.get_submodule(each.rpartition(".")[0]), each.rpartition(".")[2]) for each in tied]
    own = [nn.Parameter(weight.detach().clone()) for _ in tied]
    for (module, key), value in zip(places, own, strict=True):
        module._parameters[key] = value
    try:
        reference.backward(number)
    finally:
        for module, key in places:
            module._parameters[key] = weight
    for each, value in zip(tied, own, strict=True):
        if value.grad is not None:
            words = f"it is the gradient of {each} alone, of a weight that {' and '.join(tied)} share: an untied weight; add up the gradients of all uses"
            yield Suspect(words=words, value=wide(value.grad))
    reference.model.zero_grad(set_to_none=True)


def names_of(model: nn.Module, name: str) -> list[str]:
    """All names of a parameter."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return [each for each, value in named.items() if name in named and value is named[name]]


def _of(some: list[Part], found: list[Part], words: str) -> Iterator[Suspect]:
    """Divided by what the whole batch counts, or by what these count."""
    total = _total(part.value for part in some)
    for count in (sum(part.count for part in found), sum(part.count for part in some)):
        if count:
            yield Suspect(words=words, value=total / count)


def _total(values: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0)


def _gradient(model: nn.Module, name: str) -> Tensor:
    value = model.get_parameter(name)
    return wide(torch.zeros_like(value) if value.grad is None else value.grad)
