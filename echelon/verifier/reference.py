"""The truth: the job on one device, in float64, as a plain PyTorch loop. It imports nothing from engine/.

What one device runs in a step:

    no batch norm          the whole global batch at once
    batch norm "local"     the plan's micro-batches one after another, in the order of the global batch
    batch norm "sync"      for each round the union of all ranks' micro-batches of that round
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.hooks import RemovableHandle

from echelon.job import Job, call_loss, call_model, lift
from echelon.plan.plan import Plan
from echelon.plan.split import split
from echelon.verifier import recipe
from echelon.verifier.feed import Feed
from echelon.verifier.identity import model_hash
from echelon.verifier.mark import Mark
from echelon.verifier.outputs import Given, Outputs, listening, marked
from echelon.world import usable_cores

#: Parameters from which on threads are worth their start.
_SOME_SIZE = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one step made. Gradients are those before clipping. Tensors are live: they hold until the next step."""

    step: int
    loss: Tensor
    norm: Tensor | None
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    #: The learning rate of each parameter group in this step.
    rates: tuple[float, ...] = ()
    #: Parameter -> its group, `recipe.groups`; where it is not told all are taken as one.
    groups: Mapping[str, str] = field(default_factory=dict)
    #: The norm of the gradients that rank 0 holds, before clipping.
    own: Tensor | None = None
    #: What the model gave; of the first step alone.
    outputs: Outputs = field(default_factory=dict)
    #: Parameters whose optimizer state a parameter server holds and does not tell.
    untold: frozenset[str] = frozenset()


class Reference:
    """One device that trains the job. With `shake` it starts from parameters that are off by so much of their size, each up or
    down: a twin that differs by rounding alone. Samples stay as they are, because who is beside whom may be part of the meaning.
    """

    def __init__(
        self, job: Job, plan: Plan, feed: Feed, *, device: torch.device | str = "cpu", shake: float = 0.0,
        still: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        """`still` is the context of forward, loss and backward: what makes two runs comparable."""
        self.job, self.plan, self.feed, self.still = job, plan, feed, still
        self.device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            made = copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else job.model()
            recipe.fill(made, job)
        self.fingerprint = model_hash(made)  # of the model as it is, before float64
        self.model: nn.Module = lift(made, torch.float64).to(self.device).train()
        if shake:
            _shake(self.model, shake)
        self.optimizers = recipe.optimizers(job, self.model)
        self.schedules = recipe.schedules(job, self.optimizers, feed.total)
        #: Module path -> when the first forward entered it.
        self.order: dict[str, int] = {}
        #: What the model gave in the step that was made last, of the first one alone.
        self._outputs: dict[Given, Mark | None] = {}
        #: What the last step made.
        self.last: Record | None = None

    @property
    def coupled(self) -> bool:
        """Whether samples of a batch see each other through batch norm."""
        return any(
            isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
            for module in self.model.modules()
        )

    def pieces(self, size: int) -> list[np.ndarray]:
        """Which positions of the global batch run together, in order."""
        shares = split(size, self.plan.mesh.dp, self.plan.micro, self.plan.shares)
        if not self.coupled:
            return [np.arange(size)]
        if self.plan.batchnorm == "local":
            return [np.arange(part.start, part.stop) for share in shares for part in share]
        return [
            np.concatenate([np.arange(part.start, part.stop) for part in turn]) for turn in zip(*shares, strict=True)
        ]

    def step(self, number: int, loss: Tensor | None = None) -> Record:
        """Train on the batch of step `number`; `loss`: what `backward` of it gave, where it is done already."""
        loss = self.backward(number) if loss is None else loss
        gradients = {name: _dense(value.grad) for name, value in self.model.named_parameters()}
        if self.job.clip is None:
            norm = get_total_norm([grad for grad in gradients.values() if grad is not None])
        else:
            gradients = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
            norm = _clipped(list(self.model.parameters()), self.job.clip)
        rates = tuple(float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups)
        groups = recipe.groups(self.model, self.optimizers)
        for optimizer in self.optimizers:
            optimizer.step()
        for schedule in self.schedules:
            schedule.step()
        self.last = Record(
            step=number, loss=loss, norm=norm, gradients=gradients, parameters=dict(self.model.named_parameters()),
            buffers=dict(self.model.named_buffers()), optimizer=recipe.optimizer_state(self.model, self.optimizers),
            rates=rates, groups=groups, outputs=self._outputs,
        )  # fmt: skip
        self._outputs = {}
        return self.last

    def backward(self, number: int) -> Tensor:
        """Leave the gradients of step `number`'s global loss in the model; give that loss."""
        self.model.zero_grad(set_to_none=True)
        first = not self.order
        hooks = self._note_order() if first else []
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        for piece in self.pieces(self.feed.size(number)):
            batch = self.batch(number, piece)
            note = partial(self._note_outputs, piece, self.feed.size(number))
            with self.still(), _cores(self.model), listening(self.model, note) if first else nullcontext():
                part, weight = self.loss(batch, len(piece))
                part.backward()
            total += part.detach().double().cpu()
            count += weight
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(count)
        for hook in hooks:
            hook.remove()
        return total / count

    def _note_outputs(self, piece: np.ndarray, size: int, tensors: list[Tensor | None]) -> None:
        """As the plan shares out the samples of a piece."""
        places = {int(position): place for place, position in enumerate(piece)}
        for share in split(size, self.plan.mesh.dp, self.plan.micro, self.plan.shares):
            for part in share:
                if part.start in places:
                    self._outputs |= marked(tensors, part, first=places[part.start], of=len(piece))

    def batch(self, number: int, piece: np.ndarray) -> Any:
        """These positions of step `number`'s batch. Not to be read inside `still`: data sets may draw and cast as they like."""
        return recipe.cast(self.feed.take(number, piece), self.device)

    def loss(self, batch: Any, samples: int) -> tuple[Tensor, float]:
        """What a batch of so many samples adds to the loss, as a sum, and what it counts."""
        value = call_loss(self.job, call_model(self.job, self.model, batch), batch, self.model)
        # A mean is a sum over samples: both kinds of loss are sums over the step, divided by its count in the end.
        part, weight = value if isinstance(value, tuple) else (value * samples, samples)
        return part, float(weight)

    def _note_order(self) -> list[RemovableHandle]:
        def note(path: str) -> None:
            self.order.setdefault(path, len(self.order))

        return [
            module.register_forward_pre_hook(lambda *_, path=path: note(path))
            for path, module in self.model.named_modules()
        ]


@contextlib.contextmanager
def _cores(model: nn.Module) -> Iterator[None]:
    """All cores for a model of some size: the other ranks wait, so theirs are free."""
    before = torch.get_num_threads()
    if sum(value.numel() for value in model.parameters()) >= _SOME_SIZE:
        torch.set_num_threads(usable_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _shake(model: nn.Module, size: float) -> None:
    """Move every parameter's elements by `size` of themselves, up or down. Zeros stay, and with them what is equal by design."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=draw).mul_(2).sub_(1).to(parameter.device)
            parameter.add_(parameter * signs, alpha=size)


def _clipped(parameters: list[nn.Parameter], largest: float) -> Tensor:
    """The norm, to which gradients are brought down. torch clips no sparse ones, and some optimizers take no others."""
    if not any(value.grad is not None and value.grad.is_sparse for value in parameters):
        return clip_grad_norm_(parameters, largest)
    given = [value.grad for value in parameters if value.grad is not None]
    norm = get_total_norm([grad.to_dense() if grad.is_sparse else grad for grad in given])
    for grad in given:
        grad.mul_(torch.clamp(largest / (norm + 1e-6), max=1.0))
    return norm


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
