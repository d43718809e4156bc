"""Whether the loss of a batch follows from those of its parts however samples are grouped, not only as the first batches group them.

Class weights from a batch's own counts make the same loss as long as every part has as many of each class. So the loss of the proof's last batch
is computed with its samples in other orders, whole and in the plan's parts, and the parts are put together as a training does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.engine.checkpoint.function_state import unchanged
from echelon.engine.checkpoint.run_attributes import model_snapshot
from echelon.engine.evaluated_loss import recounted
from echelon.engine.loss_weights import Averages, divisor, doubts, weighed
from echelon.engine.metrics import differentiable
from echelon.errors import DivergenceError, VerificationError
from echelon.job import call_loss, call_model
from echelon.loss_counts import given_again
from echelon.plan.batch_split import split
from echelon.tree import map_tensors, tree_leaves
from echelon.trials.random_state import random_states
from echelon.verifier.reference import Reference

#: Orders that are tried besides the batch's own, and the relative difference that rounding explains (float64).
_ORDERS, _ROUNDING = 6, 1e-7


def require_separable_loss(reference: Reference, step: int) -> None:
    """Raise where the parts of a regrouped batch do not make its loss. Says nothing about a loss that cannot be called on rows of a batch alone."""
    plan, size = reference.plan, reference.feed.size(step)
    parts = [part.size for share in split(size, plan.mesh.dp, plan.micro, plan.shares) for part in share if part.size]
    if reference.job.loss is None or len(parts) < 2:
        return
    try:
        worst = _Loss(reference, step, size).worst_difference(parts)
    except Exception:  # a loss that takes other shapes only: the proof of the batch as it is stands
        return
    if worst > _ROUNDING:
        raise VerificationError(
            f"the loss of a batch does not follow from the losses of its parts where samples are grouped otherwise (it is off by {worst:.1%}): it "
            "normalises by what the other samples of a part are, as class weights from the batch do; use fixed weights, return (sum, count), or "
            "train without parts (dp=1)"
        )


class _Loss:
    """The loss as a function of rows of one batch."""

    def __init__(self, reference: Reference, step: int, size: int) -> None:
        self._reference, self._size = reference, size
        batch = reference.batch(step, np.arange(size))
        model = reference.model
        held, buffers = model_snapshot(model), [(value, value.clone()) for value in model.buffers()]
        with torch.no_grad(), reference.still():
            output = call_model(reference.job, model, batch)
            for value, before in buffers:
                value.copy_(before)
        held.put_back()
        self._rows = (output, batch)
        if not all(_is_rows(leaf, size) for leaf in tree_leaves(self._rows)):
            raise ValueError("a part of it has no row per sample")

    def worst_difference(self, parts: Sequence[int]) -> float:
        """Between the loss of all rows and what `parts` come to, relative, over several orders; 0 where the rows as they are differ: it keeps state, or draws."""
        draw, own, worst = torch.Generator().manual_seed(0), torch.arange(self._size), 0.0
        reference = self._reference
        with reference.still(), unchanged(reference.job, reference.model), random_states():
            if (self._difference(own, parts) or 0.0) > _ROUNDING:
                return 0.0
            for _ in range(_ORDERS):
                order = torch.randperm(self._size, generator=draw)
                worst = max(worst, self._difference(order, parts) or 0.0)
        return worst

    def _difference(self, order: Tensor, parts: Sequence[int]) -> float | None:
        """None: a training would stop here, or compare the step with one device."""
        whole = _number(self._value(order))
        together = self._together([*order.split(list(parts))])
        if whole is None or together is None:
            return None
        return abs(together - whole) / max(abs(whole), 1e-12)

    def _together(self, parts: Sequence[Tensor]) -> float | None:
        averages = Averages(self._reference.device)
        averages.begin()
        values, found = [self._value(rows) for rows in parts], list[tuple[Tensor, Tensor]]()
        if isinstance(values[0], tuple):
            counts = [self._count(rows, value) for rows, value in zip(parts, values, strict=True)]
            return sum(_plain(total) for total, _ in values) / sum(counts) if sum(counts) else None
        for rows, value in zip(parts, values, strict=True):
            terms = averages.add(value, len(rows), partial(self._value, rows))
            if terms:
                found.append(weighed(value.detach(), terms[0]))
        sums = averages.share()
        try:
            unequal = averages.unequal(sums.tolist(), 0)
        except DivergenceError:
            return None
        if doubts(sums.tolist()):
            return None
        if unequal:
            count = torch.stack([count for _, count in found]).sum()
            return float(sum(total for total, _ in found) / divisor(sums, count))
        return sum(_plain(value) * len(rows) for rows, value in zip(parts, values, strict=True)) / self._size

    def _count(self, rows: Tensor, pair: tuple[Any, Any]) -> float:
        """What a loss given as (sum, count) really counts, as in a training."""
        found, _ = recounted(
            torch.tensor([_plain(each) for each in pair], dtype=torch.float64), partial(self._value, rows)
        )
        return _plain(pair[1]) if found is None or found[1].isnan() else float(found[1])

    def _value(self, rows: Tensor, times: int = 1) -> Any:
        output, batch = map_tensors(lambda value: value[rows.to(value.device)], self._rows)
        given = given_again((differentiable(output), batch), len(rows), times)
        with torch.enable_grad():
            return None if given is None else call_loss(self._reference.job, given[0], given[1], self._reference.model)


def _is_rows(leaf: Any, size: int) -> bool:
    return leaf is None or (isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size)


def _number(value: Any) -> float | None:
    total, count = value if isinstance(value, tuple) else (value, 1.0)
    number = _plain(total) / _plain(count)
    return number if math.isfinite(number) else None


def _plain(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
