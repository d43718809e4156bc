"""One optimizer step: forward and backward of every micro-batch, one averaged gradient, one update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from echelon.data.loader import StepBatch
from echelon.engine import grad_clip
from echelon.engine.buffers.buffer_rollback import BufferRollback
from echelon.engine.buffers.buffer_rule_check import BufferRuleCheck, rules_apply
from echelon.engine.checkpoint import optimizer_state
from echelon.engine.checkpoint.run_attributes import RunAttributes
from echelon.engine.checkpoint.schedule_state import takes_metric
from echelon.engine.checks.divergence_monitor import DivergenceMonitor
from echelon.engine.checks.replaced_parameters import ReplacedParameterCheck
from echelon.engine.checks.shared_state_check import SharedStateCheck
from echelon.engine.data_setup import seed_step
from echelon.engine.loss_averages import LossAverages, is_uncertain
from echelon.engine.loss_weighing import LossWeighing
from echelon.engine.optimizers import init_late_momentum
from echelon.engine.parallel.data_parallel import sum_gradients, sync_max_norm_weights
from echelon.engine.parallel.pipeline_parallel import Pipeline
from echelon.engine.run_state import RunState
from echelon.engine.step_metrics import StepMetrics
from echelon.engine.step_result import AsyncScalars, StepResult
from echelon.errors import DivergenceError, TrainingError
from echelon.tree import tensor_versions


class TrainStep:
    """Computes the steps of one run, and checks each before its update."""

    def __init__(self, run: RunState, attributes: RunAttributes, *, checks_state: bool, monitors: bool) -> None:
        """`checks_state`: whether optimizer state must be checked once the first step has created it. `monitors`: whether ranks are compared."""
        self._run, self._attributes = run, attributes
        self.loss_weighing = LossWeighing(run)
        self.step_metrics = StepMetrics(
            run.model, run.backend.step_ranks, uses_micro_batches=rules_apply(run) and run.plan.micro is not None,
            track_frozen=run.rank_model.sharding is None, warn=run.warn,
        )  # fmt: skip
        self.buffer_rule_check = BufferRuleCheck(run, self.step_metrics)
        self.divergence_monitor = DivergenceMonitor(run, attributes, is_off=not monitors)
        self._replaced_parameter_check = ReplacedParameterCheck(run.plan, run.model, run.tp_shards)
        self._shared_state_check = SharedStateCheck(run, attributes.functions)
        self._buffer_rollback = BufferRollback(run.model)
        self._has_unchecked_state = checks_state
        #: Of an accelerator: what ranks saw of the last step, which the host reads when it comes to the next one.
        self._deferred_checks: AsyncScalars | None = None
        #: Whether the last step should be compared with one device before its update (of an accelerator: the step before it).
        self.needs_comparison = False
        self._one = torch.ones((), device=run.device)
        self._stop_flag = self._one
        #: The last finished step, not yet checked on an accelerator.
        self.last_step: StepResult | None = None
        self._versions_before: list[int] = []

    def backward(self, batch: StepBatch) -> Tensor:
        """Leave the gradient of the global batch's loss in `.grad`; returns that loss."""
        run = self._run
        is_split = run.is_split(batch)
        can_repeat = is_split and run.nominal_count is None and run.backend.can_repeat_step and run.device.type == "cpu"
        self._replaced_parameter_check.begin_step()
        self.buffer_rule_check.learn_rules(batch)
        self._shared_state_check.begin_step(is_split=is_split)
        self._versions_before = _batch_versions(batch)
        if can_repeat:
            self._buffer_rollback.save()
        loss = self._accumulate_gradients(batch, is_split=is_split)
        if loss is None:
            assert can_repeat
            self._undo_step(batch)
            loss = self._accumulate_gradients(batch, is_split=is_split)
            self.needs_comparison = True  # parts were never weighed so before
        assert loss is not None
        self.buffer_rule_check.require_known(batch)
        self._replaced_parameter_check.require_no_replacement(batch.step)
        self._shared_state_check.require_unchanged(batch.step)
        return loss

    def is_batch_unchanged(self, batch: StepBatch) -> bool:
        """Whether the last step's forward left its samples as they were."""
        return _batch_versions(batch) == self._versions_before

    def _undo_step(self, batch: StepBatch) -> None:
        changed_buffer, obstacle, remedy = None, "", "return (sum, count) from the loss"
        if self._attributes.functions.changed_objects():
            obstacle = "keeps values between calls"
        elif not self.is_batch_unchanged(batch):
            obstacle, remedy = "forward changes its input in place", f"{remedy}, or copy the input"
        else:
            if self.step_metrics.reduced_state is not None:
                self.step_metrics.reduced_state.begin_micro_batch()
            if (changed_buffer := self._buffer_rollback.undo()) is not None:
                obstacle = f"{changed_buffer} changes for the first time"
        if obstacle:
            problem = f"the loss averages over unequal counts for the first time and {obstacle}: it cannot be repeated"
            message, cause = f"step {batch.step + 1}: {problem}; {remedy}", "averages over unequal counts"
            raise DivergenceError(message, tensor=changed_buffer, cause=cause)
        for parameter in self._run.rank_model.parameters:
            parameter.grad = None

    def _accumulate_gradients(self, batch: StepBatch, *, is_split: bool) -> Tensor | None:
        """Forward and backward of every part; None where parts were not weighed as the loss counts: from now on they are."""
        run, weighing = self._run, self.loss_weighing
        run.seed_random(batch.step, run.data_parallel.rank)
        for parameter in run.loss_parameters.values():
            parameter.grad = None  # the user's own: a profile or a trial may have left one
        weighing.begin_step(batch, is_split=is_split)
        self.step_metrics.begin_step(weighing.local_samples / batch.samples)
        self.divergence_monitor.begin_step(batch)
        run.backend.begin_step(batch)
        if run.rank_model.pipeline is not None:
            try:
                self._run_pipeline(run.rank_model.pipeline, batch)
            except RuntimeError:  # torch's, where a stage sends what requires a gradient now and did not at the start
                self._adopt_unfrozen(batch.step)
                raise
        else:
            self._run_micro_batches(batch)
        run.backend.finish_backward()
        sum_gradients(run.rank_model.tp_partial, run.axes["tp"])
        self.sync_max_norm_weights()
        self._adopt_unfrozen(batch.step)
        loss, count, is_counted, checks = self._receive_sums()
        if self._must_repeat(checks, batch.step, is_counted=is_counted):
            weighing.by_count = True
            return None
        loss, factor = weighing.normalize(loss, count, checks, batch, is_counted=is_counted)
        if isinstance(factor, Tensor) or factor != 1:
            self._scale_gradients(factor)
        return loss

    def _run_micro_batches(self, batch: StepBatch) -> None:
        run, reduced_state = self._run, self.step_metrics.reduced_state
        for index, micro_batch in enumerate(batch.micro_batches):
            is_last = index == len(batch.micro_batches) - 1
            moved = run.move_batch(micro_batch.batch)
            run.backend.begin_micro_batch(moved, is_last=is_last)
            if reduced_state is not None:
                reduced_state.begin_micro_batch()
            loss = self.loss_weighing.weigh(run.training_loss(run.model, moved), micro_batch, batch)
            if reduced_state is not None:
                reduced_state.end_micro_batch(micro_batch.samples / batch.samples)
            if is_last:
                self._send_sums()
            run.backend.backward(loss, is_last=is_last)

    def _run_pipeline(self, pipeline: Pipeline, batch: StepBatch) -> None:
        """All micro-batches through the stages, in the order of the schedule."""
        run, micro_batches = self._run, batch.micro_batches
        run.backend.begin_micro_batch(None, is_last=False)
        communicates = run.data_parallel.size > 1 and (run.plan.zero > 1 or run.plan.batchnorm == "sync")
        pipeline.run(
            [run.move_batch(micro_batch.batch) for micro_batch in micro_batches],
            lambda loss, index: self.loss_weighing.weigh(loss, micro_batches[index], batch),
            partial(run.seed_random, batch.step, run.data_parallel.rank),
            run.data_parallel if communicates else None,
        )
        for holders, tied in run.rank_model.tied_parameters:
            sum_gradients(tied, holders)
        self._send_sums()

    def _adopt_unfrozen(self, step: int) -> None:
        unfrozen = self._run.unfrozen_names()
        if unfrozen and not self._run.unfreeze(unfrozen):
            problem = f"{unfrozen[0]} requires a gradient from now on and was frozen when ranks agreed on the exchange"
            message = f"step {step + 1}: {problem}; unfreeze it before training, or train in one process (--plan dp=1)"
            raise DivergenceError(message, tensor=unfrozen[0], cause="a parameter that is unfrozen while it trains")

    def sync_max_norm_weights(self) -> None:
        """Give every rank the rows that forward renormalized on any."""
        run = self._run
        weights = run.rank_model.max_norm_weights
        sync_max_norm_weights(weights, run.backend.step_ranks)
        for holders, tied in run.rank_model.tied_parameters if weights else ():
            sync_max_norm_weights([p for p in tied if any(p is weight for weight in weights)], holders)

    def _scale_gradients(self, factor: float | Tensor) -> None:
        run = self._run
        grad_clip.scale_gradients(grad_clip.gradients(run.rank_model.parameters), factor)
        for grad in grad_clip.gradients(run.loss_parameters.values()):  # they may be on another device
            grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)
        run.backend.scale_gradients(factor)

    def _send_sums(self) -> None:
        extra = self.loss_weighing.averages.pack(self.divergence_monitor.pack_data_parallel())
        self.step_metrics.send(*self.loss_weighing.sums(), self._one * self._run.stop_requested, extra=extra)

    def _receive_sums(self) -> tuple[Tensor, Tensor, bool, Tensor]:
        """The step's loss, what it counts, whether it is a sum over that, and what is checked: the same on every rank."""
        run, is_counted = self._run, self.loss_weighing.is_counted
        (loss, count, self._stop_flag), checks = self.step_metrics.receive()
        if run.model_parallel.size == 1:
            return loss, count, is_counted, checks
        nominal_count = torch.full_like(loss, (run.nominal_count or 0.0) if is_counted else 0.0)
        sums = torch.cat([torch.stack([loss, count, nominal_count]), checks])
        sums = sums if run.is_reporting else torch.zeros_like(sums)
        local_checks = torch.tensor(self.divergence_monitor.pack_model_parallel(), dtype=torch.float64)
        packed = torch.cat([self._stop_flag.view(1), sums, local_checks.to(run.device, non_blocking=True)])
        self._stop_flag, loss, count, nominal_count = run.model_parallel.all_reduce(packed)[:4]
        packed[4 + LossAverages.size : 4 + len(checks)] = checks[LossAverages.size :]  # of its data ranks
        if run.rank_model.pipeline is not None:
            is_counted = bool(nominal_count > 0)
            if is_counted:
                run.nominal_count = float(nominal_count)
        return loss, count, is_counted, packed[4:]

    def _must_repeat(self, checks: Tensor, step: int, *, is_counted: bool) -> bool:
        """Whether the step must be computed again, by what all ranks saw of it."""
        if not self.loss_weighing.is_split and self._run.model_parallel.size == 1:
            return False
        if self._run.device.type != "cpu":
            self._deferred_checks = AsyncScalars([*checks])
            return False
        return self._check_ranks(checks.tolist(), step) and not is_counted

    def _check_ranks(self, checks: Sequence[float], step: int) -> bool:
        """Whether parts of the batch must be weighed by what their losses count; raises where ranks did not compute together."""
        own_checks = checks[LossAverages.size :]
        if self._run.data_parallel.size > 1:
            self.divergence_monitor.check_data_parallel(own_checks[:2], step)
        if self._run.model_parallel.size > 1:
            self.divergence_monitor.check_model_parallel(own_checks[2:], step)
        is_split, averages = self.loss_weighing.is_split, self.loss_weighing.averages
        self.needs_comparison = is_split and is_uncertain(checks)
        return is_split and averages.has_unequal_counts(checks[: LossAverages.size], step)

    def check_loss(self, loss: Tensor) -> None:
        """Require a finite loss before the update."""
        if self._run.device.type == "cpu":
            self._require_finite_loss(float(loss), self._run.step_number)
        else:
            self.check_last()  # the accelerator still computes this step; the one before is done

    def update(self, loss: Tensor, sample_count: int) -> StepResult:
        """Clip, step the optimizers and schedules, drop the gradients."""
        run = self._run
        # Copies: a schedule changes tensors in place.
        rates = [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups]
        rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        gradient_norm, skipped = None, False
        if run.job.clip_norm is not None or run.loss_scale is not None:
            gradient_norm = self.gradient_norm()
            if run.loss_scale is not None:
                grads = grad_clip.gradients(run.loss_parameters.values())
                skipped = not math.isfinite(gradient_norm.item()) or not all(bool(g.isfinite().all()) for g in grads)
            if run.job.clip_norm is not None and not skipped:
                factor = grad_clip.clip_factor(gradient_norm, run.job.clip_norm)
                grad_clip.scale_gradients(grad_clip.gradients(run.rank_model.parameters), factor)
                run.backend.scale_gradients(factor)
        run.backend.update(skipped=skipped)
        self.divergence_monitor.before_update(run.step_number)
        # Not by data rank: replicas must draw the same, and hold the same state after a skipped step too.
        seed_step(run.device, run.job.seed, run.step_number, "update")
        if not skipped:
            self._step_optimizers(loss)
        if run.loss_scale is not None:
            run.loss_scale.update(overflowed=skipped)
            if run.loss_scale.has_diverged:
                step, streak = run.step_number, run.loss_scale.overflow_streak
                problem = f"gradients overflow fp16 at step {step + 1}, as in the {streak - 1} steps before, though the loss is not scaled any more"
                remedy = f"use precision=bf16 or fp32, lower the learning rate, or look at its batch: {_batch_expression(step)}"
                raise TrainingError(f"{problem}: training stopped, the weights are those before these steps; {remedy}")
        for parameter in (*run.rank_model.parameters, *run.loss_parameters.values()):
            parameter.grad = None
        run.step_number += 1
        self.divergence_monitor.after_update(run.step_number)
        all_stop = run.backend.agree_to_stop(run.step_number, run.stop_requested)
        if all_stop is not None:
            self._stop_flag = self._one * all_stop
        resync_flag = self.step_metrics.resync_flag
        return StepResult(loss, gradient_norm, self._stop_flag, sample_count, skipped, rates, resync_flag)

    def _step_optimizers(self, loss: Tensor) -> None:
        run = self._run
        for index, optimizer in enumerate(run.optimizers):
            init_late_momentum(optimizer)
            with run.rank_model.explain_step_errors(optimizer):
                if index in run.full_tensor_optimizers:
                    run.full_tensor_optimizers[index].step(optimizer)
                else:
                    optimizer.step()
        for schedule in run.schedules:
            if not takes_metric(schedule):
                run.step_schedule(schedule)
            elif run.job.eval_data is None:
                run.step_schedule(schedule, float(loss))
        if self._has_unchecked_state:
            self._has_unchecked_state = False
            optimizer_state.collect(run)  # refuses what could not be saved

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient, the same on every rank. Every rank must call it."""
        parameters, counts = self._run.rank_model.parameters, self._run.rank_model.replica_counts
        replica_counts = [count for p, count in zip(parameters, counts, strict=True) if p.grad is not None]
        return self._run.backend.gradient_norm(grad_clip.gradients(parameters), replica_counts)

    def check_last(self) -> None:
        """Check the last step's results before they are built upon, saved or reported."""
        run = self._run
        run.backend.settle()
        if self.last_step is None:
            return
        step = run.step_number - 1
        self._require_finite_loss(self.last_step.read()[0], step)
        if self._deferred_checks is not None:
            checks, self._deferred_checks = self._deferred_checks.read(), None
            if self._check_ranks(checks, step) and run.nominal_count is None:
                problem = "the loss averages over unequal counts on different ranks or micro-batches"
                message = f"step {step + 1}: {problem}, which an accelerator cannot weigh afterwards; return (sum, count) from the loss"
                raise DivergenceError(message, cause="averages over unequal counts")
        if self.last_step.needs_resync():
            self.step_metrics.resync()

    def _require_finite_loss(self, loss: float, step: int) -> None:
        if self._run.loss_scale is None and not math.isfinite(loss):
            empty_hint = " Or the loss counted no item in the whole batch: then (sum, count) has count 0 on every rank."
            remedy = f"lower the learning rate, clip gradients (clip_norm=1.0), or look at its batch: {_batch_expression(step)}"
            problem = f"the loss is {loss} at step {step + 1}: training stopped, and no checkpoint holds that step"
            raise TrainingError(f"{problem}; {remedy}.{empty_hint if self._run.nominal_count else ''}")

    def close(self) -> None:
        """Take hooks off the model and let go of its tensors."""
        self.divergence_monitor.close()
        self._replaced_parameter_check.close()


def _batch_versions(batch: StepBatch) -> list[int]:
    return tensor_versions([micro_batch.batch for micro_batch in batch.micro_batches])


def _batch_expression(step: int) -> str:
    """Code that gets the batch of a step (from 0), for a reader of an error who has no run."""
    return f'next(echelon.parallelize(job, "dp=1").loader.steps({step}, {step + 1}))'
