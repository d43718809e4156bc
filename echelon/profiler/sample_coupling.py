"""Detect cross-sample coupling by comparing a batch with its parts, equal and unequal ones, in a small real step on the CPU.

If samples are coupled (contrastive losses, losses over all pairs, experts with a capacity), neither ranks nor micro-batches may split a batch. Batch
norms do not count, at fixed statistics: they are known by their class, and `batchnorm=` decides on them.

A mean over counts that differ between parts (labels that are not ignored) couples nothing on a CPU: training weights the parts by the counts from
the loss's graph (loss_counts.py), and so does this comparison. On an accelerator, reading the counts would synchronize, and parts are not weighted.

A model or a loss whose state changes with every call (a counter, a running mean, in buffers or Python attributes) may couple samples at every
ninth call only. A copy of it is advanced call by call, and each call is compared with its parts from the same state.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.errors import describe_error
from echelon.job import Job, call_loss, call_model, cast_model
from echelon.loss_counts import read_counts
from echelon.tree import map_tensors, tree_leaves
from echelon.trials.deep_copies import copy_module
from echelon.trials.determinism import DeterministicMode, disable_randomness
from echelon.trials.example_batch import ExampleBatches
from echelon.trials.lazy_modules import initialise_lazy
from echelon.trials.random_state import preserve_random_states, seed_all
from echelon.trials.reachable import GENERATOR_TYPES, find_reachable
from echelon.trials.shape_model import call_factory
from echelon.trials.snapshot import Snapshot

#: Larger models are not compared: with gradients and in float64, 200 M parameters are more than 3 GB.
MAX_PARAMETERS = 200 * 10**6
#: FLOPs of the comparison at most, and for a larger batch: about ten seconds and one on two slow cores.
MAX_FLOPS, _CHEAP_FLOPS = 2e11, 2e10
#: Relative difference of a gradient that rounding explains.
_GRADIENT_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
#: Relative difference of a loss, in float32, that rounding explains.
_LOSS_TOLERANCE = 3e-5
#: Samples for comparing the loss alone, seconds for reading them, and scales of the outputs.
_LOSS_ONLY_SAMPLES, _MAX_READ_SECONDS, _OUTPUT_SCALES = 64, 1.0, (1.0, 4.0)
#: Calls that show whether a model changes from call to call.
_DRIFT_CALLS = 8
#: Later calls that are compared if state changes from call to call, seconds for them, and samples of each.
MAX_LATER_CALLS, _MAX_LATER_SECONDS, _LATER_CALL_SAMPLES = 64, 2.0, 4
#: Bytes of a tensor, and elements of a parameter, that count as state at most.
_MAX_STATE_BYTES, _MAX_STATE_ELEMENTS = 2**24, 4096
#: A gradient difference is relative to the tensor's largest value, or to this fraction of the model's largest.
_GRADIENT_FLOOR = 1e-2


def detect_coupling(
    job: Job, example: ExampleBatches, *, parameters: int, flops: float, weigh_by_counts: bool = False
) -> tuple[bool | None, str]:
    """Whether the samples of a batch depend on each other other than through batch norms; None and the reason if unknown.

    `parameters`: of the model; `flops`: per sample and step; `weigh_by_counts`: whether parts are weighted by what their losses average over.
    """
    if job.batch_size < 2:
        return False, ""
    step_flops = {size: 2 * size * flops for size in (8, 4, 2)}  # of a batch and its halves
    # Halves of two and more if that is cheap: some code treats a single sample differently.
    samples = next(s for s in step_flops if job.batch_size >= s and (s == 2 or step_flops[s] <= _CHEAP_FLOPS))
    if parameters > MAX_PARAMETERS or step_flops[samples] > MAX_FLOPS:
        return None, "the model is too large to try it on a CPU"
    try:
        with preserve_random_states():
            return _compare_calls(job, example, samples, weigh_by_counts)
    except Exception as error:  # whatever a user's model needs that is missing here
        return None, f"a small step on the CPU failed with {describe_error(error)}"


def _compare_calls(job: Job, example: ExampleBatches, samples: int, weigh_by_counts: bool) -> tuple[bool | None, str]:
    comparison, initial_state = _Comparison(job, example, weigh_by_counts), None
    with contextlib.suppress(Exception):  # opaque objects
        initial_state = comparison.snapshot_state()
    is_coupled, reason = _compare_first_calls(comparison, samples)
    if is_coupled or initial_state is None:
        return is_coupled, reason
    with contextlib.suppress(Exception):  # state that cannot be restored, a model that takes no other batch size
        if initial_state.has_changed():
            later = comparison.make_fresh()
            keeps_state = later.keeps_state(_BatchPart(0, samples))
            if keeps_state and later.is_coupled_later(min(samples, _LATER_CALL_SAMPLES)):
                return True, ""
    return is_coupled, reason


def _compare_first_calls(comparison: _Comparison, samples: int) -> tuple[bool | None, str]:
    full_batch, splits = _BatchPart(0, samples), _list_splits(samples)
    difference = comparison.max_difference(full_batch, splits)
    if math.isnan(difference):
        return None, "the gradients of a small step are not numbers"
    if difference > comparison.tolerance:
        # In float32 rounding may flip a ReLU, which makes a large difference; float64 is slow, so that it comes second.
        with contextlib.suppress(Exception):  # a model that keeps float32 tensors to itself does not run in it
            float64_comparison = comparison.make_fresh(torch.float64)
            difference, comparison = float64_comparison.max_difference(full_batch, splits), float64_comparison
    if difference <= comparison.tolerance:
        return comparison.is_loss_coupled(samples), ""
    reseeded, source = [_BatchPart(0, samples, seed=1)], "the model, the loss or the collation"
    if comparison.gradient_difference(full_batch, reseeded) > comparison.tolerance:
        comparison.start_from_current_state(generators=False)
        if comparison.gradient_difference(full_batch, reseeded) > comparison.tolerance:
            return None, f"{source} draws random numbers that cannot be held still"
        return None, f"{source} keeps state by which each call computes something else"
    if comparison.make_fresh().changes_between_calls(full_batch):
        return None, "the model computes something else with each call"
    return True, ""


class _BatchPart(NamedTuple):
    """`num_samples` samples from `first_sample` on, and the seed for collating and computing them."""

    first_sample: int
    num_samples: int
    seed: int = 0


def _split_in_halves(first_sample: int, samples: int) -> tuple[_BatchPart, list[_BatchPart]]:
    half = samples // 2
    halves = [_BatchPart(first_sample, half), _BatchPart(first_sample + half, samples - half)]
    return _BatchPart(first_sample, samples), halves


def _list_splits(samples: int) -> list[list[_BatchPart]]:
    quarter, half = samples // 4, samples // 2
    splits: list[tuple[int, ...]] = [(half, samples - half)]
    if quarter > 1:
        rest = samples - quarter
        splits += [(quarter, rest), (rest, quarter), (quarter, quarter, rest - quarter)]
    return [[_BatchPart(sum(sizes[:index]), size) for index, size in enumerate(sizes)] for sizes in splits]


def _list_buffers(model: nn.Module) -> dict[tuple[str, str], tuple[dict[str, Tensor | None], Tensor | None]]:
    modules = [(path, module._buffers) for path, module in model.named_modules()]
    return {(path, name): (buffers, value) for path, buffers in modules for name, value in buffers.items()}


def _is_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.shape == second.shape and torch.equal(first, second)


class _Comparison:
    def __init__(
        self, job: Job, example: ExampleBatches, weigh_by_counts: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        self._job, self._example, self._dtype = job, example, dtype
        self._model = cast_model(_build_deterministic_model(job), dtype)
        self._deterministic = DeterministicMode(fix_random=True, widen_casts=dtype == torch.float64)
        buffers = {key: value for key, (_, value) in _list_buffers(self._model).items()}
        self._initial_buffers = {key: None if value is None else value.clone() for key, value in buffers.items()}
        self.tolerance, self._weigh_by_counts = _GRADIENT_TOLERANCES[dtype], weigh_by_counts
        self._start_state: Snapshot | None = None  #: what every call starts from; None: the initial buffers

    def make_fresh(self, dtype: torch.dtype = torch.float32) -> _Comparison:
        """Another comparison, with the initial model."""
        return _Comparison(self._job, self._example, self._weigh_by_counts, dtype)

    def snapshot_state(self, *, generators: bool = True) -> Snapshot:
        """The present state of model, loss and collation, weights aside. `generators`: include random generators."""
        job, model = self._job, self._model
        roots = {"model": model, "buffers": list(model.buffers()), "loss": job.loss, "inputs": job.inputs}
        roots["collate"] = self._example.collate
        excluded = {id(item) for item in model.parameters() if item.numel() > _MAX_STATE_ELEMENTS}
        if not generators:
            excluded |= {id(item) for item in find_reachable(roots).values() if isinstance(item, GENERATOR_TYPES)}
        return Snapshot(roots, excluded_ids=excluded, max_tensor_bytes=_MAX_STATE_BYTES)

    def start_from_current_state(self, *, generators: bool = True) -> _Comparison:
        """Let every call from now on start from the present state."""
        self._start_state = self.snapshot_state(generators=generators)
        return self

    def keeps_state(self, full_batch: _BatchPart) -> bool:
        """Whether calls change buffers, or other state each time for the same samples: an output that is stored is no state."""
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
        """Whether the samples of a batch are coupled at a later call; each is compared with its parts from the same state, and the next continues
        from what the last part left."""
        deadline = time.thread_time() + _MAX_LATER_SECONDS  # excludes other processes
        for call in range(MAX_LATER_CALLS):
            full_batch, halves = _split_in_halves(call * samples, samples)
            differs = self.start_from_current_state().differs_from_parts(full_batch, halves)
            if differs and self._is_real_difference(call, full_batch, halves):
                return True
            if time.thread_time() > deadline:
                return False
        return False

    def _is_real_difference(self, call_index: int, full_batch: _BatchPart, halves: Sequence[_BatchPart]) -> bool:
        """Whether it is neither rounding nor random numbers nor state that could not be restored."""
        samples = full_batch.num_samples
        with contextlib.suppress(Exception):  # as at the first call: a model may not run in float64
            float64_comparison = self.make_fresh(torch.float64)
            for earlier_call in range(call_index):
                float64_comparison._continue_call(_split_in_halves(earlier_call * samples, samples)[1][-1])
            self._restore_state()  # the loss's, which both share
            if not float64_comparison.start_from_current_state().differs_from_parts(full_batch, halves):
                return False
        self._restore_state()
        return self.gradient_difference(full_batch, [full_batch._replace(seed=1)]) <= self.tolerance

    def _continue_call(self, full_batch: _BatchPart) -> None:
        self._start_state = Snapshot({})
        self._compute_loss(full_batch)

    def differs_from_parts(self, full_batch: _BatchPart, parts: Sequence[_BatchPart]) -> bool:
        """Whether the parts together have another gradient than the full batch, or none."""
        difference = self.max_difference(full_batch, [parts])
        if math.isnan(difference):  # the full batch may have no gradient either
            return not math.isnan(self.gradient_difference(full_batch, []))
        return difference > self.tolerance

    def max_difference(self, full_batch: _BatchPart, splits: Sequence[Sequence[_BatchPart]]) -> float:
        """The largest gradient difference between `full_batch` and its parts, weighted as in training."""
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
        """The gradient of `full_batch` minus that of `parts` together: the worst tensor's largest difference relative to its largest value, small
        tensors relative to the others. `use_counts`: weight parts by what their losses average over."""
        self._model.zero_grad(set_to_none=True)
        total, count = self._compute_loss(full_batch, use_counts=use_counts)
        (total / count).backward()
        full = self._gradient_magnitudes()
        # The parts' gradients are subtracted: where they agree with the full batch's, nothing is left.
        for part in parts:
            total, _ = self._compute_loss(part, use_counts=use_counts)
            (total / -count).backward()
        floor = _GRADIENT_FLOOR * max(full.values(), default=0.0)
        residuals = [(value, max(full.get(name, 0.0), floor)) for name, value in self._gradient_magnitudes().items()]
        if any(math.isnan(value) for value, _ in residuals):
            return math.nan
        return max((value / scale if scale else math.inf for value, scale in residuals if value), default=0.0)

    def changes_between_calls(self, full_batch: _BatchPart) -> bool:
        """Whether calls change what the model computes, other than through its buffers."""
        with torch.no_grad():
            losses = {float(self._compute_loss(full_batch)[0]) for _ in range(_DRIFT_CALLS)}
        return len(losses) > 1

    def is_loss_coupled(self, samples: int) -> bool:
        """Whether the loss alone does not split, on many samples and random outputs: a mean over what is not padding, or over wrong predictions,
        shows on few samples of a fresh model only by chance. False where outputs cannot be drawn."""
        try:
            batch = map_tensors(self._cast_tensor, self._example.batch(samples))
            with self._deterministic(), torch.no_grad():
                output = call_model(self._job, self._model, batch)
            leaves = tree_leaves(output)
            if not leaves or not all(_has_sample_rows(leaf, samples) for leaf in leaves):
                return False
            more_samples = self._example.read_more(_LOSS_ONLY_SAMPLES, _MAX_READ_SECONDS)
            full_batch = _BatchPart(0, len(more_samples))
            for scale in _OUTPUT_SCALES:
                loss = partial(self._loss_on_random_outputs, output, more_samples, scale)
                full_mean = loss(full_batch)
                if math.isfinite(full_mean.mean) and loss(full_batch._replace(seed=1)) == full_mean:
                    splits = _list_splits(len(more_samples))
                    if not all(full_mean.adds_up([loss(part) for part in parts]) for parts in splits):
                        return True
        except Exception:  # a loss that does not accept such outputs, samples that cannot be collated together
            return False
        return False

    def _loss_on_random_outputs(self, output: Any, samples: list[Any], scale: float, part: _BatchPart) -> _LossMean:
        generator = torch.Generator().manual_seed(0)
        rows = slice(part.first_sample, part.first_sample + part.num_samples)

        def make_random_rows(leaf: Tensor) -> Tensor:
            all_rows = scale * torch.randn(len(samples), *leaf.shape[1:], generator=generator).to(leaf.dtype)
            return all_rows[rows].requires_grad_()

        seed_all(part.seed)
        batch = map_tensors(self._cast_tensor, self._example.collate(samples[rows]))
        outputs = map_tensors(make_random_rows, output)
        with self._deterministic():
            loss = call_loss(self._job, outputs, batch, self._model)
        if not isinstance(loss, Tensor):
            return _LossMean(math.nan, part.num_samples, math.nan)  # (sum, count) splits exactly
        count = _read_count(loss) if self._weigh_by_counts else None
        return _LossMean(float(loss), part.num_samples, math.nan if count is None else count)

    def _compute_loss(self, part: _BatchPart, *, use_counts: bool = False) -> tuple[Tensor, float]:
        """(sum, count) of the loss of one part, from the start state."""
        self._restore_state()
        seed_all(part.seed)
        batch = map_tensors(self._cast_tensor, self._example.batch(part.num_samples, first_sample=part.first_sample))
        with self._deterministic():
            loss = call_loss(self._job, call_model(self._job, self._model, batch), batch, self._model)
        if isinstance(loss, tuple):
            return loss[0], float(loss[1])
        # A mean is over the samples, or over the count in its graph.
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

    def _cast_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", self._dtype if tensor.is_floating_point() else None)

    def _gradient_magnitudes(self) -> dict[str, float]:
        named = [(name, value.grad) for name, value in self._model.named_parameters()]
        # Of a sparse gradient, the stored values.
        grads = {name: x.coalesce().values() if x.is_sparse else x for name, x in named if x is not None}
        return {name: float(grad.abs().max()) for name, grad in grads.items() if grad.numel()}


@dataclass(frozen=True, slots=True)
class _LossMean:
    """A mean over `samples`, and its divisor (NaN: unknown)."""

    mean: float
    samples: int
    count: float

    def adds_up(self, parts: Sequence[_LossMean]) -> bool:
        """Whether it is the mean of `parts`, weighted by samples or by divisors."""
        for weights in ([part.samples for part in parts], [part.count for part in parts]):
            total = sum(part.mean * weight for part, weight in zip(parts, weights, strict=True) if weight)
            if abs(total / sum(weights) - self.mean) <= _LOSS_TOLERANCE * abs(self.mean):
                return True
        return False


def _read_count(loss: Tensor) -> float | None:
    loss_counts = read_counts(loss)
    return float(loss_counts.terms[0].count) if loss_counts.terms and not loss_counts.opaque_operators else None


def _has_sample_rows(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0 and leaf.shape[0] == samples


def _build_deterministic_model(job: Job) -> nn.Module:
    """A copy of the model with its initial values, without dropout and batch statistics."""
    seed_all(job.seed)
    model = copy_module(job.model) if isinstance(job.model, nn.Module) else call_factory(job.model)
    initialise_lazy(model, job)
    model = model.to("cpu").train()
    disable_randomness(model)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
            if module.running_mean is None:
                module.running_mean = torch.zeros(module.num_features)
                module.running_var = torch.ones(module.num_features)
    return model
