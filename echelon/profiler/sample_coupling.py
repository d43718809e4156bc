"""Whether samples see each other: a batch is compared with its parts, equal and unequal ones, in a small real step on the CPU.

A mean over counts that differ between parts (labels that are not ignored) couples nothing on a CPU: while it trains, the parts are weighed by
the counts that the loss's graph tells (loss_counts.py), and so they are here. An accelerator is not waited for, and does not weigh them.

A model or a loss whose state changes with every call (a counter, a running mean, in buffers or Python attributes) may couple samples at every
ninth call only. Of these a private copy is advanced call by call, and each call is compared with its parts from the same state.

Where they do (contrastive losses, losses over all pairs, experts that fill up) neither ranks nor micro-batches may part a
batch. Batch norms are left out, held at fixed statistics: they are known by their class, and a plan says how they are taken.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.job import Job, call_loss, call_model, cast_model
from echelon.loss_counts import read_counts
from echelon.tree import tree_leaves, tree_map
from echelon.trials.deep_copies import copy_module
from echelon.trials.determinism import DeterministicMode, disable_randomness
from echelon.trials.example_batch import ExampleBatches
from echelon.trials.lazy_modules import initialise_lazy
from echelon.trials.random_state import preserve_random_states, seed_all
from echelon.trials.reachable import GENERATOR_TYPES, find_reachable
from echelon.trials.shape_model import call_factory
from echelon.trials.snapshot import Snapshot

#: Parameters beyond which no model is built for this: with gradients and in float64 200 M are more than 3 GB.
MAX_PARAMETERS = 200 * 10**6
#: FLOPs that the comparison may take, and how many are nothing: about ten seconds and one on two slow cores.
MAX_FLOPS, _CHEAP_FLOPS = 2e11, 2e10
#: Relative difference of a gradient that rounding explains.
_GRADIENT_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
#: Relative difference of a loss, in float32, that rounding explains.
_LOSS_TOLERANCE = 3e-5
#: Samples on which the loss alone is tried, the seconds that reading them may take, and how large its outputs are.
_LOSS_ONLY_SAMPLES, _MAX_READ_SECONDS, _OUTPUT_SCALES = 64, 1.0, (1.0, 4.0)
#: Calls after which a model that computes something else with each of them has shown it.
_DRIFT_CALLS = 8
#: Later calls that are tried where state changes from call to call, the seconds that they may take and the samples of each.
MAX_LATER_CALLS, _MAX_LATER_SECONDS, _LATER_CALL_SAMPLES = 64, 2.0, 4
#: Bytes of a tensor, and elements of a parameter, beyond which they are not noted as state.
_MAX_STATE_BYTES, _MAX_STATE_ELEMENTS = 2**24, 4096
#: A gradient is measured against its own largest value, but never against less than this part of the model's largest.
_GRADIENT_FLOOR = 1e-2


def detect_coupling(
    job: Job, example: ExampleBatches, *, parameters: int, flops: float, weigh_by_counts: bool = False
) -> tuple[bool | None, str]:
    """(whether the samples of a batch depend on each other other than through batch norms; None and the reason where it is not known).

    `parameters`: how many the model has; `flops`: of one step of one sample; `weigh_by_counts`: whether parts are weighed by what their losses
    average over.
    """
    if job.batch_size < 2:
        return False, ""
    # Halves of two and more, unless that takes long: code treats a single sample apart now and then.
    samples = next(
        size
        for size in (8, 4, 2)
        if job.batch_size >= size and (size == 2 or _comparison_flops(size, flops) <= _CHEAP_FLOPS)
    )
    if parameters > MAX_PARAMETERS or _comparison_flops(samples, flops) > MAX_FLOPS:
        return None, "the model is too large to try it on a CPU"
    try:
        with preserve_random_states():
            return _compare_calls(job, example, samples, weigh_by_counts)
    except Exception as error:  # whatever a user's model needs that is not here
        return None, f"a small step on the CPU failed with {type(error).__name__}: {first_line(error)}"


def _comparison_flops(samples: int, flops: float) -> float:
    """FLOPs of a batch and its halves."""
    return 2 * samples * flops


def _compare_calls(job: Job, example: ExampleBatches, samples: int, weigh_by_counts: bool) -> tuple[bool | None, str]:
    """What the first calls show, and what later ones do where state changes from call to call."""
    comparison, initial_state = _Comparison(job, example, weigh_by_counts), None
    with contextlib.suppress(Exception):  # objects that cannot be looked into
        initial_state = comparison.snapshot_state()
    is_coupled, reason = _compare_first_calls(comparison, samples)
    if is_coupled or initial_state is None:
        return is_coupled, reason
    with contextlib.suppress(Exception):  # state that cannot be put back, a model that takes no other batch size
        later_comparison = comparison.make_fresh() if initial_state.has_changed() else None
        if (
            later_comparison
            and later_comparison.keeps_state(_BatchPart(0, samples))
            and later_comparison.is_coupled_later(min(samples, _LATER_CALL_SAMPLES))
        ):
            return True, ""
    return is_coupled, reason


def _compare_first_calls(comparison: _Comparison, samples: int) -> tuple[bool | None, str]:
    full_batch, splits = _BatchPart(0, samples), _list_splits(samples)
    difference = comparison.max_difference(full_batch, splits)
    if math.isnan(difference):
        return None, "the gradients of a small step are not numbers"
    if difference <= comparison.tolerance:
        return comparison.is_loss_coupled(samples), ""
    # In float32 rounding may flip a ReLU, and then the difference is no longer small; float64 is slow, so that only a suspect pays.
    with contextlib.suppress(Exception):  # a model that keeps float32 tensors to itself does not run in it
        float64_comparison = comparison.make_fresh(torch.float64)
        difference, comparison = float64_comparison.max_difference(full_batch, splits), float64_comparison
    if difference <= comparison.tolerance:
        return comparison.is_loss_coupled(samples), ""
    reseeded = [_BatchPart(0, samples, seed=1)]
    if comparison.gradient_difference(full_batch, reseeded) > comparison.tolerance:
        if (
            comparison.start_from_current_state(generators=False).gradient_difference(full_batch, reseeded)
            > comparison.tolerance
        ):
            return None, "the model, the loss or the collation draws random numbers that cannot be held still"
        return None, "the model, the loss or the collation keeps state by which each call computes something else"
    if comparison.make_fresh().changes_between_calls(full_batch):
        return None, "the model computes something else with each call"
    return True, ""


class _BatchPart(NamedTuple):
    """`num_samples` samples from `first_sample` on, and the seed under which they are collated and computed."""

    first_sample: int
    num_samples: int
    seed: int = 0


def _split_in_halves(first_sample: int, samples: int) -> tuple[_BatchPart, list[_BatchPart]]:
    """`samples` from number `first_sample` on, and their halves."""
    half = samples // 2
    return _BatchPart(first_sample, samples), [
        _BatchPart(first_sample, half),
        _BatchPart(first_sample + half, samples - half),
    ]


def _list_splits(samples: int) -> list[list[_BatchPart]]:
    """Ways to part a batch: halves, and unequal parts of two samples and more where there are enough."""
    quarter, half = samples // 4, samples // 2
    part_sizes: list[tuple[int, ...]] = [(half, samples - half)]
    if quarter > 1:
        rest = samples - quarter
        part_sizes += [(quarter, rest), (rest, quarter), (quarter, quarter, rest - quarter)]
    return [[_BatchPart(sum(split[:index]), size) for index, size in enumerate(split)] for split in part_sizes]


def _list_buffers(model: nn.Module) -> dict[tuple[str, str], tuple[dict[str, Tensor | None], Tensor | None]]:
    """The buffers by path and name, also those that are None, and where they are held."""
    return {
        (path, key): (module._buffers, value)
        for path, module in model.named_modules()
        for key, value in module._buffers.items()
    }


def _is_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.shape == second.shape and torch.equal(first, second)


class _Comparison:
    """The model in one type, and how far two ways of computing the same samples are apart."""

    def __init__(
        self, job: Job, example: ExampleBatches, weigh_by_counts: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        self._job, self._example, self._dtype = job, example, dtype
        self._model = cast_model(_build_deterministic_model(job), dtype)
        self._deterministic = DeterministicMode(fix_random=True, widen_casts=dtype == torch.float64)
        self._initial_buffers = {
            key: None if value is None else value.clone() for key, (_, value) in _list_buffers(self._model).items()
        }
        self.tolerance, self._weigh_by_counts = _GRADIENT_TOLERANCES[dtype], weigh_by_counts
        #: What every call starts from; None: from the first buffers.
        self._start_state: Snapshot | None = None

    def make_fresh(self, dtype: torch.dtype = torch.float32) -> _Comparison:
        """Another one, with the model as training begins."""
        return _Comparison(self._job, self._example, self._weigh_by_counts, dtype)

    def snapshot_state(self, *, generators: bool = True) -> Snapshot:
        """What model, loss and collation hold now, but the weights. `generators`: also where theirs are."""
        job, model = self._job, self._model
        roots = {"model": model, "buffers": list(model.buffers()), "loss": job.loss, "inputs": job.inputs}
        roots["collate"] = self._example.collate
        excluded = {id(item) for item in model.parameters() if item.numel() > _MAX_STATE_ELEMENTS}
        if not generators:
            excluded |= {id(item) for item in find_reachable(roots).values() if isinstance(item, GENERATOR_TYPES)}
        return Snapshot(roots, excluded_ids=excluded, max_tensor_bytes=_MAX_STATE_BYTES)

    def start_from_current_state(self, *, generators: bool = True) -> _Comparison:
        """Itself, with every call from now on made from the present state."""
        self._start_state = self.snapshot_state(generators=generators)
        return self

    def keeps_state(self, full_batch: _BatchPart) -> bool:
        """Whether calls change buffers, or leave something else each time for the same samples: an output that is kept is no state."""
        state_before = self.snapshot_state()
        self._continue_call(full_batch)
        state_after, buffers = self.snapshot_state(), _list_buffers(self._model)
        changes = any(not _is_equal(value, self._initial_buffers.get(key)) for key, (_, value) in buffers.items())
        if not changes:
            self._continue_call(full_batch)
            changes = state_after.has_changed()
        state_before.restore()
        return changes

    def is_coupled_later(self, samples: int) -> bool:
        """Whether the samples of a batch see each other at one of the later calls, each compared with its parts from the same state.
        The next call goes on from what the last part left."""
        deadline = time.thread_time() + _MAX_LATER_SECONDS  # other processes do not count
        for call in range(MAX_LATER_CALLS):
            whole, halves = _split_in_halves(call * samples, samples)
            if self.start_from_current_state().differs_from_parts(whole, halves) and self._is_real_difference(
                call, whole, halves
            ):
                return True
            if time.thread_time() > deadline:
                return False
        return False

    def _is_real_difference(self, call_index: int, whole: _BatchPart, halves: Sequence[_BatchPart]) -> bool:
        """Whether it is neither rounding nor random numbers nor state that could not be put back."""
        with contextlib.suppress(Exception):  # as at the first call: a model may not run in float64
            float64_comparison = self.make_fresh(torch.float64)
            for earlier_call in range(call_index):
                float64_comparison._continue_call(
                    _split_in_halves(earlier_call * whole.num_samples, whole.num_samples)[1][-1]
                )
            self._restore_state()  # the loss's, which both have
            if not float64_comparison.start_from_current_state().differs_from_parts(whole, halves):
                return False
        self._restore_state()
        return self.gradient_difference(whole, [whole._replace(seed=1)]) <= self.tolerance

    def _continue_call(self, full_batch: _BatchPart) -> None:
        """A call that goes on from what the last one left."""
        self._start_state = Snapshot({})
        self._compute_loss(full_batch)

    def differs_from_parts(self, full_batch: _BatchPart, parts: Sequence[_BatchPart]) -> bool:
        """Whether the parts together have another gradient than the whole, or none."""
        difference = self.max_difference(full_batch, [parts])
        if math.isnan(difference):  # the whole batch may have no gradient either
            return not math.isnan(self.gradient_difference(full_batch, []))
        return difference > self.tolerance

    def max_difference(self, full_batch: _BatchPart, splits: Sequence[Sequence[_BatchPart]]) -> float:
        """How far the gradient of `full_batch` is at most from that of its parts, weighed as they are while it trains."""
        largest_difference = 0.0
        for parts in splits:
            difference = self.gradient_difference(full_batch, parts)
            if self._weigh_by_counts and difference > self.tolerance:
                difference = min(difference, self.gradient_difference(full_batch, parts, use_counts=True))
            if math.isnan(difference):
                return difference
            largest_difference = max(largest_difference, difference)
        return largest_difference

    def gradient_difference(
        self, full_batch: _BatchPart, parts: Sequence[_BatchPart], *, use_counts: bool = False
    ) -> float:
        """How far the gradient of `full_batch` is from that of `parts` together: the worst tensor's largest difference over its
        largest value, small tensors measured against the others. `use_counts`: parts weigh what their losses average over."""
        self._model.zero_grad(set_to_none=True)
        total, count = self._compute_loss(full_batch, use_counts=use_counts)
        (total / count).backward()
        full = self._gradient_magnitudes()
        # The parts' gradients are taken off again: where they agree with the whole's nothing is left.
        for part in parts:
            total, _ = self._compute_loss(part, use_counts=use_counts)
            (total / -count).backward()
        floor = _GRADIENT_FLOOR * max(full.values(), default=0.0)
        residuals = [
            (magnitude, max(full.get(name, 0.0), floor)) for name, magnitude in self._gradient_magnitudes().items()
        ]
        if any(math.isnan(magnitude) for magnitude, _ in residuals):
            return math.nan
        return max(
            (magnitude / scale if scale else math.inf for magnitude, scale in residuals if magnitude), default=0.0
        )

    def changes_between_calls(self, full_batch: _BatchPart) -> bool:
        """Whether calls change what the model computes, other than by its buffers."""
        with torch.no_grad():
            losses = {float(self._compute_loss(full_batch)[0]) for _ in range(_DRIFT_CALLS)}
        return len(losses) > 1

    def is_loss_coupled(self, samples: int) -> bool:
        """Whether the loss alone parts badly, on many samples and on outputs that the model has not given yet: a mean over what is not
        padding, or over what it gets wrong, shows on few samples of a fresh model by chance only. False where outputs cannot be drawn."""
        try:
            batch = tree_map(self._cast_leaf, self._example.batch(samples))
            with self._deterministic(), torch.no_grad():
                output = call_model(self._job, self._model, batch)
            leaves = tree_leaves(output)
            if not leaves or not all(_has_sample_rows(leaf, samples) for leaf in leaves):
                return False
            more_samples = self._example.read_more(_LOSS_ONLY_SAMPLES, _MAX_READ_SECONDS)
            for scale in _OUTPUT_SCALES:
                full_mean = self._loss_on_random_outputs(output, more_samples, _BatchPart(0, len(more_samples)), scale)
                if not math.isfinite(full_mean.mean):
                    continue
                reseeded = self._loss_on_random_outputs(
                    output, more_samples, _BatchPart(0, len(more_samples), seed=1), scale
                )
                for parts in _list_splits(len(more_samples)) if reseeded == full_mean else ():
                    if not full_mean.adds_up(
                        [self._loss_on_random_outputs(output, more_samples, part, scale) for part in parts]
                    ):
                        return True
        except Exception:  # a loss that does not take such outputs, samples that make no batch together
            return False
        return False

    def _loss_on_random_outputs(self, output: Any, samples: list[Any], part: _BatchPart, scale: float) -> _LossMean:
        """The loss of some of `samples` on rows of drawn outputs."""
        generator, rows = (
            torch.Generator().manual_seed(0),
            slice(part.first_sample, part.first_sample + part.num_samples),
        )

        def make_random_rows(leaf: Tensor) -> Tensor:
            all_rows = scale * torch.randn(len(samples), *leaf.shape[1:], generator=generator).to(leaf.dtype)
            return all_rows[rows].requires_grad_()

        seed_all(part.seed)
        batch, outputs = (
            tree_map(self._cast_leaf, self._example.collate(samples[rows])),
            tree_map(make_random_rows, output),
        )
        with self._deterministic():
            loss = call_loss(self._job, outputs, batch, self._model)
        if not isinstance(loss, Tensor):
            return _LossMean(math.nan, part.num_samples, math.nan)  # a sum and its count part well
        count = _read_count(loss) if self._weigh_by_counts else None
        return _LossMean(float(loss), part.num_samples, math.nan if count is None else count)

    def _compute_loss(self, part: _BatchPart, *, use_counts: bool = False) -> tuple[Tensor, float]:
        """(sum, count) of the loss of one part, from the state that the model started with."""
        self._restore_state()
        seed_all(part.seed)
        batch = tree_map(self._cast_leaf, self._example.batch(part.num_samples, first_sample=part.first_sample))
        with self._deterministic():
            loss = call_loss(self._job, call_model(self._job, self._model, batch), batch, self._model)
        if isinstance(loss, tuple):
            return loss[0], float(loss[1])
        # A mean is over the samples, or over what its graph says.
        count = (_read_count(loss) if use_counts else None) or float(part.num_samples)
        return loss * count, count

    def _restore_state(self) -> None:
        if self._start_state is not None:
            self._start_state.restore()
            return
        with torch.no_grad():
            for buffer_key, (module_buffers, value) in _list_buffers(self._model).items():
                initial = self._initial_buffers.get(buffer_key)
                if value is not None and initial is not None and value.shape == initial.shape:
                    value.copy_(initial)
                elif value is not initial:
                    module_buffers[buffer_key[1]] = None if initial is None else initial.clone()

    def _cast_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("cpu", self._dtype if leaf.is_floating_point() else None)

    def _gradient_magnitudes(self) -> dict[str, float]:
        """The largest value of each gradient."""
        named = self._model.named_parameters()
        grads = {name: _stored_values(parameter.grad) for name, parameter in named if parameter.grad is not None}
        return {name: float(grad.abs().max()) for name, grad in grads.items() if grad.numel()}


@dataclass(frozen=True, slots=True)
class _LossMean:
    """A mean over `samples`, and what it is divided by (NaN: not known)."""

    mean: float
    samples: int
    count: float

    def adds_up(self, parts: Sequence[_LossMean]) -> bool:
        """Whether it is the mean of `parts`, weighed by their samples or by what they are divided by."""
        for weights in ([part.samples for part in parts], [part.count for part in parts]):
            total = sum(part.mean * weight for part, weight in zip(parts, weights, strict=True) if weight)
            if abs(total / sum(weights) - self.mean) <= _LOSS_TOLERANCE * abs(self.mean):
                return True
        return False


def _read_count(loss: Tensor) -> float | None:
    """What the (first) average in a loss is divided by; None: it cannot be read."""
    loss_counts = read_counts(loss)
    return float(loss_counts.terms[0].count) if loss_counts.terms and not loss_counts.opaque_operators else None


def _stored_values(grad: Tensor) -> Tensor:
    """Those that are stored, of a sparse gradient."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _has_sample_rows(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0 and leaf.shape[0] == samples


def _build_deterministic_model(job: Job) -> nn.Module:
    """A model of its own, with the values that training starts from, dropout off and batch norms that look at no batch."""
    seed_all(job.seed)
    model = copy_module(job.model) if isinstance(job.model, nn.Module) else call_factory(job.model)
    initialise_lazy(model, job)
    model = model.to("cpu").train()
    disable_randomness(model)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
            if module.running_mean is None:
                module.running_mean, module.running_var = (
                    torch.zeros(module.num_features),
                    torch.ones(module.num_features),
                )
    return model


def first_line(error: Exception) -> str:
    """What an error says, short enough for a note."""
    return (str(error).strip().splitlines() or [""])[0][:160]
