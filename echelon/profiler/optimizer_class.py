"""Classify the job's optimizers by what a parameter's update reads, by trial steps on small placeholders.

    element   each element by itself (SGD, AdamW): may step on any shard of a parameter
    tensor    one full parameter (LAMB, Muon, Adafactor): may step on any subset of full parameters
    model     several parameters (a global norm inside step, D-adaptation): steps on all of them at once

Three comparisons decide, each over a dozen steps in float64: a parameter trained in parts against the full one, a subset of parameters against all
of them, and two runs from different seeds. Gradients span seven orders of magnitude, so that thresholds are active in some steps only; some are
zero, some missing; parameters are rescaled in between; step counters jump ahead, so that behaviour that begins late shows. An optimizer that
cannot be tested counts as the most general kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import EchelonError, JobError, describe_error
from echelon.job import Job, call_optimizer
from echelon.plan.profile import UpdateScope
from echelon.trials.random_state import preserve_random_states, read_host_random_state, seed_all
from echelon.trials.trial_context import preserve_job_state

#: Longest sides of placeholders by dim, and of a second trial with larger ones: Google's Adafactor factors matrices whose sides are 128 or
#: longer, 8-bit Adam quantizes parameters of 4096 elements or more.
_SMALL_SIDES, _OTHER_SIDE = (6, 5), 3
_LARGE_SIDE, _LARGEST_SIDE, _LARGE_VECTOR_SIZE = 136, 272, 4200
#: Gradient magnitudes of the steps, run by run: estimates that saturate under large gradients move under small ones.
_GRADIENT_MAGNITUDES = (
    (1.0, 1e-2, 10.0, 1e-4, 1e3, 1.0, 0.1, 1.0, 1.0, 30.0, 1.0, 1.0),
    (0.05, 0.1, 0.05, 0.1, 0.2, 0.1, 0.1, 0.05, 0.1, 0.1, 0.1, 0.1),
    (1e-3, 2e-3, 1e-3, 2e-3, 1e-3, 1e-3, 1e-3, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3),
)
_SHORT_RUN_MAGNITUDES = (1.0, 1e2, 1e-3)
#: How far counters jump ahead before which step, in full and short runs.
_COUNTER_JUMPS, _SHORT_RUN_COUNTER_JUMPS = {8: 1_000, 10: 100_000}, {2: 1_000}
#: Before `_RESCALE_STEP` parameters are rescaled; in `_MISSING_GRADIENT_STEP` some have no gradient. In the last step some gradients are zero, which
#: makes some optimizers divide by zero.
_RESCALE_STEP, _MISSING_GRADIENT_STEP = 5, 10
#: Parameters with the same shape and options in a trial, small and large: more would show nothing new.
_MAX_ALIKE_SMALL, _MAX_ALIKE_LARGE = 3, 1
#: Difference that the order of operations explains, relative to a tensor's largest value.
_TOLERANCE = 1e-10
#: Parts of a parameter that are trained by themselves; see `_select_part`.
_PARTS = ("first", "last", "turns")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerClass:
    """The result of an optimizer's trials."""

    name: str
    reads: UpdateScope
    draws: bool = False  #: whether its step draws random numbers
    untried: str = ""  #: why it could not be tested
    parameters: frozenset[str] = frozenset()  #: that it trains


class _TrialFailedError(Exception):
    """The optimizer cannot be tested like this."""


def make_trial_optimizers(job: Job, parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    """The job's optimizers over these parameters; others that they hold (the loss's own) are replaced by copies."""
    returned = call_optimizer(job, list(parameters.items()))
    optimizers: list[Any] = list(returned) if isinstance(returned, list | tuple) else [returned]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise JobError(f"optimizer= gives {type(optimizer).__name__}, not a torch optimizer or a list of them")
        _copy_foreign_parameters(optimizer, parameters)
    return optimizers


def _copy_foreign_parameters(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Replace parameters that are not among `parameters` by copies: a trial must not train the user's own."""
    own_ids = {id(value) for value in parameters.values()}
    all_meta = all(value.is_meta for value in parameters.values())
    for group in optimizer.param_groups:
        for index, value in enumerate(group["params"]):
            if id(value) not in own_ids:
                data = torch.empty_like(value, device="meta") if all_meta else value.detach().clone()
                group["params"][index] = copied = nn.Parameter(data, requires_grad=value.requires_grad)
                if value in optimizer.state:
                    optimizer.state[copied] = optimizer.state.pop(value)


def make_meta_parameters(parameters: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Placeholders without memory."""
    placeholders = {name: torch.empty_like(value, device="meta") for name, value in parameters.items()}
    return {name: nn.Parameter(x, x.is_floating_point() or x.is_complex()) for name, x in placeholders.items()}


#: By the job's function: what it returned last, and the classes of that. A proof and the run that follows need the same.
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
        reason, names = describe_error(error), frozenset(parameters)
        return (OptimizerClass(name="the optimizer", reads="model", draws=True, untried=reason, parameters=names),)
    shapes = {name: (value.shape, value.dtype) for name, value in parameters.items()}
    kinds = [(type(optimizer), _group_options(placeholders, optimizer)) for optimizer in optimizers]
    try:
        cached_key, optimizer_classes = _CACHED_CLASSES.get(job.optimizer, (None, ()))
    except TypeError:  # a user's object that is not hashable
        return classify_optimizers(job, placeholders, optimizers)
    if cached_key != (shapes, kinds):
        optimizer_classes = classify_optimizers(job, placeholders, optimizers)
        _CACHED_CLASSES[job.optimizer] = (shapes, kinds), optimizer_classes
    return optimizer_classes


def classify_optimizers(
    job: Job, placeholders: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> tuple[OptimizerClass, ...]:
    """The class of each of `optimizers`, which the job made over placeholders on the meta device."""
    optimizer_classes = []
    with preserve_random_states():
        for index, optimizer in enumerate(optimizers):
            options = _group_options(placeholders, optimizer)
            try:
                reads, draws = _Subject(job, placeholders, options, len(optimizers), index).classify()
                untried = ""
            except _TrialFailedError as error:
                reads, draws, untried = "model", True, str(error)
            name, names = type(optimizer).__name__, frozenset(options)
            result = OptimizerClass(name=name, reads=reads, draws=draws, untried=untried, parameters=names)
            optimizer_classes.append(result)
    return tuple(optimizer_classes)


@dataclass(frozen=True, slots=True)
class _Subject:
    """The job's optimizer at `index`."""

    job: Job
    placeholders: Mapping[str, nn.Parameter]
    group_options: Mapping[str, str]  #: of the parameters that it trains
    num_optimizers: int
    index: int

    def classify(self) -> tuple[UpdateScope, bool]:
        """What the optimizer reads, and whether it draws random numbers."""
        values = self.placeholders.items()
        small = {name: _cap_shape(value.shape, _SMALL_SIDES) for name, value in values}
        large = {name: _cap_shape(x.shape, (_LARGE_SIDE, _LARGE_SIDE), _LARGE_VECTOR_SIZE) for name, x in values}
        reads: UpdateScope = "element"
        for magnitudes in _GRADIENT_MAGNITUDES:
            try:
                trials = self.start_trials(small, magnitudes)
            except _TrialFailedError:
                # A function that chooses by size may give small parameters to other optimizers, or to none.
                trials = self.start_trials(large, magnitudes)
            if trials.reads_other_parameters():
                reads = "model"
            elif reads == "element" and not trials.is_elementwise():
                reads = "tensor"
            # Two seeds are compared once.
            if trials.drew_random or (magnitudes is _GRADIENT_MAGNITUDES[0] and trials.depends_on_seed()):
                return "model", True
            if reads == "model":
                return reads, False
        largest = max(self.group_options, key=lambda name: self.placeholders[name].numel(), default=None)
        if largest is not None:
            sides = (_LARGEST_SIDE, _LARGEST_SIDE)
            large[largest] = _cap_shape(self.placeholders[largest].shape, sides, _LARGE_VECTOR_SIZE)
        if reads != "element" or all(small[name] == large[name] for name in self.group_options):
            return reads, False
        try:
            is_elementwise = self.start_trials(large, _SHORT_RUN_MAGNITUDES).is_elementwise()
        except _TrialFailedError:
            return "model", False
        return "element" if is_elementwise else "tensor", False

    def start_trials(self, shapes: Shapes, magnitudes: Sequence[float]) -> _OptimizerTrials:
        """Trials over these shapes; without missing gradients or counter jumps where the optimizer does not take them."""
        names_by_kind: dict[object, list[str]] = {}
        for name in filter(self.group_options.__contains__, shapes):
            names_by_kind.setdefault((self.group_options[name], shapes[name]), []).append(name)
        max_alike = _MAX_ALIKE_LARGE if magnitudes is _SHORT_RUN_MAGNITUDES else _MAX_ALIKE_SMALL
        selected = {name for names in names_by_kind.values() for name in (*names[: max_alike - 1], names[-1])}
        trained_names = [name for name in shapes if name in selected]
        for has_missing_gradients in (True, False):
            with suppress(_TrialFailedError):
                return _OptimizerTrials(self, shapes, trained_names, magnitudes, has_missing_gradients)
        return _OptimizerTrials(self, shapes, trained_names, magnitudes, False, has_counter_jumps=False)


def _cap_shape(shape: Sequence[int], sides: Sequence[int], vector_size: int = 0) -> tuple[int, ...]:
    if len(shape) == 1 and vector_size:
        return (min(shape[0], vector_size),)
    return tuple(min(size, sides[dim] if dim < len(sides) else _OTHER_SIDE) for dim, size in enumerate(shape))


def _group_options(placeholders: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, str]:
    names = {id(value): name for name, value in placeholders.items()}
    return {
        names[id(value)]: repr([group.get(key) for key in optimizer.defaults if key != "lr"])
        for group in optimizer.param_groups
        for value in group["params"]
        if id(value) in names
    }


def _select_part(value: Tensor, part: str, index: int) -> Tensor:
    """Part of the parameter number `index`: along its first, its last or in turns another dim; empty: all of it."""
    dims = [dim for dim, size in enumerate(value.shape) if size > 1]
    if not part or not dims:
        return value
    dim = {"first": dims[0], "last": dims[-1], "turns": dims[index % len(dims)]}[part]
    size = value.shape[dim]
    third = max(size // 3, 1)
    start, length = {"first": (0, (size + 1) // 2), "last": (size - third, third), "turns": (1, size - 1)}[part]
    return value.narrow(dim, start, length)


@dataclass(slots=True)
class _OptimizerTrials:
    """Trial runs of an optimizer over parameters of these shapes, compared with a first one."""

    subject: _Subject
    shapes: Shapes
    trained_names: list[str]  #: in the model's order
    magnitudes: Sequence[float]
    has_missing_gradients: bool
    has_counter_jumps: bool = True
    indices: dict[str, int] = field(default_factory=dict)
    initial_values: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    rescale_offsets: dict[str, Tensor] = field(default_factory=dict)
    drew_random: bool = False
    replaced_storage: bool = False  #: whether a step replaced a parameter's memory (`p.data = ...`)
    baseline: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(name: str) -> Tensor:
            return torch.randn(self.shapes[name], generator=generator, dtype=torch.float64)

        self.indices = {name: index for index, name in enumerate(self.trained_names)}
        for name, shape in self.shapes.items():
            if name in self.indices:
                self.initial_values[name] = draw(name) * 10.0 ** (self.indices[name] % 3 - 1)
            else:  # only the job's function sees it: a shape without memory
                self.initial_values[name] = torch.zeros((), dtype=torch.float64).expand(shape)
        self.rescale_offsets = {name: 3.0 * draw(name) for name in self.trained_names}
        # Gradients of successive steps are correlated, as in training: some optimizers estimate their rate from that.
        common = {name: draw(name) for name in self.trained_names}
        for magnitude in self.magnitudes:
            self.gradients.append({name: magnitude * (common[name] + draw(name)) for name in self.trained_names})
        for name in self.trained_names[::2]:
            self.gradients[-1][name].zero_()
        self.baseline = self.run("", self.trained_names, seed=0)

    def reads_other_parameters(self) -> bool:
        """Whether an update reads other parameters."""
        subsets = (self.trained_names[::2], self.trained_names[1::2][::-1]) if len(self.trained_names) > 1 else ()
        return not all(self.matches_baseline("", names) for names in subsets)

    def is_elementwise(self) -> bool:
        """Whether parts of parameters train as they do in the full ones."""
        return not self.replaced_storage and all(self.matches_baseline(part, self.trained_names) for part in _PARTS)

    def depends_on_seed(self) -> bool:
        """Whether another seed trains to other values."""
        return not self.matches_baseline("", self.trained_names, seed=1)

    def matches_baseline(self, part: str, names: Sequence[str], seed: int = 0) -> bool:
        """Whether parameters train as they do in full and among all."""
        try:
            results = self.run(part, names, seed)
        except _TrialFailedError:
            return False
        return all(
            _are_close(values[name], _select_part(baseline[name], part, self.indices[name]))
            for values, baseline in zip(results, self.baseline, strict=True)
            for name in names
        )

    def run(self, part: str, names: Sequence[str], seed: int) -> list[dict[str, Tensor]]:
        """The values of `names` after each step."""
        indices, values = self.indices, dict[str, nn.Parameter]()
        for name, value in self.initial_values.items():
            selected = _select_part(value, part, indices.get(name, 0))
            values[name] = nn.Parameter(selected.clone() if name in indices else selected)
        seed_all(seed)
        try:
            optimizers = make_trial_optimizers(self.subject.job, values)
        except Exception as error:
            raise _TrialFailedError(describe_error(error)) from error
        if len(optimizers) != self.subject.num_optimizers:
            raise _TrialFailedError("optimizer= returns another number of optimizers for small parameters")
        optimizer = optimizers[self.subject.index]
        _restrict_to_parameters(optimizer, [values[name] for name in names])
        jumps = _SHORT_RUN_COUNTER_JUMPS if self.magnitudes is _SHORT_RUN_MAGNITUDES else _COUNTER_JUMPS
        counters, results = _StepCounters(optimizer), []
        states = torch.get_rng_state(), read_host_random_state()
        pointers = {name: values[name].data_ptr() for name in names}
        for step, gradients in enumerate(self.gradients):
            counters.advance(jumps.get(step, 0) if self.has_counter_jumps else 0)
            for name in names:
                value, index = values[name], indices[name]
                if step == _RESCALE_STEP:
                    with torch.no_grad():
                        value.add_(_select_part(self.rescale_offsets[name], part, index))
                is_missing = self.has_missing_gradients and step == _MISSING_GRADIENT_STEP and index % 3 == 1
                value.grad = None if is_missing else _select_part(gradients[name], part, index).clone()
            try:
                optimizer.step()
            except Exception as error:  # it needs more than gradients, or another device
                raise _TrialFailedError(describe_error(error)) from error
            counters.record_step()
            results.append({name: values[name].detach().clone() for name in names})
        self.replaced_storage |= any(values[name].data_ptr() != pointer for name, pointer in pointers.items())
        self.drew_random |= not torch.equal(states[0], torch.get_rng_state()) or states[1] != read_host_random_state()
        return results


def _restrict_to_parameters(optimizer: Optimizer, values: Sequence[nn.Parameter]) -> None:
    order = {id(value): index for index, value in enumerate(values)}
    disable_device_kernels(optimizer)
    for group in optimizer.param_groups:
        group["params"] = sorted((p for p in group["params"] if id(p) in order), key=lambda p: order[id(p)])
        if group.get("lr") == 0:
            group["lr"] = 1e-3  # a schedule raises it


def disable_device_kernels(optimizer: Optimizer) -> None:
    """Turn off kernels for accelerators; the others compute the same."""
    for group in optimizer.param_groups:
        for option in ("fused", "capturable"):
            if group.get(option):
                group[option] = False


class _StepCounters:
    """The step counters in an optimizer's state, groups or attributes: numbers that grow by one at every step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._previous = self._read_numbers()
        self._counters: set[tuple[int, Any]] = set()

    def record_step(self) -> None:
        """Call after each step."""
        previous, self._previous = self._previous, self._read_numbers()
        self._counters |= {key for key, value in self._previous.items() if previous.get(key) == value - 1}

    def advance(self, steps: int) -> None:
        """Add `steps` to all counters."""
        if not steps:
            return
        for holder in self._iterate_holders():
            for key, value in list(holder.items()):
                if (id(holder), key) in self._counters:
                    if isinstance(value, Tensor):
                        with torch.no_grad():
                            value.add_(steps)
                    else:
                        holder[key] = value + steps
        self._previous = self._read_numbers()

    def _iterate_holders(self) -> Iterator[MutableMapping[Any, Any]]:
        yield vars(self._optimizer)
        yield from self._optimizer.param_groups
        yield self._optimizer.state
        yield from (entry for entry in self._optimizer.state.values() if isinstance(entry, dict))

    def _read_numbers(self) -> dict[tuple[int, Any], float]:
        numbers = {}
        for holder in self._iterate_holders():
            for key, value in holder.items():
                is_scalar = isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"
                if type(value) in (int, float):
                    numbers[id(holder), key] = float(value)
                elif is_scalar and not isinstance(value, nn.Parameter):
                    numbers[id(holder), key] = float(value.real if value.is_complex() else value)
        return numbers


def _are_close(actual: Tensor, expected: Tensor) -> bool:
    if not expected.numel():
        return True
    difference, magnitude = float((actual - expected).abs().max()), float(expected.abs().max())
    if difference == difference and magnitude < float("inf"):
        return difference <= _TOLERANCE * magnitude
    finite = expected[expected.isfinite()]
    magnitude = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(actual, expected, 0.0, _TOLERANCE * magnitude, equal_nan=True)
