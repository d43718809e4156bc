"""Check that the loss of a batch follows from the losses of its parts for any grouping of samples, not only for that of the first batches.

Class weights from a batch's own counts give the same loss as long as every part has equally many of each class. So the loss of the proof's
last batch is computed with its samples in other orders, whole and in the plan's parts, and the parts are combined as in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.engine.checkpoint.function_state import preserve_function_state
from echelon.engine.full_outputs import as_graph_leaves
from echelon.engine.loss_averages import LossAverages, is_uncertain, step_divisor, weigh_by_count
from echelon.engine.losses import recount_pair
from echelon.errors import DivergenceError, VerificationError
from echelon.job import call_loss, call_model
from echelon.loss_counts import repeat_samples
from echelon.tree import map_tensors, tree_leaves
from echelon.trials.random_state import preserve_random_states
from echelon.verifier.forward_state import ForwardState
from echelon.verifier.reference import Reference
from echelon.verifier.reference_data import has_row_per_sample, micro_batches

#: Orders that are tried in addition to the batch's own, and the relative difference that rounding explains (float64).
_TRIED_ORDERS, _ROUNDING_BOUND = 6, 1e-7


def require_separable_loss(reference: Reference, step: int) -> None:
    """Raise if the parts of a regrouped batch do not add up to its loss. A loss that cannot be called on rows of a batch passes."""
    batch_size = reference.data.samples_in(step)
    sizes = [part.size for part in micro_batches(reference.plan, batch_size) if part.size]
    if reference.job.loss is None or len(sizes) < 2:
        return
    try:
        difference = _RowLoss(reference, step, batch_size).largest_difference(sizes)
    except Exception:  # the loss takes other shapes only: the proof of the batch as it is stands
        return
    if difference > _ROUNDING_BOUND:
        raise VerificationError(
            f"the loss of a batch does not follow from the losses of its parts where samples are grouped otherwise (it is off by {difference:.1%}): it "
            "normalizes by what the other samples of a part are, as class weights from the batch do; use fixed weights, return (sum, count), or "
            "train without parts (dp=1)"
        )


class _RowLoss:
    def __init__(self, reference: Reference, step: int, batch_size: int) -> None:
        self._reference, self._batch_size = reference, batch_size
        batch = reference.read_batch(step, np.arange(batch_size))
        state = ForwardState(reference.model, parameters=False)
        with torch.no_grad(), reference.deterministic():
            output = call_model(reference.job, reference.model, batch)
        state.restore()
        self._rows = (output, batch)
        if not all(leaf is None or has_row_per_sample(leaf, batch_size) for leaf in tree_leaves(self._rows)):
            raise ValueError("a part of it has no row per sample")

    def largest_difference(self, sizes: Sequence[int]) -> float:
        """The largest relative difference between the loss of all rows and that of parts of `sizes`, over several orders. 0 if they differ in
        the batch's own order: the loss keeps state, or draws random numbers."""
        generator, reference = torch.Generator().manual_seed(0), self._reference
        preserved_functions = preserve_function_state(reference.job, reference.model)
        with reference.deterministic(), preserved_functions, preserve_random_states():
            if (self._relative_difference(torch.arange(self._batch_size), sizes) or 0.0) > _ROUNDING_BOUND:
                return 0.0
            orders = (torch.randperm(self._batch_size, generator=generator) for _ in range(_TRIED_ORDERS))
            return max(self._relative_difference(order, sizes) or 0.0 for order in orders)

    def _relative_difference(self, order: Tensor, sizes: Sequence[int]) -> float | None:
        """None: training would stop here, or compare the step with one device."""
        whole, combined = _finite_loss(self._loss_of_rows(order)), self._combine_parts(order.split(list(sizes)))
        if whole is None or combined is None:
            return None
        return abs(combined - whole) / max(abs(whole), 1e-12)

    def _combine_parts(self, rows_by_part: Sequence[Tensor]) -> float | None:
        averages = LossAverages(self._reference.device)
        averages.begin_step()
        losses, weighed_terms = [self._loss_of_rows(rows) for rows in rows_by_part], list[tuple[Tensor, Tensor]]()
        parts = list(zip(rows_by_part, losses, strict=True))
        if isinstance(losses[0], tuple):
            count = sum(self._true_count(rows, loss) for rows, loss in parts)
            return sum(_to_float(total) for total, _ in losses) / count if count else None
        for rows, loss in parts:
            terms = averages.add_part(loss, len(rows), partial(self._loss_of_rows, rows))
            if terms:
                weighed_terms.append(weigh_by_count(loss.detach(), terms[0]))
        sums = averages.pack()
        try:
            unequal = averages.has_unequal_counts(sums.tolist(), 0)
        except DivergenceError:
            return None
        if is_uncertain(sums.tolist()):
            return None
        if unequal:
            divisor = step_divisor(sums, torch.stack([count for _, count in weighed_terms]).sum())
            return float(sum(total for total, _ in weighed_terms) / divisor)
        return sum(_to_float(loss) * len(rows) for rows, loss in parts) / self._batch_size

    def _true_count(self, rows: Tensor, pair: tuple[Any, Any]) -> float:
        """What a loss of the form (sum, count) really counts, as in training."""
        values = torch.tensor([_to_float(item) for item in pair], dtype=torch.float64)
        recount, _ = recount_pair(values, partial(self._loss_of_rows, rows))
        return _to_float(pair[1]) if recount is None or recount[1].isnan() else float(recount[1])

    def _loss_of_rows(self, rows: Tensor, times: int = 1) -> Any:
        output, batch = map_tensors(lambda value: value[rows.to(value.device)], self._rows)
        repeated = repeat_samples((as_graph_leaves(output), batch), len(rows), times)
        if repeated is None:
            return None
        with torch.enable_grad():
            return call_loss(self._reference.job, repeated[0], repeated[1], self._reference.model)


def _finite_loss(value: Any) -> float | None:
    total, count = value if isinstance(value, tuple) else (value, 1.0)
    loss = _to_float(total) / _to_float(count)
    return loss if math.isfinite(loss) else None


def _to_float(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
