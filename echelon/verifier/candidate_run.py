"""The plan's run as a proof sees it: one step after another, each as a record on rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
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
from echelon.plan.batch_split import SampleRange, split_batch
from echelon.plan.plan import Plan
from echelon.trials.determinism import OPTIMIZER_STEP_MODE, DeterministicMode, disable_randomness, seed_from_position
from echelon.trials.isolation import IsolatedJob
from echelon.trials.trial_context import compile_disabled
from echelon.verifier import job_reader
from echelon.verifier.compare_outputs import (
    OutputChecksums,
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

#: How many ranks hold the same part of a parameter, and the ranks of the pipeline axis that do.
Replication = tuple[int, frozenset[int]]


class _OutputRecorder:
    """The marks of what the model gives for this rank's micro-batches, which come in order. `per_sample`: sample by sample."""

    def __init__(self, sample_ranges: Sequence[SampleRange], *, per_sample: bool) -> None:
        self._sample_ranges, self._per_sample = sample_ranges, per_sample
        self._calls: list[dict[OutputSlice, TensorChecksum | None]] = []

    def record(self, tensors: list[Tensor | None]) -> None:
        """Take one output; one without numbers is another stage's."""
        if any(tensor is not None for tensor in tensors):
            call_index = len(self._calls)
            self._calls.append(
                self._checksums_of(tensors, self._sample_ranges[call_index])
                if call_index < len(self._sample_ranges)
                else {}
            )

    def _checksums_of(
        self, tensors: list[Tensor | None], sample_range: SampleRange
    ) -> dict[OutputSlice, TensorChecksum | None]:
        checksums: dict[OutputSlice, TensorChecksum | None] = {}
        for single_sample in single_sample_ranges(sample_range) if self._per_sample else [sample_range]:
            checksums |= checksum_outputs(
                tensors, single_sample, first=single_sample.start - sample_range.start, batch_size=sample_range.size
            )
        return checksums

    @property
    def outputs(self) -> OutputChecksums:
        """All of them; none where the model was not called once for each micro-batch."""
        is_complete = len(self._calls) == len(self._sample_ranges)
        return (
            {output_slice: checksum for call in self._calls for output_slice, checksum in call.items()}
            if is_complete
            else {}
        )


def _enter_deterministic(stack: contextlib.ExitStack, determinism: DeterministicMode) -> None:
    stack.enter_context(determinism())


def _full_logits(value: Tensor) -> Tensor:
    return value.gather_detached() if isinstance(value, ShardedLogits) else value


class CandidateRun:
    """A job under a plan on this rank, held still. Every rank makes the same calls in the same order."""

    def __init__(
        self, job: Job, plan: Plan, ranks: WorldCommunicator, determinism: DeterministicMode, dtype: torch.dtype | None, *,
        per_sample: bool = False, without_dropout: bool = True,
    ) -> None:  # fmt: skip
        """`per_sample`: outputs are told sample by sample, to compare with a run that shares the samples out in another way. `without_dropout`:
        dropout is off."""
        #: What the job compiles itself is no part of the proof; what the plan compiles is.
        self._compile_context = contextlib.nullcontext if plan.compile else compile_disabled
        self._isolated_job = IsolatedJob(job, dtype)  # a proof must not train the user's own
        self._ranks, self._determinism, self._per_sample = ranks, determinism, per_sample
        with self._compile_context(), self._isolated_job.active():
            self.run = Run(
                self._isolated_job.job, plan, ranks.world, device=ranks.device, dtype=dtype, monitor_divergence=False
            )
        #: Paths of the modules whose dropout is off.
        self.modules_without_dropout = disable_randomness(self.run.model) if without_dropout else []
        #: Steps that a loss scale made the run skip.
        self.skipped_steps = 0
        #: Whether the next step's outputs are noted. Compiled modules do not tell what they give.
        self._records_outputs = dtype is not None and not plan.compile
        self._in_own_precision = dtype is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run.close()

    def read_batch(self, step: int) -> StepBatch:
        """What this rank reads for a step."""
        with self._isolated_job.active():
            (batch,) = self.run.loader.steps(step, step + 1)
        return batch

    def gather_start_values(self) -> dict[str, Tensor]:
        """Parameters and buffers before the first step, whole on rank 0."""
        tensors = gather_full_tensors(self.run, dict(self._local_parameters()) | dict(self.run.model.named_buffers()))
        return tensors | self.run.backend.pull_tables()

    def _local_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those that ranks hold: of a server's tables they have none."""
        tables = self.run.backend.table_names
        return [(name, value) for name, value in self.run.model.named_parameters() if name not in tables]

    def step(self, step: int) -> StepRecord | None:
        """One step; the record is rank 0's."""
        with self.active():
            return self._run_step(step)

    def repeat_backward(self, step: int) -> list[Tensor]:
        """Forward and backward of a step without an update: its loss, and the gradients that this rank holds."""
        run, batch = self.run, self.read_batch(step)
        trained = [*run.model.parameters(), *run.loss_parameters.values()]
        for value in trained:
            value.grad = None
        sample_ranges = split_batch(batch.samples, run.plan.mesh.dp, run.plan.micro, run.plan.data.batch_shares)[
            run.data_parallel.rank
        ]
        with self._determinism(), self._seeding_micro_batches(step, sample_ranges):
            loss = run.backward(batch)
        grads = [to_local(value.grad) for value in trained if value.grad is not None]
        dense = [grad if grad.layout == torch.strided else grad.to_dense() for grad in grads]
        return [loss.detach().clone(), *(grad.detach().clone() for grad in dense)]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """torch's switches for float32 are the process's, and other runs live there too, which must not share this one's state."""
        restore = set_fp32_precision(self.run.precision)
        try:
            with self._compile_context(), self._isolated_job.active():
                yield
        finally:
            restore()

    def _run_step(self, step: int) -> StepRecord | None:
        run, batch = self.run, self.read_batch(step)
        sample_ranges = split_batch(batch.samples, run.plan.mesh.dp, run.plan.micro, run.plan.data.batch_shares)[
            run.data_parallel.rank
        ]
        recorder = _OutputRecorder(sample_ranges, per_sample=self._per_sample)
        with self._determinism():
            run.train_step.buffer_rule_check.learn_rules(
                batch
            )  # it calls the model, which must not be taken for the step's own calls
        recording = (
            record_outputs(run.model, recorder.record, _full_logits)
            if self._records_outputs
            else contextlib.nullcontext()
        )
        with self._determinism(), recording, self._seeding_micro_batches(step, sample_ranges):
            loss = run.backward(batch)
        outputs_by_rank = (
            self._ranks.all_gather_object(recorder.outputs if run.is_reporting else {}) if self._records_outputs else []
        )
        self._records_outputs = False
        parameters_by_name = dict(self._local_parameters())
        gradients_by_name = self._gather_full_tensors(
            {name: value.grad for name, value in parameters_by_name.items() if value.grad is not None}
        )
        gradients_by_name |= run.backend.gather_gradients()
        gradient_norm = self._gradient_norm()
        loss_parameters = job_reader.loss_parameters(run.model, run.optimizers) if run.loss_parameters else {}
        gradients_by_name |= self._gather_full_tensors(
            {name: value.grad for name, value in loss_parameters.items() if value.grad is not None}
        )
        local_norms = [torch.linalg.vector_norm(to_local(grad)) for grad in gradients(parameters_by_name.values())]
        with self._deterministic_updates():
            result = run.update(loss, batch.samples)
        self.skipped_steps += result.skipped
        parameters, buffers, optimizer_state = (
            self._gather_full_tensors(each)
            for each in (
                parameters_by_name | loss_parameters,
                dict(run.model.named_buffers()),
                self._optimizer_tensors(),
            )
        )
        parameters |= run.backend.pull_tables()
        if not run.world.is_main:
            return None
        return StepRecord(
            step=step,
            loss=result.loss,
            norm=gradient_norm if result.gradient_norm is None else result.gradient_norm,
            gradients={
                name: gradients_by_name.get(name)
                for name in (
                    *(name for name, _ in run.model.named_parameters() if name in run.full_shapes),
                    *loss_parameters,
                )
            },
            parameters=parameters,
            buffers=buffers,
            optimizer=optimizer_state,
            learning_rates=tuple(map(float, result.learning_rates)),
            local_norm=torch.linalg.vector_norm(torch.stack(local_norms)) if local_norms else None,
            outputs={
                output_slice: each for rank_outputs in outputs_by_rank for output_slice, each in rank_outputs.items()
            },
            server_trained=run.backend.server_trained,
        )

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """What the optimizers keep for the model's parameters."""
        loss_prefixes = tuple(
            f"{index}/{name}/" for index in range(len(self.run.optimizers)) for name in self.run.loss_parameters
        )
        return {
            name: value for name, value in optimizer_tensors(self.run).items() if not name.startswith(loss_prefixes)
        }

    @contextlib.contextmanager
    def _seeding_micro_batches(self, step: int, sample_ranges: Sequence[SampleRange]) -> Iterator[None]:
        """Where something draws that cannot be held: this rank's micro-batches each start from a seed of their own."""
        if not self._determinism.needs_seeding:
            yield
            return
        starts = iter(sample_range.start for sample_range in sample_ranges)

        def seed(*_: Any) -> None:
            start = next(starts, None)
            if start is not None:
                seed_from_position(self.run.job.seed, step, start)

        hook = self.run.model.register_forward_pre_hook(seed)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def _deterministic_updates(self) -> Iterator[None]:
        """The optimizers' steps are held still as the reference's are; what else an update does is the engine's own."""
        determinism = dataclasses.replace(OPTIMIZER_STEP_MODE, widen_casts=not self._in_own_precision)
        with contextlib.ExitStack() as hooks, contextlib.ExitStack() as active_update:
            for optimizer in self.run.optimizers:
                hooks.callback(
                    optimizer.register_step_pre_hook(lambda *_: _enter_deterministic(active_update, determinism)).remove
                )
                hooks.callback(optimizer.register_step_post_hook(lambda *_: active_update.close()).remove)
            yield

    def _gather_full_tensors(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole on rank 0. A tensor without elements has no part that a rank could send."""
        full_tensors = gather_full_tensors(self.run, values)
        empty_tensors = {name: to_local(value).detach().cpu() for name, value in values.items() if not value.numel()}
        return (
            full_tensors | {name: value for name, value in empty_tensors.items() if name not in full_tensors}
            if self.run.world.is_main
            else full_tensors
        )

    def _gradient_norm(self) -> Tensor | None:
        """The gradient norm where a training would not ask for it; None where it does, or where rounding would decide."""
        return (
            None
            if self._in_own_precision or self.run.job.clip_norm is not None
            else self.run.train_step.gradient_norm()
        )

    def prepare(self, step: int) -> None:
        """Have the run call the model as it does before its first step, so that later calls are the step's own."""
        with self.active(), self._determinism():
            self.run.train_step.buffer_rule_check.learn_rules(self.read_batch(step))

    def checksum_state(self) -> RankChecksums:
        """What each rank holds of the parameters and the buffers."""
        return self._gather_checksums([*self._local_parameters(), *self.run.model.named_buffers()])

    def checksum_gradients(self, step: int) -> RankChecksums:
        """What each rank holds of the gradients and the buffers after forward and backward of a step. Gradients tell more than the
        parameters they change: a learning rate may be zero."""
        with self.active(), self._determinism():
            self.run.backward(self.read_batch(step))
        grads = [(name, value.grad) for name, value in self.run.model.named_parameters() if value.grad is not None]
        dense = [(name, grad if grad.layout == torch.strided else grad.to_dense()) for name, grad in grads]
        return self._gather_checksums([*dense, *self.run.model.named_buffers()])

    def _gather_checksums(self, named_tensors: Sequence[tuple[str, Tensor]]) -> RankChecksums:
        region_values = [
            (TensorRegion(name, region.offsets, tuple(region.values.shape)), region.values)
            for name, value in named_tensors
            if not value.is_meta and not value.is_quantized
            for region in local_regions(value, tp_shard_of(self.run, name, value))
        ]
        longest = max((values.numel() * (1 + values.is_complex()) for _, values in region_values), default=0)
        weights = checksum_weights(longest, self._ranks.device)
        checksums = {
            region_key: compute_checksum(values, weights.to(values.device)) for region_key, values in region_values
        }
        return self._ranks.all_gather_object(checksums)

    def gather_replication(self) -> dict[str, Replication]:
        """By parameter."""
        run = self.run
        replication = {
            name: (run.rank_model.count_replicas(name, value), run.rank_model.pipeline_ranks_of(name))
            for name, value in run.model.named_parameters()
            if not value.is_meta
        }
        return {
            name: replication_of_name
            for rank_replication in reversed(self._ranks.all_gather_object(replication))
            for name, replication_of_name in rank_replication.items()
        }
