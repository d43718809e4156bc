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
from echelon.plan.profile import Reads
from echelon.profiler.sample_coupling import first_line
from echelon.trials.random_state import outside_torch, random_states
from echelon.trials.trial_context import without_trace

#: Longest sides of stand-ins by dim, and of a second trial with larger ones: Google's Adafactor factors matrices whose sides are 128 or
#: longer, 8-bit Adam quantises parameters of 4096 elements or more.
_SIDES, _SIDE = (6, 5), 3
_LARGE, _LARGEST, _LONG = 136, 272, 4200
#: Gradient magnitudes of the steps, run by run: estimates that saturate under large gradients move under small ones.
_RUNS = (
    (1.0, 1e-2, 10.0, 1e-4, 1e3, 1.0, 0.1, 1.0, 1.0, 30.0, 1.0, 1.0),
    (0.05, 0.1, 0.05, 0.1, 0.2, 0.1, 0.1, 0.05, 0.1, 0.1, 0.1, 0.1),
    (1e-3, 2e-3, 1e-3, 2e-3, 1e-3, 1e-3, 1e-3, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3),
)
_FEW = (1.0, 1e2, 1e-3)
#: Before these steps counters jump ahead by so much; before `_SHAKE` parameters are rescaled; in `_MISSING` some have no gradient, in the
#: last step some have zeros (which makes some optimizers divide by zero, so nothing comes after it).
_JUMPS, _SHAKE, _MISSING = {8: 1_000, 10: 100_000}, 5, 10
#: Parameters of one shape and with the same options that are tried at most, small and large: more would show nothing new.
_ALIKE, _ALIKE_LARGE = 3, 1
#: How far results may lie apart that differ by the order of operations alone, relative to a tensor's largest value.
_TOLERANCE = 1e-10

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerClass:
    """What the trials found about one optimizer."""

    name: str
    reads: Reads
    draws: bool = False  #: whether its step draws random numbers
    untried: str = ""  #: why it could not be tried
    parameters: frozenset[str] = frozenset()  #: that it trains


class _UntriedError(Exception):
    """The optimizer cannot be tried like this."""


def made_for(job: Job, parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    """The job's optimizers over these, for trial steps: of other parameters that they hold (the loss's own) they get copies."""
    made = call_optimizer(job, list(parameters.items()))
    optimizers: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise JobError(f"optimizer= gives {type(optimizer).__name__}, not a torch optimizer or a list of them")
        _copy_others(optimizer, parameters)
    return optimizers


def _copy_others(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Have it hold copies of parameters that are not among `parameters`: a trial must not train the user's own."""
    given = {id(value) for value in parameters.values()}
    without_memory = all(value.is_meta for value in parameters.values())
    for group in optimizer.param_groups:
        for place, value in enumerate(group["params"]):
            if id(value) in given:
                continue
            copied = torch.empty_like(value, device="meta") if without_memory else value.detach().clone()
            mine = nn.Parameter(copied, requires_grad=value.requires_grad)
            group["params"][place] = mine
            if value in optimizer.state:
                optimizer.state[mine] = optimizer.state.pop(value)


def meta_parameters(parameters: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Stand-ins without memory."""
    return {
        name: nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=value.is_floating_point() or value.is_complex())
        for name, value in parameters.items()
    }  # fmt: skip


#: By the job's function: what it made last, and the classes of that. A proof and the run that follows it ask for the same.
_TRIED: MutableMapping[Any, tuple[Any, tuple[OptimizerClass, ...]]] = WeakKeyDictionary()


def classify(job: Job, parameters: Mapping[str, Tensor]) -> tuple[OptimizerClass, ...]:
    """The class of each of the job's optimizers; `parameters`: the trainable ones, on any device."""
    with without_trace(job):
        return _classify(job, parameters)


def _classify(job: Job, parameters: Mapping[str, Tensor]) -> tuple[OptimizerClass, ...]:
    standins = meta_parameters(parameters)
    try:
        made = made_for(job, standins)
    except EchelonError:
        raise
    except Exception as error:  # a function that looks at values
        why = _reason(error)
        return (
            OptimizerClass(name="the optimizer", reads="model", draws=True, untried=why, parameters=frozenset(parameters)),
        )  # fmt: skip
    shapes = {name: (value.shape, value.dtype) for name, value in parameters.items()}
    key = shapes, [(type(each), _options(standins, made, place)) for place, each in enumerate(made)]
    try:
        known, found = _TRIED.get(job.optimizer, (None, ()))
    except TypeError:  # an object of the user's that is not hashable
        return classes(job, standins, made)
    if known != key:
        found = classes(job, standins, made)
        _TRIED[job.optimizer] = key, found
    return found


def classes(job: Job, standins: Mapping[str, nn.Parameter], made: Sequence[Optimizer]) -> tuple[OptimizerClass, ...]:
    """The same for optimizers that were made over stand-ins on the meta device."""
    names = {id(value): name for name, value in standins.items()}
    found = []
    with random_states():
        for place, optimizer in enumerate(made):
            held = [names[id(v)] for group in optimizer.param_groups for v in group["params"] if id(v) in names]
            try:
                reads, draws = _tried(job, standins, made, place)
                untried = ""
            except _UntriedError as error:
                reads, draws, untried = "model", True, str(error)
            found.append(
                OptimizerClass(
                    name=type(optimizer).__name__, reads=reads, draws=draws, untried=untried, parameters=frozenset(held)
                )
            )
    return tuple(found)


def _tried(job: Job, standins: Mapping[str, nn.Parameter], made: Sequence[Optimizer], place: int) -> tuple[Reads, bool]:
    """What the optimizer at `place` reads, and whether it draws."""
    options = _options(standins, made, place)
    small = {name: _capped(value.shape, _SIDES, _SIDE) for name, value in standins.items()}
    large = {name: _capped(value.shape, (_LARGE, _LARGE), _SIDE, _LONG) for name, value in standins.items()}
    reads: Reads = "element"
    for magnitudes in _RUNS:
        try:
            battery = _begun(job, small, options, len(made), place, magnitudes)
        except _UntriedError:
            # A function that chooses by size may give small parameters to other optimizers, or to none.
            battery = _begun(job, large, options, len(made), place, magnitudes)
        if battery.across():
            reads = "model"
        elif reads == "element" and not battery.by_element():
            reads = "tensor"
        # Once is enough for two seeds to show.
        if battery.drew or (magnitudes is _RUNS[0] and battery.random()):
            return "model", True
        if reads == "model":
            return reads, False
    if reads != "element":
        return reads, False
    largest = max(options, key=lambda name: standins[name].numel(), default=None)
    if largest is not None:
        large[largest] = _capped(standins[largest].shape, (_LARGEST, _LARGEST), _SIDE, _LONG)
    if all(small[name] == large[name] for name in options):
        return reads, False
    try:
        return "element" if _begun(job, large, options, len(made), place, _FEW).by_element() else "tensor", False
    except _UntriedError:
        return "model", False


def _capped(shape: Sequence[int], sides: Sequence[int], side: int, alone: int = 0) -> tuple[int, ...]:
    if len(shape) == 1 and alone:
        return (min(shape[0], alone),)
    return tuple(min(size, sides[dim] if dim < len(sides) else side) for dim, size in enumerate(shape))


def _options(standins: Mapping[str, Tensor], made: Sequence[Optimizer], place: int) -> dict[str, str]:
    """What each parameter of the optimizer at `place` is trained with, learning rates aside."""
    names, optimizer = {id(value): name for name, value in standins.items()}, made[place]
    return {
        names[id(value)]: repr([group.get(key) for key in optimizer.defaults if key != "lr"])
        for group in optimizer.param_groups
        for value in group["params"]
        if id(value) in names
    }


@dataclass(frozen=True, slots=True)
class _Extent:
    """Which part of each parameter a run trains: along the first, the last or by turns another dim."""

    which: str = ""  #: "first", "last", "turns"; empty: all of it

    def of(self, value: Tensor, turn: int) -> Tensor:
        dims = [dim for dim, size in enumerate(value.shape) if size > 1]
        if not self.which or not dims:
            return value
        if self.which == "first":
            dim, start, length = dims[0], 0, (value.shape[dims[0]] + 1) // 2
        elif self.which == "last":
            dim, length = dims[-1], max(value.shape[dims[-1]] // 3, 1)
            start = value.shape[dim] - length
        else:
            dim = dims[turn % len(dims)]
            start, length = 1, value.shape[dim] - 1
        return value.narrow(dim, start, length)


@dataclass(slots=True)
class _Battery:
    """Trial runs of the optimizer at `place` over parameters of these shapes."""

    job: Job
    shapes: Shapes
    kept: list[str]  #: that are trained, in the model's order
    count: int  #: of the job's optimizers
    place: int
    magnitudes: Sequence[float]
    missing: bool = True  #: whether some gradients are missing in one step
    jumps: bool = True
    start: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    shake: dict[str, Tensor] = field(default_factory=dict)
    drew: bool = False
    moved: bool = (
        False  #: whether a step gave a parameter other memory (`p.data = ...`), which a sharded one does not follow
    )
    base: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbers = torch.Generator().manual_seed(0)

        def normal(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=numbers, dtype=torch.float64)

        scales = {name: 10.0 ** (turn % 3 - 1) for turn, name in enumerate(self.kept)}
        self.start = {
            # Those that only the job's function sees have a shape and no memory.
            name: normal(shape) * scales[name] if name in scales else torch.zeros((), dtype=torch.float64).expand(shape)
            for name, shape in self.shapes.items()
        }
        self.shake = {name: 3.0 * normal(self.shapes[name]) for name in self.kept}
        # Gradients of successive steps have a part in common, as in training: some optimizers estimate their rate from that.
        common = {name: normal(self.shapes[name]) for name in self.kept}
        for size in self.magnitudes:
            self.gradients.append({name: size * (common[name] + normal(self.shapes[name])) for name in self.kept})
        for name in self.kept[::2]:
            self.gradients[-1][name].zero_()

    def begin(self) -> None:
        self.base = self.run(_Extent(), self.kept, seed=0)

    def across(self) -> bool:
        """Whether an update reads other parameters."""
        some = (self.kept[::2], self.kept[1::2][::-1]) if len(self.kept) > 1 else ()
        return not all(self.same(_Extent(), names) for names in some)

    def by_element(self) -> bool:
        """Whether parts of parameters train as they do in the whole."""
        if self.moved:
            return False
        return all(self.same(_Extent(which), self.kept) for which in ("first", "last", "turns"))

    def random(self) -> bool:
        """Whether another seed trains to other values."""
        return not self.same(_Extent(), self.kept, seed=1)

    def same(self, extent: _Extent, names: Sequence[str], seed: int = 0) -> bool:
        """Whether parameters train as they do whole and among all."""
        try:
            found = self.run(extent, names, seed)
        except _UntriedError:
            return False
        turns = {name: turn for turn, name in enumerate(self.kept)}
        return all(
            _close(values[name], extent.of(wholes[name], turns[name]))
            for values, wholes in zip(found, self.base, strict=True)
            for name in names
        )

    def run(self, extent: _Extent, names: Sequence[str], seed: int) -> list[dict[str, Tensor]]:
        """The values of `names` after each step."""
        turns = {name: turn for turn, name in enumerate(self.kept)}
        values = {
            name: nn.Parameter(part.clone() if name in turns else part)
            for name, value in self.start.items()
            for part in (extent.of(value, turns.get(name, 0)),)
        }
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        random.seed(seed)
        try:
            made = made_for(self.job, values)
        except Exception as error:
            raise _UntriedError(_reason(error)) from error
        if len(made) != self.count:
            raise _UntriedError("optimizer= gives another number of optimizers for small parameters")
        optimizer = made[self.place]
        _prepare(optimizer, [values[name] for name in names])
        counters, found = _Counters(optimizer), []
        before = torch.get_rng_state(), outside_torch()
        places = {name: values[name].data_ptr() for name in names}
        for step, gradients in enumerate(self.gradients):
            if self.jumps:
                counters.jump(_JUMPS.get(step, 0) if len(self.magnitudes) > len(_FEW) else 1_000 * (step == 2))
            for name in names:
                value, turn = values[name], turns[name]
                if step == _SHAKE:
                    with torch.no_grad():
                        value.add_(extent.of(self.shake[name], turn))
                absent = self.missing and step == _MISSING and turn % 3 == 1
                value.grad = None if absent else extent.of(gradients[name], turn).clone()
            try:
                optimizer.step()
            except Exception as error:  # it needs more than gradients, or another device
                raise _UntriedError(_reason(error)) from error
            counters.look()
            found.append({name: values[name].detach().clone() for name in names})
        self.moved |= any(values[name].data_ptr() != place for name, place in places.items())
        self.drew |= not torch.equal(before[0], torch.get_rng_state()) or before[1] != outside_torch()
        return found


def _begun(
    job: Job, shapes: Shapes, options: Mapping[str, str], count: int, place: int, magnitudes: Sequence[float]
) -> _Battery:  # fmt: skip
    """Runs over these shapes, the first of them made. Optimizers that take no missing gradient, or cannot count so far, go without."""
    alike: dict[object, list[str]] = {}
    for name in shapes:
        if name in options:
            alike.setdefault((options[name], shapes[name]), []).append(name)
    number = _ALIKE if len(magnitudes) > len(_FEW) else _ALIKE_LARGE
    some = {name for names in alike.values() for name in (*names[: number - 1], names[-1])}
    kept = [name for name in shapes if name in some]
    problem: _UntriedError | None = None
    for missing, jumps in ((True, True), (False, True), (False, False)):
        battery = _Battery(job, shapes, kept, count, place, magnitudes, missing, jumps)
        try:
            battery.begin()
        except _UntriedError as error:
            problem = error
            continue
        return battery
    assert problem is not None
    raise problem


def _prepare(optimizer: Optimizer, values: Sequence[nn.Parameter]) -> None:
    """Have it step on `values` alone, in their order, without the kernels of a device that is not here: they compute the same."""
    place = {id(value): at for at, value in enumerate(values)}
    plainly(optimizer)
    for group in optimizer.param_groups:
        group["params"] = sorted((v for v in group["params"] if id(v) in place), key=lambda v: place[id(v)])
        if group.get("lr") == 0:
            group["lr"] = 1e-3  # a schedule raises it


def plainly(optimizer: Optimizer) -> None:
    """Turn off the kernels of a device that is not here: they compute the same."""
    for group in optimizer.param_groups:
        for switch in ("fused", "capturable"):
            if group.get(switch):
                group[switch] = False


class _Counters:
    """The step counters that an optimizer keeps in its state, groups or attributes: what grew by one at every step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = dict(self._numbers())
        self._grown: dict[tuple[int, Any], int] = {}

    def look(self) -> None:
        """After a step."""
        now = dict(self._numbers())
        for key, value in now.items():
            if key in self._before and value == self._before[key] + 1:
                self._grown[key] = self._grown.get(key, 0) + 1
        self._before = now

    def jump(self, steps: int) -> None:
        """Count so many steps that were not made."""
        if not steps:
            return
        for holder in self._holders():
            for key, value in list(holder.items()):
                if self._grown.get((id(holder), key), 0) < 1:
                    continue
                if isinstance(value, Tensor):
                    with torch.no_grad():
                        value.add_(steps)
                else:
                    holder[key] = value + steps
        self._before = dict(self._numbers())

    def _holders(self) -> Iterator[MutableMapping[Any, Any]]:
        yield vars(self._optimizer)
        yield from self._optimizer.param_groups
        yield self._optimizer.state
        for entry in self._optimizer.state.values():
            if isinstance(entry, dict):
                yield entry

    def _numbers(self) -> Iterator[tuple[tuple[int, Any], float]]:
        for holder in self._holders():
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


def _close(one: Tensor, other: Tensor) -> bool:
    if not other.numel():
        return True
    apart, size = float((one - other).abs().max()), float(other.abs().max())
    if apart == apart and size < float("inf"):
        return apart <= _TOLERANCE * size
    finite = other[other.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, 0.0, _TOLERANCE * size, equal_nan=True)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
