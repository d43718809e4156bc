"""Run a job under the plan to be verified, one step after another, each as a record on rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn

from echelon.data.loader import StepBatch
from echelon.engine.full_state import gather_full_tensors, optimizer_tensors, tp_shard_of
from echelon.engine.grad_clip import gradients
from echelon.engine.parallel.shard_layout import local_regions, to_local
from echelon.engine.parallel.vocab_parallel import ShardedLogits
from echelon.engine.precision import set_fp32_precision
from echelon.engine.process_groups import WorldCommunicator
from echelon.engine.run import Run
from echelon.job import Job
from echelon.plan.batch_split import SampleRange
from echelon.plan.plan import Plan
from echelon.trials.determinism import OPTIMIZER_STEP_MODE, DeterministicMode, disable_randomness, seed_from_position
from echelon.trials.isolation import IsolatedJob
from echelon.trials.module_tree import module_hooks
from echelon.trials.trial_context import compile_disabled
from echelon.verifier import job_reader
from echelon.verifier.compare import dense
from echelon.verifier.compare_outputs import (
    OutputSlice,
    checksum_outputs,
    record_outputs,
    single_sample_ranges,
)
from echelon.verifier.reference import StepRecord
from echelon.verifier.tensor_checksum import (
    RankChecksums,
    TensorChecksum,
    TensorRegion,
    checksum_weights,
    compute_checksum,
)

#: How many ranks hold the same part of a parameter, and the pipeline ranks that do.
Replication = tuple[int, frozenset[int]]


class CandidateRun:
    """A deterministic run of a job under a plan on this rank. Every rank makes the same calls in the same order."""

    def __init__(
        self, job: Job, plan: Plan, ranks: WorldCommunicator, determinism: DeterministicMode, dtype: torch.dtype | None, *,
        per_sample: bool = False, without_dropout: bool = True,
    ) -> None:  # fmt: skip
        """`dtype`: None for the plan's own precision. `per_sample`: records will be compared with a plan that splits the batch differently."""
        #: What the job compiles itself is no part of the proof; what the plan compiles is.
        self._compile_context = contextlib.nullcontext if plan.compile else compile_disabled
        self._isolated_job = IsolatedJob(job, dtype)  # a proof must not train the user's module
        self._ranks, self._determinism, self._per_sample = ranks, determinism, per_sample
        with self._compile_context(), self._isolated_job.active():
            job, device = self._isolated_job.job, ranks.device
            self.run = Run(job, plan, ranks.world, device=device, dtype=dtype, monitor_divergence=False)
        #: Paths of the modules whose dropout is off.
        self.modules_without_dropout = disable_randomness(self.run.model) if without_dropout else []
        self.skipped_steps = 0  #: steps that a loss scale made the run skip
        #: Module path -> when the first step's forward entered it on this rank; filled with `per_sample`.
        self.forward_order: dict[str, int] = {}
        #: Whether the next step's outputs are recorded. Compiled modules run no hooks.
        self._records_outputs = dtype is not None and not plan.compile
        self._in_own_precision = dtype is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.run.close()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The context of this run's steps: the process shares torch's float32 switches and the job's state with other runs."""
        restore = set_fp32_precision(self.run.precision)
        try:
            with self._compile_context(), self._isolated_job.active():
                yield
        finally:
            restore()

    def read_batch(self, step: int) -> StepBatch:
        with self._isolated_job.active():
            (batch,) = self.run.loader.steps(step, step + 1)
        return batch

    def prepare(self, step: int) -> None:
        """Make the calls of the model that precede a first step, so that later calls belong to the step."""
        with self.active(), self._determinism():
            self.run.train_step.buffer_rule_check.learn_rules(self.read_batch(step))

    def step(self, step: int) -> StepRecord | None:
        """Train one step; the record is rank 0's."""
        with self.active():
            return self._run_step(self.read_batch(step))

    def repeat_backward(self, step: int) -> list[Tensor]:
        """Forward and backward of a step without an update: its loss, and the gradients that this rank holds."""
        run, batch = self.run, self.read_batch(step)
        trained = [*run.model.parameters(), *run.loss_parameters.values()]
        for value in trained:
            value.grad = None
        with self._determinism(), self._seeding_micro_batches(batch):
            loss = run.backward(batch)
        grads = [dense(to_local(value.grad)) for value in trained if value.grad is not None]
        return [loss.detach().clone(), *(grad.detach().clone() for grad in grads)]

    def _run_step(self, batch: StepBatch) -> StepRecord | None:
        run = self.run
        with self._determinism():
            # It calls the model, and these calls are not the step's.
            run.train_step.buffer_rule_check.learn_rules(batch)
        with self._determinism(), self._recording(batch) as outputs, self._seeding_micro_batches(batch):
            loss = run.backward(batch)
        outputs = self._merge_over_ranks(outputs if run.is_reporting else {}) if self._records_outputs else {}
        self._records_outputs = False
        parameters, backend = dict(self._local_parameters()), run.backend
        grads = self._gather_full_tensors(_gradients_of(parameters)) | backend.gather_gradients()
        gradient_norm = self._gradient_norm()
        loss_parameters = job_reader.loss_parameters(run.model, run.optimizers) if run.loss_parameters else {}
        grads |= self._gather_full_tensors(_gradients_of(loss_parameters))
        local_norms = [torch.linalg.vector_norm(to_local(grad)) for grad in gradients(parameters.values())]
        groups = self._gather_groups() if self._per_sample else {}
        with self._deterministic_updates():
            result = run.update(loss, batch.samples)
        self.skipped_steps += result.skipped
        full_parameters = self._gather_full_tensors(parameters | loss_parameters) | backend.pull_tables()
        buffers = self._gather_full_tensors(dict(run.model.named_buffers()))
        optimizer = self._gather_full_tensors(self._optimizer_tensors())
        if not run.world.is_main:
            return None
        names = [*(name for name, _ in run.model.named_parameters() if name in run.full_shapes), *loss_parameters]
        return StepRecord(
            step=batch.step, loss=result.loss, norm=gradient_norm if result.gradient_norm is None else result.gradient_norm,
            gradients={name: grads.get(name) for name in names}, parameters=full_parameters, buffers=buffers,
            optimizer=optimizer, learning_rates=tuple(map(float, result.learning_rates)), groups=groups,
            local_norm=torch.linalg.vector_norm(torch.stack(local_norms)) if local_norms else None, outputs=outputs,
            server_trained=backend.server_trained,
        )  # fmt: skip

    @contextlib.contextmanager
    def _recording(self, batch: StepBatch) -> Iterator[dict[OutputSlice, TensorChecksum | None]]:
        """Checksum the outputs of this rank's micro-batches, with `per_sample` sample by sample; none if there are more or fewer outputs."""
        outputs, ranges, calls = dict[OutputSlice, TensorChecksum | None](), self._sample_ranges(batch), 0
        order, model = self.forward_order, self.run.model

        def record(tensors: list[Tensor | None]) -> None:
            nonlocal calls
            if all(tensor is None for tensor in tensors):  # another stage's
                return
            for whole in ranges[calls : calls + 1]:
                for part in single_sample_ranges(whole) if self._per_sample else [whole]:
                    first = part.start - whole.start
                    outputs.update(checksum_outputs(tensors, part, first=first, batch_size=whole.size))
            calls += 1

        def gather_logits(value: Tensor) -> Tensor:
            return value.gather_detached() if isinstance(value, ShardedLogits) else value

        with contextlib.ExitStack() as stack:
            if self._records_outputs:
                stack.enter_context(record_outputs(model, record, gather_logits))
            if self._records_outputs and self._per_sample:
                stack.enter_context(module_hooks(model, lambda path: order.setdefault(path, len(order))))
            yield outputs
        if calls != len(ranges):
            outputs.clear()

    def _sample_ranges(self, batch: StepBatch) -> list[SampleRange]:
        return self.run.plan.split_batch(batch.samples)[self.run.data_parallel.rank]

    def _local_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that ranks hold; tables are on the servers."""
        tables = self.run.backend.table_names
        return [(name, value) for name, value in self.run.model.named_parameters() if name not in tables]

    def _gather_groups(self) -> dict[str, str]:
        """`job_reader.optimizer_groups` of all stages."""
        optimizers = self.run.full_tensor_optimizers.values()
        substitutes = [pair for optimizer in optimizers for pair in optimizer.parameters.items()]
        return self._merge_over_ranks(job_reader.optimizer_groups(self.run.model, self.run.optimizers, substitutes))

    def _merge_over_ranks(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        return dict(ChainMap(*reversed(self._ranks.all_gather_object(dict(values)))))

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        indices, names = range(len(self.run.optimizers)), self.run.loss_parameters
        loss_prefixes = tuple(f"{index}/{name}/" for index in indices for name in names)
        tensors = optimizer_tensors(self.run).items()
        return {name: value for name, value in tensors if not name.startswith(loss_prefixes)}

    def _seeding_micro_batches(self, batch: StepBatch) -> AbstractContextManager[None]:
        """Start each of this rank's micro-batches from a seed of its own, where random numbers cannot be fixed."""
        starts = [part.start for part in self._sample_ranges(batch)] if self._determinism.needs_seeding else []

        def seed(path: str) -> None:
            if not path and starts:
                seed_from_position(self.run.job.seed, batch.step, starts.pop(0))

        return module_hooks(self.run.model, seed if starts else None)

    @contextlib.contextmanager
    def _deterministic_updates(self) -> Iterator[None]:
        """Make the optimizers' steps deterministic as the reference's are; the rest of an update is the engine's own."""
        mode = dataclasses.replace(OPTIMIZER_STEP_MODE, widen_casts=not self._in_own_precision)
        with contextlib.ExitStack() as hooks, contextlib.ExitStack() as active_update:

            def enter(*_: Any) -> None:  # a hook that returned something would replace the step's arguments
                active_update.enter_context(mode())

            for optimizer in self.run.optimizers:
                hooks.callback(optimizer.register_step_pre_hook(enter).remove)
                hooks.callback(optimizer.register_step_post_hook(lambda *_: active_update.close()).remove)
            yield

    def _gather_full_tensors(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on rank 0. Empty ones have no part that a rank could send."""
        full_tensors = gather_full_tensors(self.run, values)
        if not self.run.world.is_main:
            return full_tensors
        return {k: to_local(v).detach().cpu() for k, v in values.items() if not v.numel()} | full_tensors

    def _gradient_norm(self) -> Tensor | None:
        """The gradient norm where training does not compute it; None where it does, or where rounding would decide."""
        if self._in_own_precision or self.run.job.clip_norm is not None:
            return None
        return self.run.train_step.gradient_norm()

    def gather_start_values(self) -> dict[str, Tensor]:
        """Parameters and buffers before the first step, whole on rank 0."""
        tensors = gather_full_tensors(self.run, dict(self._local_parameters()) | dict(self.run.model.named_buffers()))
        return tensors | self.run.backend.pull_tables()

    def checksum_state(self) -> RankChecksums:
        """What each rank holds of the parameters and buffers."""
        return self._gather_checksums([*self._local_parameters(), *self.run.model.named_buffers()])

    def checksum_gradients(self, step: int) -> RankChecksums:
        """What each rank holds of the gradients and buffers after forward and backward of a step. Gradients, because a parameter stays equal
        where the learning rate is zero."""
        with self.active(), self._determinism():
            self.run.backward(self.read_batch(step))
        grads = _gradients_of(dict(self.run.model.named_parameters()))
        named_grads = [(name, dense(grad)) for name, grad in grads.items()]
        return self._gather_checksums([*named_grads, *self.run.model.named_buffers()])

    def _gather_checksums(self, named_tensors: Sequence[tuple[str, Tensor]]) -> RankChecksums:
        regions = [
            (TensorRegion(name, region.offsets, tuple(region.values.shape)), region.values)
            for name, value in named_tensors
            if not value.is_meta and not value.is_quantized
            for region in local_regions(value, tp_shard_of(self.run, name, value))
        ]
        longest = max((values.numel() * (1 + values.is_complex()) for _, values in regions), default=0)
        weights = checksum_weights(longest, self._ranks.device)
        checksums = {region: compute_checksum(values, weights.to(values.device)) for region, values in regions}
        return self._ranks.all_gather_object(checksums)

    def gather_replication(self) -> dict[str, Replication]:
        """How each parameter is replicated, by the first rank that holds it."""
        model, parameters = self.run.rank_model, self.run.model.named_parameters()
        local = [(name, value) for name, value in parameters if not value.is_meta]
        replication = {n: (model.count_replicas(n, value), model.pipeline_ranks_of(n)) for n, value in local}
        return dict(ChainMap(*self._ranks.all_gather_object(replication)))


def _gradients_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.grad for name, value in parameters.items() if value.grad is not None}
