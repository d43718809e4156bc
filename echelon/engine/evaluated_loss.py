"""The loss of one batch of an evaluation: its sum and what it counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from echelon.engine.checkpoint.function_state import snapshot, unchanged
from echelon.engine.loss_weights import weighed
from echelon.engine.metrics import differentiable, scalar, versions
from echelon.errors import JobError
from echelon.job import Job, call_loss, call_model
from echelon.loss_counts import Term, given_again, read_counts, recount
from echelon.tree import tensors
from echelon.trials.random_state import random_states
from echelon.trials.trial_context import one_process

Ratios = tuple[float, ...]
#: Relative rounding of counts that are sums of float32.
_ROUNDING = 1e-5


def measured(
    job: Job, model: nn.Module, batch: Any, *, weigh: bool = True, stateful: bool = True
) -> tuple[Tensor, Any, Ratios | None, float]:
    """The loss of a batch as (sum, count) or (mean, NaN), the model's output, from which metrics are computed, the counts of the averages that
    the loss adds up, as multiples of the first (None where it is weighed by samples), and what the sum was divided by where nothing was counted."""
    output = call_model(job, model, batch)
    before = versions((output, batch))
    around = _as_before(job, model) if stateful and weigh else nullcontext()
    loss = call_loss(job, output, batch, model)
    ratios: Ratios | None = None
    floor = 0.0
    if weigh and job.loss is not None and isinstance(loss, Tensor) and versions((output, batch)) == before:
        terms = _terms(job, model, output, batch, loss, around)
        if terms:
            first, *others = (float(each.count) for each in terms)
            if first or not any(others):
                ratios = tuple(each / first for each in others) if first else ()
                floor = 0.0 if first else float(terms[0].scale)
                loss = weighed(loss, terms[0])
    where = (loss[0] if isinstance(loss, tuple) else loss).device
    return pair_of("loss", loss, where), output, ratios, floor


def _as_before(job: Job, model: nn.Module) -> AbstractContextManager[None]:
    """Inside, what the loss keeps is as it is now; afterwards as it was on entry."""
    put_back = snapshot(job, model)

    @contextmanager
    def again() -> Iterator[None]:
        with unchanged(job, model):
            put_back()
            yield

    return again()


def _terms(
    job: Job, model: nn.Module, output: Any, batch: Any, loss: Tensor, around: AbstractContextManager[None]
) -> tuple[Term, ...]:
    """The averages that `loss` adds up, from the graph of a second call: class weights and masks count otherwise than by samples. The
    first call has no graph, so that a loss that asks whether gradients are enabled sees an evaluation."""
    if isinstance(loss, FakeTensor):
        return ()
    try:
        with torch.enable_grad(), random_states(), around:
            again = call_loss(job, differentiable(output), batch, model)
    except JobError:
        raise
    except Exception:  # a loss that cannot be called twice, or edits in place, which autograd refuses
        return ()
    if not isinstance(again, Tensor) or not torch.allclose(again.detach(), loss, rtol=_ROUNDING, equal_nan=True):
        return ()  # it differs with gradients enabled, as label smoothing in training does
    reading = read_counts(again)
    if reading.opaque:
        return ()
    if not any(term.at_one for term in reading.terms):
        return reading.terms
    samples = next((len(each) for each in tensors(batch) if each.dim()), 0)

    def repeated(times: int) -> Tensor | None:
        try:
            with torch.enable_grad(), one_process(), random_states(), unchanged(job, model):
                given = given_again((differentiable(output), batch), samples, times)
                value = None if given is None else call_loss(job, given[0], given[1], model)
        except JobError:
            raise
        except Exception:  # it takes other shapes only: the counts are taken as they were read
            return None
        return value if isinstance(value, Tensor) else None

    recounted, _ = recount(reading.terms, repeated)
    return reading.terms if recounted is None else (recounted,)


def recounted(loss: Tensor, again: Callable[[int], Any]) -> tuple[Tensor | None, float]:
    """A loss given as (sum, count) with what it really counts, which `max(count, least)` may hide (None where that does not show), and that least
    where it counts nothing.

    `again(times)` is the loss with every sample given that many times; None where it cannot be computed. One whose sum does not grow is a mean.
    """
    total, count = loss.tolist()
    for times in (2, 4, 8, 16, 32, 64):
        try:
            value = again(times)
        except JobError:
            raise
        except Exception:  # it takes other shapes only
            return None, 0.0
        if not isinstance(value, tuple):
            return None, 0.0
        more, grown = pair_of("loss", value, loss.device).tolist()
        if total and math.isclose(more, total, rel_tol=_ROUNDING) and math.isclose(grown, count, rel_tol=_ROUNDING):
            return loss.new_tensor([total / count, math.nan]), 0.0
        if not math.isclose(more, times * total, rel_tol=_ROUNDING, abs_tol=1e-9):
            return None, 0.0
        if grown > count * (1 + _ROUNDING):
            return loss.new_tensor([total, grown / times]), 0.0
    return loss.new_tensor([total, 0.0]), count


def pair_of(name: str, value: Any, device: torch.device) -> Tensor:
    """(sum, count) as one tensor; of a mean (mean, NaN)."""
    pair = value if isinstance(value, tuple) else (value, math.nan)
    # Half precision has too few digits for a sum over a batch.
    parts = [torch.as_tensor(scalar(part, name), dtype=torch.float64, device=device) for part in pair]
    return torch.stack([part.detach() for part in parts])
