"""Classify the job's optimizers by what one parameter's update reads, by trial steps on small stand-ins.

    element   each number by itself (SGD, AdamW): may step on any part of a parameter
    tensor    one whole parameter (LAMB, Muon, Adafactor): may step on whole parameters in any company
    model     several parameters (a global norm inside step, D-adaptation): steps on all of them at once

Three comparisons decide, each over a dozen steps in float64: a parameter trained in parts against the same one trained whole, some
parameters trained alone against the same ones among all, and two runs from different seeds. Gradients span seven orders of magnitude, so
that thresholds are active in some steps and not in others; some are zero, some missing; parameters are rescaled on the way; step counters
jump ahead, so that behaviour that begins late shows. An optimizer that cannot be tried counts as the most general kind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import EchelonError, JobError
from echelon.job import Job, call_optimizer
from echelon.plan.profile import UpdateScope
from echelon.profiler.sample_coupling import first_line
from echelon.trials.random_state import preserve_random_states, read_host_random_state
from echelon.trials.trial_context import preserve_job_state

#: Longest sides of stand-ins by dim, and of a second trial with larger ones: Google's Adafactor factors matrices whose sides are 128 or
#: longer, 8-bit Adam quantises parameters of 4096 elements or more.
_SMALL_SIDES, _OTHER_SIDE = (6, 5), 3
_LARGE_SIDE, _LARGEST_SIDE, _LARGE_VECTOR_SIZE = 136, 272, 4200
#: Gradient magnitudes of the steps, run by run: estimates that saturate under large gradients move under small ones.
_GRADIENT_MAGNITUDES = (
    (1.0, 1e-2, 10.0, 1e-4, 1e3, 1.0, 0.1, 1.0, 1.0, 30.0, 1.0, 1.0),
    (0.05, 0.1, 0.05, 0.1, 0.2, 0.1, 0.1, 0.05, 0.1, 0.1, 0.1, 0.1),
    (1e-3, 2e-3, 1e-3, 2e-3, 1e-3, 1e-3, 1e-3, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3),
)
_SHORT_RUN_MAGNITUDES = (1.0, 1e2, 1e-3)
#: Before these steps counters jump ahead by so much; before `_RESCALE_STEP` parameters are rescaled; in `_MISSING_GRADIENT_STEP` some have no gradient, in the
#: last step some have zeros (which makes some optimizers divide by zero, so nothing comes after it).
_COUNTER_JUMPS, _RESCALE_STEP, _MISSING_GRADIENT_STEP = {8: 1_000, 10: 100_000}, 5, 10
#: Parameters of one shape and with the same options that are tried at most, small and large: more would show nothing new.
_MAX_ALIKE_SMALL, _MAX_ALIKE_LARGE = 3, 1
#: How far results may lie apart that differ by the order of operations alone, relative to a tensor's largest value.
_TOLERANCE = 1e-10

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerClass:
    """What the trials found about one optimizer."""

    name: str
    reads: UpdateScope
    draws: bool = False  #: whether its step draws random numbers
    untried: str = ""  #: why it could not be tried
    parameters: frozenset[str] = frozenset()  #: that it trains


class _TrialFailedError(Exception):
    """The optimizer cannot be tried like this."""


def make_trial_optimizers(job: Job, parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    """The job's optimizers over these, for trial steps: of other parameters that they hold (the loss's own) they get copies."""
    returned = call_optimizer(job, list(parameters.items()))
    optimizers: list[Any] = list(returned) if isinstance(returned, list | tuple) else [returned]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise JobError(f"optimizer= gives {type(optimizer).__name__}, not a torch optimizer or a list of them")
        _copy_foreign_parameters(optimizer, parameters)
    return optimizers


def _copy_foreign_parameters(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Have it hold copies of parameters that are not among `parameters`: a trial must not train the user's own."""
    own_parameter_ids = {id(value) for value in parameters.values()}
    all_meta = all(value.is_meta for value in parameters.values())
    for group in optimizer.param_groups:
        for index, value in enumerate(group["params"]):
            if id(value) in own_parameter_ids:
                continue
            copied_data = torch.empty_like(value, device="meta") if all_meta else value.detach().clone()
            copied_parameter = nn.Parameter(copied_data, requires_grad=value.requires_grad)
            group["params"][index] = copied_parameter
            if value in optimizer.state:
                optimizer.state[copied_parameter] = optimizer.state.pop(value)


def make_meta_parameters(parameters: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Stand-ins without memory."""
    return {
        name: nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=value.is_floating_point() or value.is_complex())
        for name, value in parameters.items()
    }  # fmt: skip


#: By the job's function: what it made last, and the classes of that. A proof and the run that follows it ask for the same.
_CACHED_CLASSES: MutableMapping[Any, tuple[Any, tuple[OptimizerClass, ...]]] = WeakKeyDictionary()


def classify(job: Job, parameters: Mapping[str, Tensor]) -> tuple[OptimizerClass, ...]:
    """The class of each of the job's optimizers; `parameters`: the trainable ones, on any device."""
    with preserve_job_state(job):
        return _classify(job, parameters)


def _classify(job: Job, parameters: Mapping[str, Tensor]) -> tuple[OptimizerClass, ...]:
    placeholders = make_meta_parameters(parameters)
    try:
        optimizers = make_trial_optimizers(job, placeholders)
    except EchelonError:
        raise
    except Exception as error:  # a function that looks at values
        reason = _describe_error(error)
        return (
            OptimizerClass(name="the optimizer", reads="model", draws=True, untried=reason, parameters=frozenset(parameters)),
        )  # fmt: skip
    shapes = {name: (value.shape, value.dtype) for name, value in parameters.items()}
    cache_key = (
        shapes,
        [
            (type(optimizer), _group_options_by_parameter(placeholders, optimizers, index))
            for index, optimizer in enumerate(optimizers)
        ],
    )
    try:
        cached_key, optimizer_classes = _CACHED_CLASSES.get(job.optimizer, (None, ()))
    except TypeError:  # an object of the user's that is not hashable
        return classify_optimizers(job, placeholders, optimizers)
    if cached_key != cache_key:
        optimizer_classes = classify_optimizers(job, placeholders, optimizers)
        _CACHED_CLASSES[job.optimizer] = cache_key, optimizer_classes
    return optimizer_classes


def classify_optimizers(
    job: Job, placeholders: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> tuple[OptimizerClass, ...]:
    """The same for optimizers that were made over stand-ins on the meta device."""
    names = {id(value): name for name, value in placeholders.items()}
    optimizer_classes = []
    with preserve_random_states():
        for index, optimizer in enumerate(optimizers):
            trained = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
            try:
                reads, draws = _classify_by_trials(job, placeholders, optimizers, index)
                untried = ""
            except _TrialFailedError as error:
                reads, draws, untried = "model", True, str(error)
            optimizer_classes.append(
                OptimizerClass(
                    name=type(optimizer).__name__,
                    reads=reads,
                    draws=draws,
                    untried=untried,
                    parameters=frozenset(trained),
                )
            )
    return tuple(optimizer_classes)


def _classify_by_trials(
    job: Job, placeholders: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], index: int
) -> tuple[UpdateScope, bool]:
    """What the optimizer at `index` reads, and whether it draws."""
    options = _group_options_by_parameter(placeholders, optimizers, index)
    small_shapes = {name: _cap_shape(value.shape, _SMALL_SIDES, _OTHER_SIDE) for name, value in placeholders.items()}
    large_shapes = {
        name: _cap_shape(value.shape, (_LARGE_SIDE, _LARGE_SIDE), _OTHER_SIDE, _LARGE_VECTOR_SIZE)
        for name, value in placeholders.items()
    }
    reads: UpdateScope = "element"
    for magnitudes in _GRADIENT_MAGNITUDES:
        try:
            trials = _start_trials(job, small_shapes, options, len(optimizers), index, magnitudes)
        except _TrialFailedError:
            # A function that chooses by size may give small parameters to other optimizers, or to none.
            trials = _start_trials(job, large_shapes, options, len(optimizers), index, magnitudes)
        if trials.reads_other_parameters():
            reads = "model"
        elif reads == "element" and not trials.is_elementwise():
            reads = "tensor"
        # Once is enough for two seeds to show.
        if trials.drew_random or (magnitudes is _GRADIENT_MAGNITUDES[0] and trials.depends_on_seed()):
            return "model", True
        if reads == "model":
            return reads, False
    if reads != "element":
        return reads, False
    largest = max(options, key=lambda name: placeholders[name].numel(), default=None)
    if largest is not None:
        large_shapes[largest] = _cap_shape(
            placeholders[largest].shape, (_LARGEST_SIDE, _LARGEST_SIDE), _OTHER_SIDE, _LARGE_VECTOR_SIZE
        )
    if all(small_shapes[name] == large_shapes[name] for name in options):
        return reads, False
    try:
        return "element" if _start_trials(
            job, large_shapes, options, len(optimizers), index, _SHORT_RUN_MAGNITUDES
        ).is_elementwise() else "tensor", False
    except _TrialFailedError:
        return "model", False


def _cap_shape(shape: Sequence[int], sides: Sequence[int], other: int, vector_size: int = 0) -> tuple[int, ...]:
    if len(shape) == 1 and vector_size:
        return (min(shape[0], vector_size),)
    return tuple(min(size, sides[dim] if dim < len(sides) else other) for dim, size in enumerate(shape))


def _group_options_by_parameter(
    placeholders: Mapping[str, Tensor], optimizers: Sequence[Optimizer], index: int
) -> dict[str, str]:
    """What each parameter of the optimizer at `index` is trained with, learning rates aside."""
    names, optimizer = {id(value): name for name, value in placeholders.items()}, optimizers[index]
    return {
        names[id(value)]: repr([group.get(key) for key in optimizer.defaults if key != "lr"])
        for group in optimizer.param_groups
        for value in group["params"]
        if id(value) in names
    }


@dataclass(frozen=True, slots=True)
class _ParameterPart:
    """Which part of each parameter a run trains: along the first, the last or by turns another dim."""

    region: str = ""  #: "first", "last", "turns"; empty: all of it

    def select(self, value: Tensor, parameter_index: int) -> Tensor:
        dims = [dim for dim, size in enumerate(value.shape) if size > 1]
        if not self.region or not dims:
            return value
        if self.region == "first":
            dim, start, length = dims[0], 0, (value.shape[dims[0]] + 1) // 2
        elif self.region == "last":
            dim, length = dims[-1], max(value.shape[dims[-1]] // 3, 1)
            start = value.shape[dim] - length
        else:
            dim = dims[parameter_index % len(dims)]
            start, length = 1, value.shape[dim] - 1
        return value.narrow(dim, start, length)


@dataclass(slots=True)
class _OptimizerTrials:
    """Trial runs of the optimizer at `optimizer_index` over parameters of these shapes."""

    job: Job
    shapes: Shapes
    trained_names: list[str]  #: that are trained, in the model's order
    num_optimizers: int  #: of the job's optimizers
    optimizer_index: int
    magnitudes: Sequence[float]
    has_missing_gradients: bool = True  #: whether some gradients are missing in one step
    has_counter_jumps: bool = True
    initial_values: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    rescale_offsets: dict[str, Tensor] = field(default_factory=dict)
    drew_random: bool = False
    replaced_storage: bool = (
        False  #: whether a step gave a parameter other memory (`p.data = ...`), which a sharded one does not follow
    )
    baseline: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw_normal(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        scales = {name: 10.0 ** (parameter_index % 3 - 1) for parameter_index, name in enumerate(self.trained_names)}
        self.initial_values = {
            # Those that only the job's function sees have a shape and no memory.
            name: draw_normal(shape) * scales[name]
            if name in scales
            else torch.zeros((), dtype=torch.float64).expand(shape)
            for name, shape in self.shapes.items()
        }
        self.rescale_offsets = {name: 3.0 * draw_normal(self.shapes[name]) for name in self.trained_names}
        # Gradients of successive steps have a part in common, as in training: some optimizers estimate their rate from that.
        common = {name: draw_normal(self.shapes[name]) for name in self.trained_names}
        for magnitude in self.magnitudes:
            self.gradients.append(
                {name: magnitude * (common[name] + draw_normal(self.shapes[name])) for name in self.trained_names}
            )
        for name in self.trained_names[::2]:
            self.gradients[-1][name].zero_()

    def run_baseline(self) -> None:
        self.baseline = self.run(_ParameterPart(), self.trained_names, seed=0)

    def reads_other_parameters(self) -> bool:
        """Whether an update reads other parameters."""
        subsets = (self.trained_names[::2], self.trained_names[1::2][::-1]) if len(self.trained_names) > 1 else ()
        return not all(self.matches_baseline(_ParameterPart(), names) for names in subsets)

    def is_elementwise(self) -> bool:
        """Whether parts of parameters train as they do in the whole."""
        if self.replaced_storage:
            return False
        return all(
            self.matches_baseline(_ParameterPart(region), self.trained_names) for region in ("first", "last", "turns")
        )

    def depends_on_seed(self) -> bool:
        """Whether another seed trains to other values."""
        return not self.matches_baseline(_ParameterPart(), self.trained_names, seed=1)

    def matches_baseline(self, part: _ParameterPart, names: Sequence[str], seed: int = 0) -> bool:
        """Whether parameters train as they do whole and among all."""
        try:
            results = self.run(part, names, seed)
        except _TrialFailedError:
            return False
        indices = {name: index for index, name in enumerate(self.trained_names)}
        return all(
            _are_close(values[name], part.select(baseline_values[name], indices[name]))
            for values, baseline_values in zip(results, self.baseline, strict=True)
            for name in names
        )

    def run(self, part: _ParameterPart, names: Sequence[str], seed: int) -> list[dict[str, Tensor]]:
        """The values of `names` after each step."""
        indices = {name: index for index, name in enumerate(self.trained_names)}
        values = {
            name: nn.Parameter(part_value.clone() if name in indices else part_value)
            for name, value in self.initial_values.items()
            for part_value in (part.select(value, indices.get(name, 0)),)
        }
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        random.seed(seed)
        try:
            optimizers = make_trial_optimizers(self.job, values)
        except Exception as error:
            raise _TrialFailedError(_describe_error(error)) from error
        if len(optimizers) != self.num_optimizers:
            raise _TrialFailedError("optimizer= gives another number of optimizers for small parameters")
        optimizer = optimizers[self.optimizer_index]
        _restrict_to_parameters(optimizer, [values[name] for name in names])
        counters, results = _StepCounters(optimizer), []
        states = torch.get_rng_state(), read_host_random_state()
        pointers = {name: values[name].data_ptr() for name in names}
        for step, gradients in enumerate(self.gradients):
            if self.has_counter_jumps:
                counters.advance(
                    _COUNTER_JUMPS.get(step, 0)
                    if len(self.magnitudes) > len(_SHORT_RUN_MAGNITUDES)
                    else 1_000 * (step == 2)
                )
            for name in names:
                value, index = values[name], indices[name]
                if step == _RESCALE_STEP:
                    with torch.no_grad():
                        value.add_(part.select(self.rescale_offsets[name], index))
                is_missing = self.has_missing_gradients and step == _MISSING_GRADIENT_STEP and index % 3 == 1
                value.grad = None if is_missing else part.select(gradients[name], index).clone()
            try:
                optimizer.step()
            except Exception as error:  # it needs more than gradients, or another device
                raise _TrialFailedError(_describe_error(error)) from error
            counters.record_step()
            results.append({name: values[name].detach().clone() for name in names})
        self.replaced_storage |= any(values[name].data_ptr() != pointer for name, pointer in pointers.items())
        self.drew_random |= not torch.equal(states[0], torch.get_rng_state()) or states[1] != read_host_random_state()
        return results


def _start_trials(
    job: Job, shapes: Shapes, group_options: Mapping[str, str], num_optimizers: int, optimizer_index: int, magnitudes: Sequence[float]
) -> _OptimizerTrials:  # fmt: skip
    """Runs over these shapes, the first of them made. Optimizers that take no missing gradient, or cannot count so far, go without."""
    names_by_kind: dict[object, list[str]] = {}
    for name in shapes:
        if name in group_options:
            names_by_kind.setdefault((group_options[name], shapes[name]), []).append(name)
    max_alike = _MAX_ALIKE_SMALL if len(magnitudes) > len(_SHORT_RUN_MAGNITUDES) else _MAX_ALIKE_LARGE
    selected_names = {name for names in names_by_kind.values() for name in (*names[: max_alike - 1], names[-1])}
    trained_names = [name for name in shapes if name in selected_names]
    last_error: _TrialFailedError | None = None
    for has_missing_gradients, has_counter_jumps in ((True, True), (False, True), (False, False)):
        trials = _OptimizerTrials(
            job,
            shapes,
            trained_names,
            num_optimizers,
            optimizer_index,
            magnitudes,
            has_missing_gradients,
            has_counter_jumps,
        )
        try:
            trials.run_baseline()
        except _TrialFailedError as error:
            last_error = error
            continue
        return trials
    assert last_error is not None
    raise last_error


def _restrict_to_parameters(optimizer: Optimizer, values: Sequence[nn.Parameter]) -> None:
    """Have it step on `values` alone, in their order, without the kernels of a device that is not here: they compute the same."""
    order = {id(value): index for index, value in enumerate(values)}
    disable_device_kernels(optimizer)
    for group in optimizer.param_groups:
        group["params"] = sorted((p for p in group["params"] if id(p) in order), key=lambda p: order[id(p)])
        if group.get("lr") == 0:
            group["lr"] = 1e-3  # a schedule raises it


def disable_device_kernels(optimizer: Optimizer) -> None:
    """Turn off the kernels of a device that is not here: they compute the same."""
    for group in optimizer.param_groups:
        for option in ("fused", "capturable"):
            if group.get(option):
                group[option] = False


class _StepCounters:
    """The step counters that an optimizer keeps in its state, groups or attributes: what grew by one at every step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._previous_values = dict(self._iterate_numbers())
        self._increment_counts: dict[tuple[int, Any], int] = {}

    def record_step(self) -> None:
        """After a step."""
        current_values = dict(self._iterate_numbers())
        for key, value in current_values.items():
            if key in self._previous_values and value == self._previous_values[key] + 1:
                self._increment_counts[key] = self._increment_counts.get(key, 0) + 1
        self._previous_values = current_values

    def advance(self, steps: int) -> None:
        """Count so many steps that were not made."""
        if not steps:
            return
        for holder in self._iterate_holders():
            for key, value in list(holder.items()):
                if self._increment_counts.get((id(holder), key), 0) < 1:
                    continue
                if isinstance(value, Tensor):
                    with torch.no_grad():
                        value.add_(steps)
                else:
                    holder[key] = value + steps
        self._previous_values = dict(self._iterate_numbers())

    def _iterate_holders(self) -> Iterator[MutableMapping[Any, Any]]:
        yield vars(self._optimizer)
        yield from self._optimizer.param_groups
        yield self._optimizer.state
        for entry in self._optimizer.state.values():
            if isinstance(entry, dict):
                yield entry

    def _iterate_numbers(self) -> Iterator[tuple[tuple[int, Any], float]]:
        for holder in self._iterate_holders():
            for key, value in holder.items():
                if (
                    isinstance(value, Tensor)
                    and value.numel() == 1
                    and not isinstance(value, nn.Parameter)
                    and value.device.type == "cpu"
                ):
                    yield (id(holder), key), float(value.real if value.is_complex() else value)
                elif type(value) in (int, float):
                    yield (id(holder), key), float(value)


def _are_close(actual: Tensor, expected: Tensor) -> bool:
    if not expected.numel():
        return True
    difference, magnitude = float((actual - expected).abs().max()), float(expected.abs().max())
    if difference == difference and magnitude < float("inf"):
        return difference <= _TOLERANCE * magnitude
    finite = expected[expected.isfinite()]
    magnitude = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(actual, expected, 0.0, _TOLERANCE * magnitude, equal_nan=True)


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
