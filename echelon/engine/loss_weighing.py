"""Weigh the losses of a step's parts, so that their gradients sum to the gradient of the whole batch's loss.

a mean         counts by its part's samples, or by what it averages over once parts were seen to average over unequal counts
(sum, count)   is divided by the whole batch's count; before backward by a power of two near it, which leaves no rounding
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.data.loader import MicroBatch, StepBatch
from echelon.engine.loss_averages import LossAverages, step_divisor, weigh_by_count
from echelon.engine.losses import recount_pair
from echelon.engine.run_state import RunState
from echelon.errors import TrainingError


class LossWeighing:
    """The weights and sums of one step after the other, on this rank."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.averages = LossAverages(run.device)
        #: Whether means are weighed by what they average over, instead of by samples.
        self.by_count = False
        self.is_split = False
        self._one = torch.ones((), device=run.device)
        self._loss_sum: Tensor | None = None
        self._count: Tensor | None = None
        self.local_samples = 0

    def begin_step(self, batch: StepBatch, *, is_split: bool) -> None:
        """Before a step's first forward."""
        self.is_split = self.run.training_loss.keeps_inputs = is_split
        self._loss_sum = self._count = None
        self.local_samples = sum(micro_batch.samples for micro_batch in batch.micro_batches)
        self.averages.begin_step()

    @property
    def is_counted(self) -> bool:
        """Whether this rank's losses are (sum, count)."""
        return self._count is not None

    @property
    def _scale(self) -> float:
        return 1.0 if self.run.loss_scale is None else self.run.loss_scale.scale

    def weigh(self, loss: Any, micro_batch: MicroBatch, batch: StepBatch) -> Tensor:
        """What backward starts from: the micro-batch's share of the step's loss, scaled for the precision."""
        if self.is_split:
            loss = self._count_items(loss, micro_batch.samples)
        if isinstance(loss, tuple):
            weighed_loss, count = loss
            if self.run.training_loss.zero is not None and self.run.device.type == "cpu" and not count:
                weighed_loss = self.run.training_loss.zero
            self._count = count if self._count is None else self._count + count
            factor = self._scale / self._nominal_count(count * len(batch.micro_batches))
        else:
            sample_fraction = micro_batch.samples / batch.samples
            weighed_loss, factor = (loss if sample_fraction == 1 else loss * sample_fraction), self._scale
        if not weighed_loss.requires_grad:
            raise TrainingError("the loss does not depend on any trainable parameter: was it detached?")
        detached = weighed_loss.detach()
        self._loss_sum = detached if self._loss_sum is None else self._loss_sum + detached
        if factor == 1:
            return weighed_loss
        return (weighed_loss.float() if weighed_loss.dtype.itemsize < 4 else weighed_loss) * factor

    def _count_items(self, loss: Any, sample_count: int) -> Any:
        """The loss of a part, with what it counts where that weighs it."""
        run = self.run
        if isinstance(loss, tuple):
            return self._recount_pair(loss[0], loss[1], sample_count)
        repeat = partial(run.training_loss.repeat, run.model, sample_count, Tensor)
        terms = self.averages.add_part(loss, sample_count, repeat)
        run.training_loss.drop_inputs()
        # The host does not know before backward what an accelerator counts: then every step is weighed by it.
        by_count = self.by_count or run.nominal_count is not None or not run.backend.can_repeat_step
        return weigh_by_count(loss, terms[0]) if terms and (by_count or isinstance(terms[0].count, Tensor)) else loss

    def _recount_pair(self, total: Tensor, count: Tensor, sample_count: int) -> tuple[Tensor, Tensor]:
        """A loss given as (sum, count) with what it really counts, where a minimum may hide that."""
        run = self.run
        if run.device.type != "cpu":  # the host does not wait for an accelerator's count
            return total, count
        pair_counts, given_count = self.averages.pair_counts, float(count.detach())
        if not pair_counts.may_be_clamped(given_count, sample_count):
            return total, count
        pair = torch.stack([total.detach().double(), count.detach().double()])
        recounted, _ = recount_pair(pair, partial(run.training_loss.repeat, run.model, sample_count, tuple))
        if recounted is None or recounted[1].isnan():
            self.averages.note_uncertain()
        elif not math.isclose(float(recounted[1]), given_count):
            self.averages.note_clamped(given_count)
            pair_counts.highest_clamped = max(pair_counts.highest_clamped, given_count)
            count = recounted[1]
        return total, count

    def _nominal_count(self, count: Tensor) -> float:
        run = self.run
        if run.nominal_count is None:
            step_count = max(float(run.backend.step_ranks.all_reduce(count.detach().double().clone())), 1.0)
            run.nominal_count = 2.0 ** round(math.log2(step_count))
        return run.nominal_count

    def sums(self) -> tuple[Tensor, Tensor]:
        """This rank's loss and count; of a stage without a loss 0 and 1."""
        loss_sum = self._one * 0 if self._loss_sum is None else self._loss_sum
        return loss_sum, self._one if self._count is None else self._count

    def normalize(
        self, loss: Tensor, count: Tensor, checks: Tensor, batch: StepBatch, *, is_counted: bool
    ) -> tuple[Tensor, float | Tensor]:
        """The step's mean loss, of its sums over ranks, and the factor that gradients still need."""
        run = self.run
        factor: float | Tensor = 1 / self._scale
        # Ranks that do not wait for each other have summed only their own part of the batch.
        summed_fraction = self.local_samples / batch.samples if run.plan.asynchronous else 1.0
        if not is_counted:
            return loss / summed_fraction, factor
        if self.is_split:
            count = step_divisor(checks, count)
        if run.device.type == "cpu" and not count > 0:
            raise TrainingError("the loss counted no item in the whole batch: every rank returned (sum, 0)")
        assert run.nominal_count is not None
        return loss / count, factor * run.nominal_count * summed_fraction / count
