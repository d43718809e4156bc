"""The job's loss of one batch, in training and in evaluation, and what it counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from echelon.engine.checkpoint.function_state import preserve_function_state, snapshot_functions
from echelon.engine.full_outputs import as_graph_leaves, output_versions
from echelon.engine.loss_averages import weigh_by_count, zero_loss
from echelon.engine.metrics import to_pair
from echelon.engine.precision import autocast
from echelon.errors import JobError
from echelon.job import Job, call_loss, call_model
from echelon.loss_counts import LossTerm, read_counts, recount_term, repeat_samples
from echelon.tree import tree_tensors
from echelon.trials.random_state import preserve_random_states
from echelon.trials.trial_context import single_process_world

CountRatios = tuple[float, ...]
_Inputs = tuple[Any, Any]
#: A recount of a (sum, count), and the least that it was divided by.
_Recount = tuple[Tensor | None, float]
_State = AbstractContextManager[None]
#: Relative rounding of counts that are sums of float32.
COUNT_TOLERANCE = 1e-5


def repeat_loss(job: Job, model: nn.Module, inputs: _Inputs, sample_count: int, times: int, kind: type) -> Any:
    """The loss of an output and a batch with every sample given `times` times; None where it is not computed so, as a `kind`. Leaves no trace."""
    repeated = repeat_samples(inputs, sample_count, times)
    if repeated is None:
        return None
    try:
        with single_process_world(), preserve_random_states(), preserve_function_state(job, model):
            loss = call_loss(job, repeated[0], repeated[1], model)
    except JobError:
        raise
    except Exception:  # it takes other shapes only: the count is taken as it was read
        return None
    return loss if isinstance(loss, kind) else None


class TrainingLoss:
    """The loss of a micro-batch: a mean, or (sum, count)."""

    def __init__(self, job: Job, precision: str, device: torch.device) -> None:
        self.job, self._precision, self._device = job, precision, device
        #: Whether the last call's output and batch are kept for `repeat`.
        self.keeps_inputs = False
        self._inputs: _Inputs | None = None
        #: A zero that depends on the last output, for a loss that counts nothing of it.
        self.zero: Tensor | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        with autocast(self._precision, self._device):
            output = call_model(self.job, model, batch)
            loss = call_loss(self.job, output, batch, model)
            self.zero = zero_loss(output, loss)
        self._inputs = (output, batch) if self.keeps_inputs else None
        return (loss[0], torch.as_tensor(loss[1], device=self._device)) if isinstance(loss, tuple) else loss

    def repeat(self, model: nn.Module, sample_count: int, kind: type, times: int) -> Any:
        """The last loss with every sample given `times` times, as `repeat_loss` computes it."""
        if self._inputs is None:
            return None
        with autocast(self._precision, self._device):
            return repeat_loss(self.job, model, self._inputs, sample_count, times, kind)

    def drop_inputs(self) -> None:
        """Free the last call's output: logits are large."""
        self._inputs = None


class EvaluationLoss:
    """The loss of an evaluation's batch as (sum, count), or (mean, NaN)."""

    def __init__(self, job: Job, precision: str, device: torch.device) -> None:
        self._job, self._precision, self._device = job, precision, device
        #: Whether the loss is weighed by samples, because no other weight joins its batches.
        self.weighs_by_samples = False
        #: Whether a second call of the loss must leave no trace.
        self.is_stateful = True
        #: Of the last call: the model's output, the counts of the loss's averages as multiples of the first (None: weighed by samples), and
        #: what the sum was divided by where nothing was counted.
        self.output: Any = None
        self.count_ratios: CountRatios | None = None
        self.empty_divisor = 0.0

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor]:
        """Metrics are not computed here: stages also call this without values, to learn shapes."""
        with autocast(self._precision, self._device):
            self.output = call_model(self._job, model, batch)
            versions_before = output_versions((self.output, batch))
            state_context: _State = nullcontext()
            if self.is_stateful and not self.weighs_by_samples:
                state_context = _restored_loss_state(self._job, model, snapshot_functions(self._job, model))
            loss = call_loss(self._job, self.output, batch, model)
            self.count_ratios, self.empty_divisor = None, 0.0
            is_readable = self._job.loss is not None and not self.weighs_by_samples
            is_readable = is_readable and output_versions((self.output, batch)) == versions_before
            if is_readable and isinstance(loss, Tensor):
                loss = self._weigh(loss, self._read_terms(model, batch, loss, state_context))
            return (to_pair("loss", loss, (loss[0] if isinstance(loss, tuple) else loss).device),)

    def _weigh(self, loss: Tensor, terms: tuple[LossTerm, ...]) -> Tensor | tuple[Tensor, Tensor]:
        if not terms:
            return loss
        first_count, *other_counts = (float(term.count) for term in terms)
        if not first_count and any(other_counts):
            return loss
        self.count_ratios = tuple(count / first_count for count in other_counts) if first_count else ()
        self.empty_divisor = 0.0 if first_count else float(terms[0].scale)
        return weigh_by_count(loss, terms[0])

    def _read_terms(self, model: nn.Module, batch: Any, loss: Tensor, state: _State) -> tuple[LossTerm, ...]:
        """The averages that `loss` adds up, from the graph of a second call. The first has no graph, so that the loss sees an evaluation."""
        if isinstance(loss, FakeTensor):
            return ()
        try:
            with torch.enable_grad(), preserve_random_states(), state:
                loss_with_graph = call_loss(self._job, as_graph_leaves(self.output), batch, model)
        except JobError:
            raise
        except Exception:  # a loss that cannot be called twice, or edits in place, which autograd refuses
            return ()
        if not isinstance(loss_with_graph, Tensor):
            return ()
        if not torch.allclose(loss_with_graph.detach(), loss, rtol=COUNT_TOLERANCE, equal_nan=True):
            return ()  # it differs with gradients enabled, as label smoothing in training does
        reading = read_counts(loss_with_graph)
        if reading.opaque_operators or not any(term.divided_by_one for term in reading.terms):
            return () if reading.opaque_operators else reading.terms
        sample_count = next((len(tensor) for tensor in tree_tensors(batch) if tensor.dim()), 0)

        def repeat(times: int) -> Tensor | None:
            with torch.enable_grad():
                inputs = as_graph_leaves(self.output), batch
                return repeat_loss(self._job, model, inputs, sample_count, times, Tensor)

        recounted_term, _ = recount_term(reading.terms, repeat)
        return reading.terms if recounted_term is None else (recounted_term,)

    def recount(self, model: nn.Module, loss: Tensor, inputs: _Inputs, sample_count: int) -> _Recount:
        """`recount_pair` of a loss that was computed from `inputs`."""
        with autocast(self._precision, self._device):
            return recount_pair(loss, lambda times: repeat_loss(self._job, model, inputs, sample_count, times, tuple))


@contextmanager
def _restored_loss_state(job: Job, model: nn.Module, restore: Callable[[], None]) -> Iterator[None]:
    """Inside, what the loss keeps is as `restore` leaves it; afterwards as it was on entry."""
    with preserve_function_state(job, model):
        restore()
        yield


def recount_pair(loss: Tensor, repeat: Callable[[int], Any]) -> _Recount:
    """A (sum, count) with what it really counts, which `max(count, least)` may hide (None where that does not show), and that least where it counts
    nothing. `repeat(times)` is the loss with every sample given that many times; one whose sum does not grow is a mean."""
    total, count = loss.tolist()
    is_close = partial(math.isclose, rel_tol=COUNT_TOLERANCE)
    for times in (2, 4, 8, 16, 32, 64):
        try:
            repeated_loss = repeat(times)
        except JobError:
            raise
        except Exception:  # it takes other shapes only
            return None, 0.0
        if not isinstance(repeated_loss, tuple):
            return None, 0.0
        repeated_total, repeated_count = to_pair("loss", repeated_loss, loss.device).tolist()
        if total and is_close(repeated_total, total) and is_close(repeated_count, count):
            return loss.new_tensor([total / count, math.nan]), 0.0
        if not is_close(repeated_total, times * total, abs_tol=1e-9):
            return None, 0.0
        if repeated_count > count * (1 + COUNT_TOLERANCE):
            return loss.new_tensor([total, repeated_count / times]), 0.0
    return loss.new_tensor([total, 0.0]), count
