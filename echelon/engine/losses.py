"""The loss of one batch of an evaluation: its sum and what it counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from echelon.engine.checkpoint.function_state import preserve_function_state, snapshot_functions
from echelon.engine.loss_averages import weigh_by_count
from echelon.engine.metrics import as_graph_leaves, tensor_versions, to_scalar
from echelon.errors import JobError
from echelon.job import Job, call_loss, call_model
from echelon.loss_counts import LossTerm, read_counts, recount_term, repeat_samples
from echelon.tree import tree_tensors
from echelon.trials.random_state import preserve_random_states
from echelon.trials.trial_context import single_process_world

CountRatios = tuple[float, ...]
#: Relative rounding of counts that are sums of float32.
_COUNT_TOLERANCE = 1e-5


def evaluate_loss(
    job: Job, model: nn.Module, batch: Any, *, weigh_by_counts: bool = True, preserve_state: bool = True
) -> tuple[Tensor, Any, CountRatios | None, float]:
    """The loss of a batch as (sum, count) or (mean, NaN), the model's output, from which metrics are computed, the counts of the averages that
    the loss adds up, as multiples of the first (None where it is weighed by samples), and what the sum was divided by where nothing was counted."""
    output = call_model(job, model, batch)
    versions_before = tensor_versions((output, batch))
    state_context = _preserve_loss_state(job, model) if preserve_state and weigh_by_counts else nullcontext()
    loss = call_loss(job, output, batch, model)
    ratios: CountRatios | None = None
    empty_divisor = 0.0
    if (
        weigh_by_counts
        and job.loss is not None
        and isinstance(loss, Tensor)
        and tensor_versions((output, batch)) == versions_before
    ):
        terms = _loss_terms(job, model, output, batch, loss, state_context)
        if terms:
            first_count, *other_counts = (float(term.count) for term in terms)
            if first_count or not any(other_counts):
                ratios = tuple(term / first_count for term in other_counts) if first_count else ()
                empty_divisor = 0.0 if first_count else float(terms[0].scale)
                loss = weigh_by_count(loss, terms[0])
    device = (loss[0] if isinstance(loss, tuple) else loss).device
    return to_pair("loss", loss, device), output, ratios, empty_divisor


def _preserve_loss_state(job: Job, model: nn.Module) -> AbstractContextManager[None]:
    """Inside, what the loss keeps is as it is now; afterwards as it was on entry."""
    restore = snapshot_functions(job, model)

    @contextmanager
    def restored_state() -> Iterator[None]:
        with preserve_function_state(job, model):
            restore()
            yield

    return restored_state()


def _loss_terms(
    job: Job, model: nn.Module, output: Any, batch: Any, loss: Tensor, state_context: AbstractContextManager[None]
) -> tuple[LossTerm, ...]:
    """The averages that `loss` adds up, from the graph of a second call: class weights and masks count otherwise than by samples. The
    first call has no graph, so that a loss that asks whether gradients are enabled sees an evaluation."""
    if isinstance(loss, FakeTensor):
        return ()
    try:
        with torch.enable_grad(), preserve_random_states(), state_context:
            loss_with_graph = call_loss(job, as_graph_leaves(output), batch, model)
    except JobError:
        raise
    except Exception:  # a loss that cannot be called twice, or edits in place, which autograd refuses
        return ()
    if not isinstance(loss_with_graph, Tensor) or not torch.allclose(
        loss_with_graph.detach(), loss, rtol=_COUNT_TOLERANCE, equal_nan=True
    ):
        return ()  # it differs with gradients enabled, as label smoothing in training does
    reading = read_counts(loss_with_graph)
    if reading.opaque_operators:
        return ()
    if not any(term.divided_by_one for term in reading.terms):
        return reading.terms
    sample_count = next((len(tensor) for tensor in tree_tensors(batch) if tensor.dim()), 0)

    def repeated_loss(times: int) -> Tensor | None:
        try:
            with (
                torch.enable_grad(),
                single_process_world(),
                preserve_random_states(),
                preserve_function_state(job, model),
            ):
                repeated_inputs = repeat_samples((as_graph_leaves(output), batch), sample_count, times)
                loss = (
                    None if repeated_inputs is None else call_loss(job, repeated_inputs[0], repeated_inputs[1], model)
                )
        except JobError:
            raise
        except Exception:  # it takes other shapes only: the counts are taken as they were read
            return None
        return loss if isinstance(loss, Tensor) else None

    recounted_term, _ = recount_term(reading.terms, repeated_loss)
    return reading.terms if recounted_term is None else (recounted_term,)


def recount_pair(loss: Tensor, repeat_loss: Callable[[int], Any]) -> tuple[Tensor | None, float]:
    """A loss given as (sum, count) with what it really counts, which `max(count, least)` may hide (None where that does not show), and that least
    where it counts nothing.

    `repeat_loss(times)` is the loss with every sample given that many times; None where it cannot be computed. One whose sum does not grow is a mean.
    """
    total, count = loss.tolist()
    for times in (2, 4, 8, 16, 32, 64):
        try:
            repeated_loss = repeat_loss(times)
        except JobError:
            raise
        except Exception:  # it takes other shapes only
            return None, 0.0
        if not isinstance(repeated_loss, tuple):
            return None, 0.0
        repeated_total, repeated_count = to_pair("loss", repeated_loss, loss.device).tolist()
        if (
            total
            and math.isclose(repeated_total, total, rel_tol=_COUNT_TOLERANCE)
            and math.isclose(repeated_count, count, rel_tol=_COUNT_TOLERANCE)
        ):
            return loss.new_tensor([total / count, math.nan]), 0.0
        if not math.isclose(repeated_total, times * total, rel_tol=_COUNT_TOLERANCE, abs_tol=1e-9):
            return None, 0.0
        if repeated_count > count * (1 + _COUNT_TOLERANCE):
            return loss.new_tensor([total, repeated_count / times]), 0.0
    return loss.new_tensor([total, 0.0]), count


def to_pair(name: str, value: Any, device: torch.device) -> Tensor:
    """(sum, count) as one tensor; of a mean (mean, NaN)."""
    pair = value if isinstance(value, tuple) else (value, math.nan)
    # Half precision has too few digits for a sum over a batch.
    parts = [torch.as_tensor(to_scalar(part, name), dtype=torch.float64, device=device) for part in pair]
    return torch.stack([part.detach() for part in parts])
