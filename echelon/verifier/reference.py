"""The reference: the job on one device in float64, as a plain PyTorch loop. Imports nothing from engine/.

What one device runs in a step:

    no batch norm            the whole global batch at once
    batch norm "local"       the plan's micro-batches one after another, in the order of the global batch
    unfixed random numbers   the same, each from a seed of its own
    batch norm "sync"        for each round the union of all ranks' micro-batches of that round
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

from echelon.job import Job, call_loss, call_model, cast_model
from echelon.plan.plan import Plan
from echelon.trials.determinism import OPTIMIZER_STEP_MODE, seed_from_position, seed_model_build
from echelon.trials.isolation import IsolatedJob
from echelon.trials.module_tree import module_hooks
from echelon.trials.random_state import preserve_random_states
from echelon.trials.shape_model import call_factory
from echelon.trials.trial_context import trial_context
from echelon.verifier import job_reader
from echelon.verifier.compare import dense, has_fractions
from echelon.verifier.compare_outputs import (
    OutputChecksums,
    OutputSlice,
    checksum_outputs,
    record_outputs,
)
from echelon.verifier.fingerprints import model_hash
from echelon.verifier.reference_data import ReferenceData, micro_batches, positions_of
from echelon.verifier.tensor_checksum import TensorChecksum
from echelon.world import usable_cores

#: Smaller models do not gain from threads.
_MIN_ELEMENTS_FOR_THREADS = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step computed. Gradients are those before clipping. Tensors are live: valid until the next step."""

    step: int
    loss: Tensor
    norm: Tensor | None
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    learning_rates: tuple[float, ...] = ()  #: of each parameter group in this step
    #: Parameter -> its group, `job_reader.optimizer_groups`; all missing parameters share one group.
    groups: Mapping[str, str] = field(default_factory=dict)
    local_norm: Tensor | None = None  #: of the gradients that rank 0 holds, before clipping
    outputs: OutputChecksums = field(default_factory=dict)  #: the model's, in the first step only
    server_trained: frozenset[str] = frozenset()  #: parameters whose optimizer state stays on a parameter server


class Reference:
    """Trains the job on one device. With `perturbation` every parameter starts off by that part of its size, up or down: a copy that differs by
    rounding alone. Samples keep their order, because it may matter which samples share a batch."""

    def __init__(
        self, job: Job, plan: Plan, data: ReferenceData, *, device: torch.device | str = "cpu", perturbation: float = 0.0,
        determinism: Callable[[], AbstractContextManager[object]] = nullcontext, pristine: nn.Module | None = None,
        dtype: torch.dtype | None = torch.float64,
    ) -> None:  # fmt: skip
        """`determinism`: the context of forward, loss and backward that makes two runs comparable. `pristine`: a copy of the job's module
        from before a run took it. `dtype`: of the model, its inputs and the loss's state; None: unchanged."""
        with trial_context():
            self._isolated_job, self._dtype = IsolatedJob(job, dtype, pristine), dtype
        self.job, self.plan, self.data, self.determinism = self._isolated_job.job, plan, data, determinism
        self.device = torch.device(device)
        with self._active_trial(), preserve_random_states():
            seed_model_build(job.seed)
            model = self.job.model if isinstance(self.job.model, nn.Module) else call_factory(self.job.model)
            job_reader.initialize_values(model, self.job)
            self.fingerprint = model_hash(model)  # of the model as it is, before float64
            self.model: nn.Module = (model if dtype is None else cast_model(model, dtype)).to(self.device).train()
            if perturbation:
                _perturb(self.model, perturbation)
            self._trained_names = frozenset(name for name, _ in self.model.named_parameters())
            self.optimizers = job_reader.build_optimizers(self.job, self.model)
            self.schedules = job_reader.build_schedules(self.job, self.optimizers, data.total_steps)
            self._loss_parameters = job_reader.loss_parameters(self.model, self.optimizers)
        #: Whether the plan's micro-batches run one after another, each seeded, because random numbers cannot be fixed.
        self.seeds_micro_batches = False
        self.forward_order: dict[str, int] = {}  #: module path -> when the first forward entered it
        self._outputs: dict[OutputSlice, TensorChecksum | None] = {}
        #: Operators that were changed in the optimizers' steps: random numbers fixed, casts widened.
        self.altered_update_ops: set[str] = set()
        self.last_record: StepRecord | None = None

    def active(self) -> AbstractContextManager[None]:
        """The context in which the job's functions have this run's state."""
        return self._isolated_job.active()

    @contextlib.contextmanager
    def _active_trial(self) -> Iterator[None]:
        """The context of calls that only this rank makes, on this run's own copies."""
        with trial_context(), self._isolated_job.active():
            yield

    @contextlib.contextmanager
    def deterministic(self) -> Iterator[None]:
        """The context of forward, loss and backward."""
        with self._active_trial(), self.determinism():
            yield

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients of the parameters that the optimizers know; layers created in forward are not trained."""
        return {name: value.grad for name, value in self.model.named_parameters() if name in self._trained_names}

    @property
    def couples_samples(self) -> bool:
        """Whether samples of a batch see each other through batch norm."""
        return any(isinstance(m, _BatchNorm) and (m.training or m.running_mean is None) for m in self.model.modules())

    def position_groups(self, samples: int) -> list[np.ndarray]:
        """The positions of the global batch that run together, in order."""
        ranges_by_rank = self.plan.split_batch(samples)
        if self.couples_samples and self.plan.batchnorm == "sync":
            rounds = zip(*ranges_by_rank, strict=True)
            return [np.concatenate([positions_of(part) for part in round_ranges]) for round_ranges in rounds]
        if self.couples_samples or self.seeds_micro_batches:
            return [positions_of(part) for part in micro_batches(self.plan, samples)]
        return [np.arange(samples)]

    def step(self, step: int, loss: Tensor | None = None) -> StepRecord:
        """Train on the batch of step `step`; `loss`: from its `backward`, where that has run already."""
        loss = self.backward(step) if loss is None else loss
        # Copies: clipping changes gradients in place, and so do some optimizers.
        gradients = {name: _copy_gradient(value) for name, value in self.gradients().items()}
        if self.job.clip_norm is None:
            norm = get_total_norm([grad for grad in gradients.values() if grad is not None])
        else:
            norm = _clip_gradients(list(self.model.parameters()), self.job.clip_norm)
        gradients |= {name: _copy_gradient(value.grad) for name, value in self._loss_parameters.items()}
        rates = tuple(float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups)
        groups = job_reader.optimizer_groups(self.model, self.optimizers)
        with self._active_trial():
            with OPTIMIZER_STEP_MODE() as update_mode:
                for optimizer in self.optimizers:
                    optimizer.step()
            self.altered_update_ops |= update_mode.changed_functions
            for schedule in self.schedules:
                schedule.step(float(loss)) if job_reader.requires_metric(schedule) else schedule.step()
        self.last_record = StepRecord(
            step=step, loss=loss, norm=norm, gradients=gradients,
            parameters=dict(self.model.named_parameters()) | self._loss_parameters,
            buffers=dict(self.model.named_buffers()), optimizer=job_reader.optimizer_state(self.model, self.optimizers),
            learning_rates=rates, groups=groups, outputs=self._outputs,
        )  # fmt: skip
        self._outputs = {}
        return self.last_record

    def backward(self, step: int) -> Tensor:
        """Compute the gradients of step `step`'s global loss; returns that loss."""
        for parameter in [*self.model.parameters(), *self._loss_parameters.values()]:
            parameter.grad = None
        order, is_first, samples = self.forward_order, not self.forward_order, self.data.samples_in(step)
        total_loss, total_count = torch.zeros((), dtype=torch.float64), 0.0
        with contextlib.ExitStack() as stack:
            if is_first:
                stack.enter_context(module_hooks(self.model, lambda path: order.setdefault(path, len(order))))
            for positions in self.position_groups(samples):
                batch = self.read_batch(step, positions)
                on_outputs = partial(self._record_outputs, positions, samples)
                if self.seeds_micro_batches:
                    seed_from_position(self.job.seed, step, int(positions[0]))
                with self.deterministic(), _use_all_cores(self.model):
                    with record_outputs(self.model, on_outputs) if is_first else nullcontext():
                        loss_sum, loss_count = self.compute_loss(batch, len(positions))
                    loss_sum.backward()
                total_loss += loss_sum.detach().double().cpu()
                total_count += loss_count
        for parameter in [*self.model.parameters(), *self._loss_parameters.values()]:  # forward may have made layers
            if parameter.grad is not None:
                parameter.grad.div_(total_count)
        return total_loss / total_count

    def _record_outputs(self, positions: np.ndarray, samples: int, tensors: list[Tensor | None]) -> None:
        rows = {int(position): row for row, position in enumerate(positions)}
        for part in micro_batches(self.plan, samples):
            if part.start in rows:
                self._outputs |= checksum_outputs(tensors, part, first=rows[part.start], batch_size=len(positions))

    def read_batch(self, step: int, positions: np.ndarray) -> Any:
        """These positions of step `step`'s batch. Not to be called inside `deterministic`: data sets may draw and cast freely."""
        return job_reader.cast_batch(self.data.read(step, positions), self.device, self._dtype)

    def compute_loss(self, batch: Any, samples: int) -> tuple[Tensor, float]:
        """The loss of a batch as a sum, and its count."""
        value = call_loss(self.job, call_model(self.job, self.model, batch), batch, self.model)
        # A mean becomes a sum over samples: both kinds of loss are summed over the step and divided by its count in the end.
        total, count = value if isinstance(value, tuple) else (value * samples, samples)
        return total, float(count)


@contextlib.contextmanager
def _use_all_cores(model: nn.Module) -> Iterator[None]:
    """Use all cores for large models: the other ranks are waiting."""
    before = torch.get_num_threads()
    if sum(value.numel() for value in model.parameters()) >= _MIN_ELEMENTS_FOR_THREADS:
        torch.set_num_threads(usable_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _perturb(model: nn.Module, relative_size: float) -> None:
    """Change every parameter's elements by `relative_size` of themselves, up or down. Zeros stay zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in filter(has_fractions, model.parameters()):  # counters and seeds are exact
            signs = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1).to(parameter.device)
            parameter.add_(parameter * signs, alpha=relative_size)


def _clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Clip gradients; returns their norm before. torch does not clip sparse ones, and some optimizers take no others."""
    if not any(value.grad is not None and value.grad.is_sparse for value in parameters):
        return clip_grad_norm_(parameters, max_norm)
    gradients = [value.grad for value in parameters if value.grad is not None]
    norm = get_total_norm(list(map(dense, gradients)))
    for grad in gradients:
        grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _copy_gradient(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None else dense(gradient).clone()
