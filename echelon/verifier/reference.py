"""The truth: the job on one device, in float64, as a plain PyTorch loop. It imports nothing from engine/.

What one device runs in a step:

    no batch norm          the whole global batch at once
    batch norm "local"     the plan's micro-batches one after another, in the order of the global batch
    draws not held         the same, each from a seed of its own
    batch norm "sync"      for each round the union of all ranks' micro-batches of that round
"""

from __future__ import annotations

import contextlib
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
from echelon.plan.batch_split import split
from echelon.plan.plan import Plan
from echelon.trials.determinism import UPDATE, seed_build, seed_samples
from echelon.trials.isolation import Isolated
from echelon.trials.lazy_modules import initialise_lazy
from echelon.trials.random_state import random_states
from echelon.trials.shape_model import call_factory
from echelon.trials.trial_context import trial_context
from echelon.verifier import job_reader
from echelon.verifier.compare_outputs import Given, Outputs, hookable, listening, marked
from echelon.verifier.fingerprints import model_hash
from echelon.verifier.reference_data import Feed
from echelon.verifier.tensor_checksum import Mark
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
        still: Callable[[], AbstractContextManager[object]] = nullcontext, pristine: nn.Module | None = None,
        dtype: torch.dtype | None = torch.float64,
    ) -> None:  # fmt: skip
        """`still` makes two runs comparable; forward, loss and backward run in it. `pristine`: a copy of the job's module from before a
        run took it. `dtype`: of the model, its inputs and what the loss holds; None: as they are."""
        with trial_context():
            self._isolated, self._dtype = Isolated(job, dtype, pristine), dtype
        self.job, self.plan, self.feed, self.hold = self._isolated.job, plan, feed, still
        self.device = torch.device(device)
        with self._active(), random_states():
            seed_build(job.seed)
            made = self.job.model if isinstance(self.job.model, nn.Module) else call_factory(self.job.model)
            initialise_lazy(made, self.job)
            job_reader.fill(made, self.job)
            self.fingerprint = model_hash(made)  # of the model as it is, before float64
            self.model: nn.Module = (made if dtype is None else lift(made, dtype)).to(self.device).train()
            if shake:
                _shake(self.model, shake)
            self._names = frozenset(name for name, _ in self.model.named_parameters())
            self.optimizers = job_reader.optimizers(self.job, self.model)
            self.schedules = job_reader.schedules(self.job, self.optimizers, feed.total)
            self._others = job_reader.loss_parameters(self.model, self.optimizers)
        #: Whether draws that cannot be held follow from the micro-batch: the plan's are then run one after another.
        self.seeded = False
        #: Module path -> when the first forward entered it.
        self.order: dict[str, int] = {}
        #: What the model gave in the step that was made last, of the first one alone.
        self._outputs: dict[Given, Mark | None] = {}
        #: What was changed in the optimizers' steps: draws that were held, casts that were lifted.
        self.held_update: set[str] = set()
        #: What the last step made.
        self.last: Record | None = None

    def active(self) -> AbstractContextManager[None]:
        """Its own values are in place of what the job's functions keep."""
        return self._isolated.active()

    def gradients(self) -> dict[str, Tensor | None]:
        """Of the parameters that the optimizers were made for: layers that forward makes later are in none of them, and are not trained."""
        return {name: value.grad for name, value in self.model.named_parameters() if name in self._names}

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
        local = self.plan.batchnorm == "local" if self.coupled else self.seeded
        if not self.coupled and not local:
            return [np.arange(size)]
        if local:
            return [np.arange(part.start, part.stop) for share in shares for part in share]
        return [
            np.concatenate([np.arange(part.start, part.stop) for part in turn]) for turn in zip(*shares, strict=True)
        ]

    def step(self, number: int, loss: Tensor | None = None) -> Record:
        """Train on the batch of step `number`; `loss`: what `backward` of it gave, where it is done already."""
        loss = self.backward(number) if loss is None else loss
        # Copies: clipping changes gradients in place, and so do some optimizers.
        gradients = {name: _copied(value) for name, value in self.gradients().items()}
        if self.job.clip is None:
            norm = get_total_norm([grad for grad in gradients.values() if grad is not None])
        else:
            norm = _clipped(list(self.model.parameters()), self.job.clip)
        gradients |= {name: _copied(value.grad) for name, value in self._others.items()}
        rates = tuple(float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups)
        groups = job_reader.groups(self.model, self.optimizers)
        with self._active():
            with UPDATE() as held:
                for optimizer in self.optimizers:
                    optimizer.step()
            self.held_update |= held.changed
            for schedule in self.schedules:
                schedule.step(float(loss)) if job_reader.wants_loss(schedule) else schedule.step()
        self.last = Record(
            step=number, loss=loss, norm=norm, gradients=gradients,
            parameters=dict(self.model.named_parameters()) | self._others,
            buffers=dict(self.model.named_buffers()), optimizer=job_reader.optimizer_state(self.model, self.optimizers),
            rates=rates, groups=groups, outputs=self._outputs,
        )  # fmt: skip
        self._outputs = {}
        return self.last

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """Only this rank calls what runs inside, on this run's own copies."""
        with trial_context(), self._isolated.active():
            yield

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """The context of forward, loss and backward: this run's own copies of what the job's functions reach, made comparable."""
        with self._active(), self.hold():
            yield

    def backward(self, number: int) -> Tensor:
        """Leave the gradients of step `number`'s global loss in the model; give that loss."""
        trained = [*self.model.parameters(), *self._others.values()]
        for parameter in trained:
            parameter.grad = None
        first = not self.order
        hooks = self._note_order() if first else []
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        for piece in self.pieces(self.feed.size(number)):
            batch = self.batch(number, piece)
            note = partial(self._note_outputs, piece, self.feed.size(number))
            if self.seeded:
                seed_samples(self.job.seed, number, int(piece[0]))
            with self.still(), _cores(self.model), listening(self.model, note) if first else nullcontext():
                part, weight = self.loss(batch, len(piece))
                part.backward()
            total += part.detach().double().cpu()
            count += weight
        trained = [*self.model.parameters(), *self._others.values()]  # forward may have made layers
        for parameter in trained:
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
        return job_reader.cast(self.feed.take(number, piece), self.device, self._dtype)

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
            module.register_forward_pre_hook(lambda *_, path=path: note(path)) for path, module in hookable(self.model)
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
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # counters and seeds are exact
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


def _copied(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()
