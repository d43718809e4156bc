"""A job under a plan, live on this rank: batches in, optimizer steps out.

    run = Run(job, plan, world)
    for batch in run.batches():
        step = run.step(batch)

Every rank executes the same calls in the same order; what `step` returns is the same on all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from echelon.data.loader import MicroBatch, StepBatch
from echelon.engine import full_state, grad_clip
from echelon.engine.backends.coordinated_stop import CoordinatedStop
from echelon.engine.backends.launch_servers import ExternalServers
from echelon.engine.backends.parameter_server import ServerBackend
from echelon.engine.buffers.buffer_rollback import BufferRollback
from echelon.engine.buffers.buffer_rule_check import BufferRuleCheck
from echelon.engine.build_model import RankModel, allows_sparse_gradients
from echelon.engine.checkpoint import save_load
from echelon.engine.checkpoint.function_state import find_loss_parameters, preserve_function_state
from echelon.engine.checkpoint.read_history import ReadHistory
from echelon.engine.checkpoint.run_attributes import RunAttributes
from echelon.engine.checkpoint.schedule_state import takes_metric
from echelon.engine.checkpoint.state_check import require_storable, require_storable_state
from echelon.engine.checks.divergence_monitor import DivergenceMonitor
from echelon.engine.checks.replaced_parameters import ReplacedParameterCheck
from echelon.engine.checks.schedule_reads import ScheduleReadCheck
from echelon.engine.checks.shared_state_check import SharedStateCheck
from echelon.engine.data_setup import BatchMover, find_generators, open_run_data, seed_step
from echelon.engine.evaluate import evaluate
from echelon.engine.full_state import FullState
from echelon.engine.init_model import broadcast_tensors
from echelon.engine.loss_averages import LossAverages, is_uncertain, step_divisor, weigh_by_count, zero_loss
from echelon.engine.losses import evaluate_loss, recount_pair
from echelon.engine.metrics import MetricKind
from echelon.engine.optimizers import (
    add_late_parameters,
    init_late_momentum,
    make_optimizers,
    make_schedules,
    single_process_settings,
    sparse_stepped_ids,
    trained_loss_parameters,
)
from echelon.engine.parallel.fsdp import clear_sharding_caches
from echelon.engine.parallel.max_norm_sync import sync_max_norm_weights
from echelon.engine.parallel.pipeline_parallel import Pipeline, sum_gradients
from echelon.engine.parallel.whole_tensor_optimizer import make_full_tensor_optimizers
from echelon.engine.precision import LossScale, autocast, set_fp32_precision
from echelon.engine.process_groups import Communicator, WorldCommunicator
from echelon.engine.step_metrics import StepMetrics
from echelon.engine.step_result import AsyncScalars, StepResult
from echelon.errors import DivergenceError, PlanError, TrainingError
from echelon.job import Job, call_loss, call_model, disable_sparse_gradients
from echelon.loss_counts import repeat_samples
from echelon.plan.plan import Plan
from echelon.tree import tree_tensors
from echelon.trials.random_state import preserve_random_states
from echelon.trials.trial_context import single_process_world
from echelon.world import World, usable_cores


@dataclasses.dataclass(slots=True)
class _StepSums:
    """What a step's micro-batches add up to on this rank; None: nothing was computed here."""

    loss: Tensor | None = None
    count: Tensor | None = None


class Run:
    """A job under a plan on this rank."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        world: World,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        workers: int = 0,
        warn: Callable[[str], None] = lambda message: None,
        external_servers: ExternalServers | None = None,
        monitor_divergence: bool = True,
    ) -> None:
        """`dtype` recasts the model and its floating inputs, for proofs in float64, in place: `IsolatedJob` copies the user's own module. `external_servers`:
        parameter servers that run already. `monitor_divergence`: compare ranks while they train (a proof compares them itself)."""
        if external_servers is not None and not plan.uses_servers:
            raise PlanError(
                f'servers={external_servers.address}: the plan "{plan}" uses no servers; add exchange=server to it, or leave servers out'
            )
        self.external_servers = external_servers
        self.job, self.plan, self.world = job, plan, world
        self.ranks = WorldCommunicator(world, device)
        try:
            self._initialize(job, plan, world, dtype, workers, warn)
            self.divergence_monitor = DivergenceMonitor(self, warn, is_off=not monitor_divergence)
            self._replaced_parameter_check = ReplacedParameterCheck(plan, self.model, self.tp_shards)
            self._shared_state_check = SharedStateCheck(self)
        except BaseException:
            self.ranks.close()  # a group that still runs when Python ends may abort the process
            raise

    def _initialize(
        self,
        job: Job,
        plan: Plan,
        world: World,
        dtype: torch.dtype | None,
        workers: int,
        warn: Callable[[str], None],
    ) -> None:
        if plan.ranks != world.size:
            raise PlanError(
                f'plan "{plan}" is for {plan.ranks} ranks and there are {world.size}: start as many as it needs, or plan for {world.size}'
            )
        #: Whether a step is computed in parts, whose losses' counts are looked at.
        self._step_is_split = False
        #: By axis, the ranks that this one works with on it; `data_parallel`: those that hold other samples.
        self.axes = self.ranks.create_axes(plan.mesh)
        self.data_parallel = self.axes["dp"]
        #: The ranks that compute the same samples together: tp x pp.
        self.model_parallel = self.ranks.model_parallel
        self.device, self._batch_mover = self.ranks.device, BatchMover(self.ranks.device, dtype)
        if self.ranks.via_host:
            warn(
                "ranks share a GPU, which NCCL refuses: gradients go through the hosts' memory (gloo), which is far slower; start "
                "one rank per GPU"
            )
        if self.ranks.hash_seeds_differ:
            warn(
                "Python hashes strings differently on some ranks, so that sets have other orders there; export PYTHONHASHSEED=0 for every rank"
            )
        self.precision = "fp32" if dtype is not None else plan.precision or job.precision
        self.workers = workers
        run_data = open_run_data(
            job,
            self.ranks,
            self.data_parallel,
            micro_batch_size=plan.micro,
            workers=workers,
            shares=plan.data.batch_shares,
        )
        self.loader, self.total_steps = run_data.loader, run_data.total_steps
        #: Both 0 for a stream, whose length is not known.
        self.steps_per_epoch, self.sample_count = run_data.steps_per_epoch, run_data.sample_count
        #: Steps before the first epoch, on a part of the data.
        self.warmup_steps = run_data.warmup_steps
        #: How samples are ordered and what they hold, each as a short text where it is known: a checkpoint goes on with these only.
        self.sample_order, self.data_fingerprint = run_data.order_rule, run_data.fingerprint
        #: How each metric is reduced (metrics.py); known after the first evaluation.
        self.metric_kinds: dict[str, MetricKind] = {}
        #: Whether evaluations weigh the loss by samples, because no other weight joins its batches.
        self.weighs_loss_by_samples = False
        #: Whether evaluations must see to it that a second call of the loss leaves no trace.
        self.loss_is_stateful = True
        reference_settings = single_process_settings(job)
        self.rank_model = RankModel(
            job,
            plan,
            self.ranks,
            self.axes,
            dtype=dtype,
            training_loss=self._training_loss,
            evaluation_loss=self._evaluation_loss,
            warn=warn,
        )
        self.model, self.tp_shards = self.rank_model.model, self.rank_model.tp_shards
        #: The model's own generators, where ranks or stages would else draw the same, or out of step. One device keeps them as they are.
        self._generators = (
            find_generators(self.model) if self.data_parallel.size > 1 or self.axes["pp"].size > 1 else []
        )
        #: Of the whole model, whatever this rank keeps of it.
        self.fingerprint, self.full_shapes = self.rank_model.fingerprint, self.rank_model.full_shapes
        #: By place, the optimizers that step on whole tensors: they compute with more than the part that this rank holds.
        self.full_tensor_optimizers = make_full_tensor_optimizers(
            job, plan, self.ranks, self.axes, model=self.model, tp_shards=self.tp_shards, shapes=self.full_shapes
        )
        held_by_loss = find_loss_parameters(job, self.model)
        self.optimizers = make_optimizers(
            job,
            self.model,
            self.ranks,
            shapes=self.full_shapes,
            fused=plan.fused,
            served_names={table.parameter_name for table in plan.server.tables},
            full_tensor_optimizers=self.full_tensor_optimizers,
            loss_parameters=held_by_loss.values(),
            allow_sparse=allows_sparse_gradients(plan),
            reference_settings=reference_settings,
        )
        if allows_sparse_gradients(plan):
            disable_sparse_gradients(self.model, kept_ids=sparse_stepped_ids(self.optimizers))
        #: Parameters that the loss holds and the optimizers train, by name: every rank has them whole.
        self.loss_parameters = trained_loss_parameters(
            self.optimizers, held_by_loss, plan, has_full_tensor_optimizers=bool(self.full_tensor_optimizers)
        )
        broadcast_tensors([parameter.detach() for parameter in self.loss_parameters.values()], self.ranks)
        self.schedule_read_check = ScheduleReadCheck(
            plan, self.model, self.tp_shards, self.optimizers, self.full_tensor_optimizers
        )
        with self.ranks.raise_on_all_ranks(), self.schedule_read_check.watch():
            self.schedules = make_schedules(job, self.optimizers, self.total_steps)
        #: What this rank has to do with a parameter server, under plans that have one.
        self.server_backend = ServerBackend(self, self.rank_model.initial_tables) if plan.uses_servers else None
        if self.server_backend is not None and (tedious := self.server_backend.slow_replay_warning(self.total_steps)):
            warn(tedious)
        self.rank_model.initial_tables = {}
        #: Of ranks that do not wait for each other: how they stop at the same step all the same.
        self._coordinated_stop = (
            CoordinatedStop(self.data_parallel, plan.server.staleness) if plan.asynchronous else None
        )
        #: The ranks that a step adds numbers up over.
        self._reduction_ranks = Communicator(0, 1, self.device) if plan.asynchronous else self.data_parallel
        self._buffer_rule_check = BufferRuleCheck(self)
        self.step_metrics = StepMetrics(
            self.model,
            self._reduction_ranks,
            uses_micro_batches=self._buffer_rule_check.uses_micro_batches,
            track_frozen=self.rank_model.sharding is None,
            warn=warn,
        )
        self._loss_averages, self._buffer_rollback = LossAverages(self.device), BufferRollback(self.model)
        self._initially_frozen = [
            (name, parameter) for name, parameter in self.model.named_parameters() if not parameter.requires_grad
        ]
        #: Of an accelerator: what ranks saw of the step before, which the host looks at when it comes to the next one.
        self._deferred_checks: AsyncScalars | None = None
        #: A zero that depends on the last output, for a loss that counts nothing of it.
        self._zero_loss: Tensor | None = None
        #: Whether the last step should be compared with one device before its update (of an accelerator: the step before it).
        self.needs_comparison = False
        #: What the loss was called with last.
        self._last_loss_inputs: tuple[Any, Any] = None, None
        self.loss_scale = LossScale() if self.precision == "fp16" else None
        #: About how many items a step's (sum, count) loss counts: a power of two that keeps half precision in range.
        self.nominal_count: float | None = None
        #: Whether parts of a batch are weighed by what their losses average over, instead of by their samples.
        self._weighs_by_count = False
        self.step_number = 0
        self.read_history = ReadHistory(self)
        #: What a checkpoint is to hold about the job (flow/run_settings.py), and what the one that was loaded holds; None: nothing.
        self.job_record: dict[str, Any] | None = None
        self.loaded_record: dict[str, Any] | None = None
        #: Whether schedules are overridden: a checkpoint may have more or fewer of them, and theirs are made again after loading.
        self.replaces_schedules = False
        #: Called once the run is closed.
        self.close_callbacks: list[Callable[[], None]] = []
        self.warn = warn
        #: Of the batch that was evaluated last: its output, the counts of its loss's averages by the first of them, and what its sum was divided by
        #: where nothing was counted.
        self._last_output: Any = None
        self.loss_count_ratios: tuple[float, ...] | None = None
        self.empty_loss_divisor = 0.0
        #: Entered around each seeding, by who wants to know what was drawn since the last one.
        self.seed_context: Callable[[], AbstractContextManager[None]] | None = None
        #: Batches that a pipeline has evaluated.
        self._evaluated_batches = 0
        self._last_step: StepResult | None = None
        #: Set it on any rank (a signal handler may): every rank then reads it from the same `StepResult`.
        self.stop_requested = False
        self._one = torch.ones((), device=self.device)
        self._stop_flag = self._one
        #: Whether optimizer state is yet to be looked at, which is made by the first step.
        self._has_unchecked_state = require_storable(self)
        #: Counters and flags of modules and optimizers, for checkpoints.
        self.attributes = RunAttributes(self)
        self._restore_process_settings = self._apply_process_settings()

    # What it is made of

    def _apply_process_settings(self) -> Callable[[], None]:
        """Set what is the whole process's; returns what puts it back."""
        restore_precision = set_fp32_precision(self.precision)
        threads = torch.get_num_threads()
        if self.device.type == "cpu":
            # Said by itself, not left to OMP_NUM_THREADS: torchrun sets that to 1 where the user set nothing.
            torch.set_num_threads(self.plan.threads or max(usable_cores() // self.world.local_size, 1))

        def restore() -> None:
            restore_precision()
            torch.set_num_threads(threads)

        return restore

    def _training_loss(self, model: nn.Module, batch: Any) -> Any:
        """The loss of a batch: a mean, or (sum, count)."""
        with autocast(self.precision, self.device):
            output = call_model(self.job, model, batch)
            loss = call_loss(self.job, output, batch, model)
            self._zero_loss = zero_loss(output, loss)
            self._last_loss_inputs = (output, batch) if self._step_is_split else (None, None)
        return (loss[0], torch.as_tensor(loss[1], device=self.device)) if isinstance(loss, tuple) else loss

    # The step

    def batches(self, stop: int | None = None) -> Iterator[StepBatch]:
        """This rank's batches from where the run stands to `stop` (default: the end of the training)."""
        steps = self.loader.steps(self.step_number, self.total_steps if stop is None else stop)
        return steps if self.server_backend is None else self.server_backend.look_ahead(steps)

    def step(self, batch: StepBatch) -> StepResult:
        """One optimizer step: every micro-batch, one averaged gradient, one update."""
        return self.finish_step(self.backward(batch), batch)

    def finish_step(self, loss: Tensor, batch: StepBatch) -> StepResult:
        """The rest of a step after `backward`: the loss is a number, then the update."""
        if self.device.type == "cpu":
            self._require_finite_loss(float(loss), self.step_number)
        else:
            self.check_last_step()  # an accelerator is still at work on this one: the step before is looked at
        self._last_step = self.update(loss, batch.samples)
        return self._last_step

    def backward(self, batch: StepBatch) -> Tensor:
        """Leave the gradient of the global batch's loss in `.grad`; returns that loss."""
        self._step_is_split = self.data_parallel.size > 1 or len(batch.micro_batches) > 1
        can_recompute = (
            self._step_is_split
            and self.nominal_count is None
            and self.server_backend is None
            and self.device.type == "cpu"
        )
        self._replaced_parameter_check.begin_step()
        self.read_history.record(batch)
        self.learn_buffer_rules(batch)
        self._shared_state_check.begin_step(is_split=self._step_is_split)
        versions_before = self._batch_versions_before = _batch_versions(batch)
        if can_recompute:
            self._buffer_rollback.save()
        loss = self._accumulate_gradients(batch)
        if loss is None:
            assert can_recompute
            if self.attributes.functions.changed_objects():
                raise DivergenceError(
                    f"step {batch.step + 1}: the loss averages over unequal counts for the first time and keeps values between calls, so that the step "
                    "cannot be computed again with the right weights; return (sum, count) from the loss",
                    cause="averages over unequal counts",
                )
            if _batch_versions(batch) != versions_before:
                raise DivergenceError(
                    f"step {batch.step + 1}: the loss averages over unequal counts for the first time and forward changes its input in place, so "
                    "that the step cannot be computed again with the right weights; return (sum, count) from the loss, or copy the input",
                    cause="averages over unequal counts",
                )
            self._undo_step(batch.step)
            loss = self._accumulate_gradients(batch)
            self.needs_comparison = True  # parts were never weighed so before
        assert loss is not None
        self._buffer_rule_check.require_known(batch)
        self._replaced_parameter_check.require_no_replacement(batch.step)
        self._shared_state_check.require_unchanged(batch.step)
        return loss

    def is_batch_unchanged(self, batch: StepBatch) -> bool:
        """Whether the last step's forward left its samples as they were."""
        return _batch_versions(batch) == self._batch_versions_before

    def learn_buffer_rules(self, batch: StepBatch) -> None:
        """Before the first steps that are computed in parts: learn how calls change the model's state, by calling it. Every rank must call it;
        `backward` does so itself."""
        self._buffer_rule_check.learn_rules(batch)

    def _undo_step(self, step: int) -> None:
        """Forget the step, to compute it again."""
        if self.step_metrics.reduced_state is not None:
            self.step_metrics.reduced_state.begin_micro_batch()
        changed = self._buffer_rollback.undo()
        if changed is not None:
            raise DivergenceError(
                f"step {step + 1}: the loss averages over unequal counts for the first time and {changed} changes for the first time, so that "
                "the step cannot be computed again with the right weights; return (sum, count) from the loss",
                tensor=changed,
                cause="averages over unequal counts",
            )
        for parameter in self.rank_model.parameters:
            parameter.grad = None

    def _accumulate_gradients(self, batch: StepBatch) -> Tensor | None:
        """Forward and backward of every part; None where the parts were not weighed as the loss counts, which it now does."""
        self._seed_random(batch.step, self.data_parallel.rank)
        for parameter in self.loss_parameters.values():
            parameter.grad = None  # the user's own: a profile or a trial may have left one
        self.step_metrics.begin_step()
        self.step_metrics.set_sample_fraction(
            sum(micro_batch.samples for micro_batch in batch.micro_batches) / batch.samples
        )
        self._loss_averages.begin_step()
        self.divergence_monitor.begin_step(batch)
        step_sums = _StepSums()
        if self.server_backend is not None:
            self.server_backend.begin_step(batch)
        if self.rank_model.pipeline is not None:
            try:
                self._run_pipeline(self.rank_model.pipeline, batch, step_sums)
            except RuntimeError:  # torch's, where a stage sends what requires a gradient now and did not at the start
                self._adopt_unfrozen(batch.step)
                raise
        else:
            self._run_micro_batches(batch, step_sums)
        if self.rank_model.gradient_allreduce is not None:
            self.rank_model.gradient_allreduce.wait()
        if self.rank_model.sharding is not None:
            self.rank_model.sharding.finish_backward()
        sum_gradients(self.rank_model.tp_partial, self.axes["tp"])
        if self.data_parallel.size > 1:
            sum_gradients(list(self.loss_parameters.values()), self.data_parallel)
        if self.server_backend is not None:
            self.server_backend.collect_gradients()
        self._sync_max_norm_weights()
        self._adopt_unfrozen(batch.step)
        loss, count, is_counted, checks = self._receive_sums(step_sums)
        if self._must_reweigh(checks, is_counted, batch.step):
            self._weighs_by_count = True
            return None
        if is_counted and self._step_is_split:
            count = step_divisor(checks, count)
        return self._normalize_gradients(loss, count, is_counted, self._summed_fraction(batch))

    def _adopt_unfrozen(self, step: int) -> None:
        """Train parameters that were frozen at the start and that forward has let train since."""
        unfrozen = [(name, parameter) for name, parameter in self._initially_frozen if parameter.requires_grad]
        if not unfrozen:
            return
        if not self.unfreeze([name for name, _ in unfrozen]):
            raise DivergenceError(
                f"step {step + 1}: {unfrozen[0][0]} requires a gradient from now on and was frozen at the start, when ranks agreed on what they exchange; "
                "unfreeze it before training, or train in one process (--plan dp=1), which follows",
                tensor=unfrozen[0][0],
                cause="a parameter that is unfrozen while it trains",
            )

    def unfreeze(self, names: Collection[str]) -> bool:
        """Train parameters that were frozen at the start; False where several ranks have agreed on what they exchange."""
        unfrozen = [parameter for name, parameter in self._initially_frozen if name in names]
        if not unfrozen:
            return True
        if self.plan.ranks > 1 or self.full_tensor_optimizers:
            return False
        for parameter in unfrozen:
            parameter.requires_grad_(True)
        add_late_parameters(self.job, self.model, self.optimizers, set(map(id, unfrozen)))
        self.rank_model.parameters += unfrozen
        self.rank_model.replica_counts += [1] * len(unfrozen)
        self._initially_frozen = [
            named_parameter for named_parameter in self._initially_frozen if not named_parameter[1].requires_grad
        ]
        return True

    def _must_reweigh(self, checks: Tensor, is_counted: bool, step: int) -> bool:
        """Whether the step must be computed again, given what all ranks saw of it."""
        if not self._step_is_split and self.model_parallel.size == 1:
            return False
        if self.device.type == "cpu":
            return self._check_ranks(checks.tolist(), step) and not is_counted
        self._deferred_checks = AsyncScalars([*checks])
        return False

    def _check_ranks(self, checks: Sequence[float], step: int) -> bool:
        """Whether parts of the batch must be weighed by what their losses count; raises where ranks did not compute together."""
        loss_size = self._loss_averages.size
        if self.data_parallel.size > 1:
            self.divergence_monitor.check_data_parallel(checks[loss_size : loss_size + 2], step)
        if self.model_parallel.size > 1:
            self.divergence_monitor.check_model_parallel(checks[loss_size + 2 :], step)
        self.needs_comparison = self._step_is_split and is_uncertain(checks)
        return self._step_is_split and self._loss_averages.has_unequal_counts(checks[:loss_size], step)

    @property
    def seeds_generators(self) -> bool:
        """Whether the model's own generators are seeded at every step, by data rank."""
        return bool(self._generators)

    def _seed_random(self, *seed_key: int | str) -> None:
        """Make random numbers of every kind follow from the job's seed and this place."""
        with nullcontext() if self.seed_context is None else self.seed_context():
            seed_step(self.device, self.job.seed, *seed_key, generators=self._generators)

    def _summed_fraction(self, batch: StepBatch) -> float:
        """Of the batch what the numbers of a step were added up over: all of it, but where ranks do not wait for each other."""
        return (
            sum(micro_batch.samples for micro_batch in batch.micro_batches) / batch.samples
            if self.plan.asynchronous
            else 1.0
        )

    def _sync_max_norm_weights(self) -> None:
        weights = self.rank_model.max_norm_weights
        sync_max_norm_weights(weights, self._reduction_ranks)
        for holders, tied in self.rank_model.tied_parameters if weights else ():
            sync_max_norm_weights(
                [parameter for parameter in tied if any(parameter is weight for weight in weights)], holders
            )

    def _run_micro_batches(self, batch: StepBatch, step_sums: _StepSums) -> None:
        """Forward and backward, micro-batch by micro-batch."""
        last = len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            if self.rank_model.sharding is not None:
                self.rank_model.sharding.prepare_micro_batch(is_last=index == last)
            moved = self.move(micro_batch.batch)
            if self.server_backend is not None:
                self.server_backend.set_micro_batch(moved)
            reduced_state = self.step_metrics.reduced_state
            if reduced_state is not None:
                reduced_state.begin_micro_batch()
            weighed_loss = self._weigh_loss(self._training_loss(self.model, moved), micro_batch, batch, step_sums)
            if reduced_state is not None:
                reduced_state.end_micro_batch(micro_batch.samples / batch.samples)
            if index == last:
                self._send_sums(step_sums)
                if self.rank_model.gradient_allreduce is not None:
                    self.rank_model.gradient_allreduce.sync_next_backward()
            if self.rank_model.sharding is not None:
                self.rank_model.sharding.backward(weighed_loss)
            else:
                weighed_loss.backward()

    def _run_pipeline(self, pipeline: Pipeline, batch: StepBatch, step_sums: _StepSums) -> None:
        """All micro-batches through the stages, in the order of the schedule."""
        if self.rank_model.sharding is not None:
            self.rank_model.sharding.prepare_micro_batch(is_last=False)
        micro_batches = batch.micro_batches
        pipeline.run(
            [self.move(micro_batch.batch) for micro_batch in micro_batches],
            lambda output, index: self._weigh_loss(output, micro_batches[index], batch, step_sums),
            partial(self._seed_random, batch.step, self.data_parallel.rank),
            self.data_parallel
            if self.data_parallel.size > 1 and (self.plan.zero > 1 or self.plan.batchnorm == "sync")
            else None,
        )
        if self.rank_model.sharding is not None:
            self.rank_model.sharding.reduce_kept_gradients()
        for holders, tied in self.rank_model.tied_parameters:
            sum_gradients(tied, holders)
        self._send_sums(step_sums)
        if self.rank_model.gradient_allreduce is not None:
            self.rank_model.gradient_allreduce.sync_next_backward()

    def _weigh_loss(self, loss: Any, micro_batch: MicroBatch, batch: StepBatch, step_sums: _StepSums) -> Tensor:
        """What backward starts from: the micro-batch's share of the step's loss, scaled for the precision."""
        if self._step_is_split and isinstance(loss, tuple):
            loss_sum, count = loss
            loss = self._recount_pair(loss_sum, count, micro_batch.samples)
        elif self._step_is_split:
            terms = self._loss_averages.add_part(
                loss, micro_batch.samples, partial(self._repeat_loss, Tensor, micro_batch.samples)
            )
            self._last_loss_inputs = None, None  # logits are large
            # What an accelerator counts is not known to the host before backward: then every step is weighed by it.
            by_count = self._weighs_by_count or self.nominal_count is not None or self.server_backend is not None
            if terms and (by_count or isinstance(terms[0].count, Tensor)):
                loss = weigh_by_count(loss, terms[0])
        if isinstance(loss, tuple):
            weighed_loss, count = loss
            if self._zero_loss is not None and self.device.type == "cpu" and not count:
                weighed_loss = self._zero_loss
            step_sums.count = count if step_sums.count is None else step_sums.count + count
            factor = self._loss_scale_factor() / self._get_nominal_count(count * len(batch.micro_batches))
        else:
            sample_fraction = micro_batch.samples / batch.samples
            weighed_loss, factor = (loss if sample_fraction == 1 else loss * sample_fraction), self._loss_scale_factor()
        if not weighed_loss.requires_grad:
            raise TrainingError(
                "the loss does not depend on any trainable parameter: was it detached, or made under no_grad?"
            )
        step_sums.loss = weighed_loss.detach() if step_sums.loss is None else step_sums.loss + weighed_loss.detach()
        return (
            weighed_loss
            if factor == 1
            else weighed_loss.float() * factor
            if weighed_loss.dtype.itemsize < 4
            else weighed_loss * factor
        )

    def _recount_pair(self, total: Tensor, count: Tensor, sample_count: int) -> tuple[Tensor, Tensor]:
        """A loss given as (sum, count) with what it really counts, where a minimum may hide that."""
        if self.device.type != "cpu":  # the host does not wait for an accelerator's count
            return total, count
        clamped_counts, given_count = self._loss_averages.clamped_counts, float(count.detach())
        if not clamped_counts.may_be_clamped(given_count, sample_count):
            return total, count
        recounted, _ = recount_pair(
            torch.stack([total.detach().double(), count.detach().double()]),
            partial(self._repeat_loss, tuple, sample_count),
        )
        if recounted is None or recounted[1].isnan():
            self._loss_averages.note_uncertain()
        elif not math.isclose(float(recounted[1]), given_count):
            self._loss_averages.note_clamped(given_count)
            clamped_counts.highest_clamped = max(clamped_counts.highest_clamped, given_count)
            count = recounted[1]
        return total, count

    def _repeat_loss(self, expected_type: type, sample_count: int, times: int) -> Any:
        """The loss of the last part, a tensor or a pair, with every sample given several times; None where it cannot be called so."""
        repeated = repeat_samples(self._last_loss_inputs, sample_count, times)
        try:
            with (
                single_process_world(),
                preserve_function_state(self.job, self.model),
                preserve_random_states(),
                autocast(self.precision, self.device),
            ):
                loss = None if repeated is None else call_loss(self.job, repeated[0], repeated[1], self.model)
        except Exception:  # it takes other shapes only: the count is taken as it was read
            return None
        return loss if isinstance(loss, expected_type) else None

    def _send_sums(self, step_sums: _StepSums) -> None:
        loss = self._one * 0 if step_sums.loss is None else step_sums.loss  # of a stage without a loss
        count = self._one if step_sums.count is None else step_sums.count
        self.step_metrics.send(
            loss,
            count,
            self._one * self.stop_requested,
            extra=self._loss_averages.pack(self.divergence_monitor.pack_data_parallel()),
        )

    def _receive_sums(self, step_sums: _StepSums) -> tuple[Tensor, Tensor, bool, Tensor]:
        """The step's loss, what it counts, whether it is such a sum, and what is watched: the same on every rank."""
        (loss, count, self._stop_flag), checks = self.step_metrics.receive()
        if self.model_parallel.size == 1:
            return loss, count, step_sums.count is not None, checks
        nominal_count = torch.full_like(loss, (self.nominal_count or 0.0) if step_sums.count is not None else 0.0)
        packed = torch.cat([torch.stack([loss, count, nominal_count]), checks])
        local_checks = torch.tensor(self.divergence_monitor.pack_model_parallel(), dtype=torch.float64).to(
            self.device, non_blocking=True
        )
        packed = torch.cat(
            [self._stop_flag.view(1), packed if self.is_reporting else torch.zeros_like(packed), local_checks]
        )
        self._stop_flag, loss, count, nominal_count = self.model_parallel.all_reduce(packed)[:4]
        loss_size = self._loss_averages.size
        packed[4 + loss_size : 4 + len(checks)] = checks[loss_size:]  # between this rank and its data ranks
        if self.rank_model.pipeline is not None and nominal_count > 0:
            self.nominal_count = float(nominal_count)
        is_counted = bool(nominal_count > 0) if self.rank_model.pipeline is not None else step_sums.count is not None
        return loss, count, is_counted, packed[4:]

    def _normalize_gradients(self, loss: Tensor, count: Tensor, is_counted: bool, summed_fraction: float) -> Tensor:
        """Turn sums over items into the mean, and take the loss scale out again. `summed_fraction`: of the batch's samples that were added up."""
        factor: float | Tensor = 1 / self._loss_scale_factor()
        if is_counted:
            if self.device.type == "cpu" and not count > 0:
                raise TrainingError(
                    "the loss counted no item in the whole batch: (sum, count) came back with count 0 on every rank"
                )
            assert self.nominal_count is not None
            factor = factor * self.nominal_count * summed_fraction / count
            loss = loss / count
        else:
            loss = loss / summed_fraction
        if isinstance(factor, Tensor) or factor != 1:
            self._scale_gradients(factor)
        return loss

    def _scale_gradients(self, factor: float | Tensor) -> None:
        grad_clip.scale_gradients(grad_clip.gradients(self.rank_model.parameters), factor)
        for grad in grad_clip.gradients(self.loss_parameters.values()):  # they may be on another device
            grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)
        if self.server_backend is not None:
            self.server_backend.scale_gradients(factor)

    def update(self, loss: Tensor, sample_count: int) -> StepResult:
        """Clip, step the optimizers and schedules, forget the gradients."""
        gradient_norm: Tensor | None = None
        skipped = False
        learning_rates = self._learning_rates()
        if self.job.clip_norm is not None or self.loss_scale is not None:
            gradient_norm = self.gradient_norm()
            skipped = self.loss_scale is not None and not self._gradients_are_finite(gradient_norm)
            if self.job.clip_norm is not None and not skipped:
                grad_clip.clip_gradients(
                    grad_clip.gradients(self.rank_model.parameters), gradient_norm, self.job.clip_norm
                )
                if self.server_backend is not None:
                    self.server_backend.scale_gradients(grad_clip.clip_factor(gradient_norm, self.job.clip_norm))
        if self.server_backend is not None:
            self.server_backend.push(skipped=skipped)
            for served_parameter in self.server_backend.dense_parameters.values():
                served_parameter.grad = None  # the servers have stepped on it
        self.divergence_monitor.before_update(self.step_number)
        # Not from the data rank's stream: replicas must draw the same, and hold the same state after a skipped step too.
        seed_step(self.device, self.job.seed, self.step_number, "update")
        if not skipped:
            for index, optimizer in enumerate(self.optimizers):
                init_late_momentum(optimizer)
                with self.rank_model.explain_step_errors(optimizer):
                    if index in self.full_tensor_optimizers:
                        self.full_tensor_optimizers[index].step(optimizer)
                    else:
                        optimizer.step()
            for schedule in self.schedules:
                if not takes_metric(schedule):
                    self._step_schedule(schedule)
                elif self.job.eval_data is None:
                    self._step_schedule(schedule, float(loss))
            if self._has_unchecked_state:
                self._has_unchecked_state = False
                require_storable_state(self)
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=skipped)
            self._require_usable_scale(self.loss_scale)
        for parameter in (*self.rank_model.parameters, *self.loss_parameters.values()):
            parameter.grad = None
        self.step_number += 1
        self.divergence_monitor.after_update(self.step_number)
        if self._coordinated_stop is not None:
            self._stop_flag = self._one * self._coordinated_stop.report(self.step_number, self.stop_requested)
        return StepResult(
            loss, gradient_norm, self._stop_flag, sample_count, skipped, learning_rates, self.step_metrics.resync_flag
        )

    def _step_schedule(self, schedule: Any, *metric: float) -> None:
        with self.schedule_read_check.watch(schedule, self.step_number):
            schedule.step(*metric)

    def _gradients_are_finite(self, gradient_norm: Tensor) -> bool:
        """Whether all gradients are; `gradient_norm`: the norm of the model's."""
        loss_gradients = grad_clip.gradients(self.loss_parameters.values())
        return math.isfinite(gradient_norm.item()) and all(bool(grad.isfinite().all()) for grad in loss_gradients)

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient, the same on every rank. All must ask."""
        replica_counts = [
            count
            for parameter, count in zip(self.rank_model.parameters, self.rank_model.replica_counts, strict=True)
            if parameter.grad is not None
        ]
        dense = grad_clip.gradients(self.rank_model.parameters)
        if self.server_backend is None:
            return grad_clip.total_norm(
                dense, replica_counts, self.ranks, same_parameters=self.rank_model.pipeline is None
            )
        if self.server_backend.dense_parameters:  # each rank has its own part of these gradients
            dense = [self._reduction_ranks.all_reduce(grad.clone()) for grad in dense]
        dense_norm = grad_clip.total_norm(dense, replica_counts, self.ranks)
        return (dense_norm.double().square() + self.server_backend.squared_norm()).sqrt().to(dense_norm.dtype)

    def _learning_rates(self) -> list[float | Tensor]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        # A schedule changes a rate that is a tensor in place.
        return [rate.clone() if isinstance(rate := group["lr"], Tensor) else rate for group in groups]

    def _loss_scale_factor(self) -> float:
        return self.loss_scale.scale if self.loss_scale is not None else 1.0

    def _get_nominal_count(self, count: Tensor) -> float:
        """The divisor of sums before backward. Asked of the ranks once; a power of two, so that it leaves no trace."""
        if self.nominal_count is None:
            count_of_step = max(float(self._reduction_ranks.all_reduce(count.detach().double().clone())), 1.0)
            self.nominal_count = 2.0 ** round(math.log2(count_of_step))
        return self.nominal_count

    def check_last_step(self) -> None:
        """Look at the last step's loss and news, before it is built upon, saved or reported."""
        if self._coordinated_stop is not None:
            self._coordinated_stop.wait()
        if self._last_step is None:
            return
        self._require_finite_loss(self._last_step.read()[0], self.step_number - 1)
        if self._deferred_checks is not None:
            (checks, self._deferred_checks), step = (self._deferred_checks.read(), None), self.step_number - 1
            if self._check_ranks(checks, step) and self.nominal_count is None:
                raise DivergenceError(
                    f"step {step + 1}: the loss averages over unequal counts on different ranks or micro-batches, which an accelerator cannot weigh "
                    "afterwards; return (sum, count) from the loss",
                    cause="averages over unequal counts",
                )
        if self._last_step.needs_resync():
            self.step_metrics.resync()

    def synchronize(self) -> None:
        """Have all ranks' pushes be with the servers, and ranks that do not wait for each other hold the same; every rank must call it, after
        the same step."""
        if self.server_backend is not None:
            self.server_backend.flush()
            self.ranks.barrier()
        if self.plan.asynchronous and self.server_backend is not None:
            self.server_backend.pull_dense_parameters()
        for index, full_tensor_optimizer in self.full_tensor_optimizers.items():
            full_tensor_optimizer.sync_settings(self.optimizers[index])

    def _require_finite_loss(self, loss: float, step: int) -> None:
        if self.loss_scale is None and not math.isfinite(loss):
            empty_hint = " Or the loss counted no item in the whole batch: then (sum, count) has count 0 on every rank."
            raise TrainingError(
                f"the loss is {loss} at step {step + 1}: training stopped, and no checkpoint holds that step; lower the learning rate, "
                f"clip gradients (clip_norm=1.0), or look at its batch: {_batch_expression(step)}.{empty_hint if self.nominal_count else ''}"
            )

    def _require_usable_scale(self, loss_scale: LossScale) -> None:
        if loss_scale.has_diverged:
            raise TrainingError(
                f"gradients overflow fp16 at step {self.step_number + 1}, as in the {loss_scale.overflow_streak - 1} steps before, though the loss is not "
                "scaled any more: training stopped, the weights are those before these steps; use precision=bf16 or fp32, lower the "
                f"learning rate, or look at its batch: {_batch_expression(self.step_number)}"
            )

    def move(self, batch: Any) -> Any:
        """To the device, and to the proof's dtype where there is one. Containers keep their kind."""
        return self._batch_mover(batch)

    # What it holds

    def reshard(self) -> None:
        """Give back what a forward without backward gathered."""
        if self.rank_model.sharding is not None:
            self.rank_model.sharding.reshard()

    def gather_full_state(self) -> FullState | None:
        """The whole state on rank 0, None elsewhere."""
        return full_state.gather_full_state(self)

    @property
    def mutable_buffers(self) -> dict[str, tuple[int, ...]] | None:
        """The buffers, but those of batch norms, that steps were seen to change, with shapes; None: nobody has looked."""
        return self.step_metrics.mutable_buffers

    def assume_mutable_buffers(self, mutable_buffers: Mapping[str, Sequence[int]] | None) -> None:
        """Go on with these buffers known to change, as the run that was saved did."""
        self.step_metrics.assume_mutable(mutable_buffers)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state that this rank keeps."""
        return full_state.state_bytes(self)

    @property
    def is_reporting(self) -> bool:
        """Of the ranks that computed the same samples, whether this one has the outcome and speaks for them."""
        return self.axes["tp"].rank == 0 and (
            self.rank_model.pipeline is None or self.rank_model.pipeline.computes_loss
        )

    def evaluate_batch(self, batch: Any) -> tuple[Tensor, Any] | None:
        """The loss of a batch, as evaluate.py has it, and the model's output; None on stages without a loss."""
        if self.rank_model.pipeline is None:
            (loss,) = self._evaluation_loss(self.model, batch)
        else:
            self._evaluated_batches += 1
            seed = partial(self._seed_random, self.step_number, self.data_parallel.rank, -self._evaluated_batches)
            losses = self.rank_model.pipeline.forward(batch, self._evaluation_loss, seed)
            if not losses:
                return None
            (loss,) = losses
        output, self._last_output = self._last_output, None
        return loss, output

    def _evaluation_loss(self, model: nn.Module, batch: Any) -> tuple[Tensor]:
        """The loss; the output is kept aside. Metrics are not computed here: stages also call it without values, to learn shapes."""
        with autocast(self.precision, self.device):
            loss, self._last_output, self.loss_count_ratios, self.empty_loss_divisor = evaluate_loss(
                self.job,
                model,
                batch,
                weigh_by_counts=not self.weighs_loss_by_samples,
                preserve_state=self.loss_is_stateful,
            )
        return (loss,)

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Loss and metrics over the job's evaluation set, or `data`. The former's loss steps ReduceLROnPlateau."""
        self.synchronize()
        self._seed_random(self.step_number, "evaluate", self.data_parallel.rank)
        results = evaluate(self, data)
        for schedule in self.schedules if data is None else ():
            if takes_metric(schedule):
                self._step_schedule(schedule, results["loss"])
        self._sync_max_norm_weights()
        return results

    def save(self, folder: str | Path) -> int:
        """Write a checkpoint; returns its bytes. What ranks must hold alike is compared before."""
        self.check_last_step()
        self.divergence_monitor.compare_replicas(self.step_number)
        return save_load.save(self, Path(folder))

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint, whatever plan wrote it."""
        is_new_run = self.step_number == 0
        checkpoint = save_load.load(self, Path(folder))
        if is_new_run:
            self.read_history.restore(checkpoint)
        else:
            self.read_history.rewind(self.step_number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what the run holds: hooks on the parameters, the process group if it was joined here."""
        if self.server_backend is not None:
            self.server_backend.close()
        self.divergence_monitor.close()
        self._replaced_parameter_check.close()
        if self.rank_model.close():
            del self.model, self.optimizers, self.schedules, self.schedule_read_check, self.full_tensor_optimizers
            self.step_metrics = StepMetrics(nn.Module(), self.data_parallel)
            clear_sharding_caches()
        self._restore_process_settings()
        self._restore_process_settings = lambda: None  # by now somebody else may have set them
        self.ranks.close()
        while self.close_callbacks:
            self.close_callbacks.pop()()


def _batch_versions(batch: StepBatch) -> list[int]:
    """How often each tensor of a batch was written to."""
    return [
        0 if tensor.is_inference() else tensor._version
        for micro_batch in batch.micro_batches
        for tensor in tree_tensors(micro_batch.batch)
    ]


def _batch_expression(step: int) -> str:
    """How to get the batch of a step (from 0), for one who has a job and no run."""
    return f'next(echelon.parallelize(job, "dp=1").loader.steps({step}, {step + 1}))'
