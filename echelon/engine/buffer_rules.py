"""Find out by what rule forward changes a model's state, by splitting a batch.

One device calls the model once with the whole batch; ranks and micro-batches call it with parts of it. What the whole call leaves in a buffer
follows from what the parts leave by one of a few rules, or by none:

    same    calls leave the same, whatever the samples are        a counter of calls, spectral norm, a teacher's weights
    mean    the mean over samples of what the parts leave         a running mean, a centre
    sum     the parts' changes add up                             a counter of samples, a histogram
    max     the largest of what the parts leave, `min` alike      an observer of ranges

Before the first step each rank calls the model with a part of its first micro-batch, with the rest and with all of it, and looks which rule holds. A module
may declare rules instead: `buffer_reductions = {"queue": "same"}`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.data.loader import Micro
from echelon.engine.buffers import Place
from echelon.engine.function_state import unchanged
from echelon.engine.precision import autocast
from echelon.errors import DivergenceError, JobError, UnpartedState
from echelon.job import call_model
from echelon.profiler.snapshot import Snapshot
from echelon.profiler.still import Stillness
from echelon.tree import copy_tensors, tree_map

if TYPE_CHECKING:
    from echelon.engine.run import Run

RULES = ("same", "mean", "sum", "max", "min")
#: Parameters above this size are not copied to see whether forward changes them.
_LARGEST = 2**28
#: How far, relative to the change, a rule may be off.
_CLOSE = 1e-3

_Values = dict[str, Tensor]


def state_places(model: nn.Module, *, parameters: bool = True) -> dict[str, Place]:
    """Where state lies that forward may change: buffers but those of batch norms, also such as forward is yet to make (None), and whole
    parameters."""
    found: dict[str, Place] = {}
    for path, module in model.named_modules():
        held: list[dict[str, Any]] = [] if isinstance(module, _BatchNorm) else [module._buffers]
        for slots in [*held, *([module._parameters] if parameters else [])]:
            slots = slots if isinstance(slots, dict) else dict(slots.items())  # TorchScript has a view of its own
            for key, value in slots.items():
                if slots is module._buffers if value is None else _is_state(value):
                    found[f"{path}.{key}" if path else key] = slots, key
    return found


def _is_state(value: Tensor) -> bool:
    has_numbers = value.is_floating_point() or value.dtype in (torch.int16, torch.int32, torch.int64)
    return has_numbers and not value.is_meta and not isinstance(value, DTensor)


@dataclass(frozen=True, slots=True)
class Rule:
    """How what the parts of a batch leave in a tensor makes up what the whole batch leaves."""

    kind: str  #: one of `RULES`, or "unknown"
    shape: torch.Size
    made: bool = False  #: whether the call makes the tensor


@torch.no_grad()
def find_rules(run: Run, micro: Micro) -> dict[str, Rule]:
    """By name, the rule of everything that a call of the model changes, and the declared ones. Every rank must call it."""
    declared = _declared(run.model)
    small = sum(value.nbytes for value in run.model.parameters() if not isinstance(value, DTensor)) <= _LARGEST
    places = state_places(run.model, parameters=small)
    if not places:
        return {}
    shortened = {id(value) for value in run.assembly.shortened}
    places = {name: place for name, place in places.items() if id(place[0][place[1]]) not in shortened}
    before = {name: _clone(place) for name, place in places.items()}
    verdicts: dict[str, list[Rule]] = {}
    gathered = run.ranks.gather(_tried(run, micro, places, before))
    for each in gathered:
        for name, rule in each.items():
            verdicts.setdefault(name, []).append(rule)
    rules = {name: _agreed(run, name, found, declared, len(gathered)) for name, found in verdicts.items()}
    for name, kind in declared.items():
        value = before.get(name)
        if value is not None:  # its samples may be such that a call leaves it as it is
            rules.setdefault(name, Rule(kind, value.shape))
    return dict(sorted(rules.items()))


def _clone(place: Place) -> Tensor | None:
    slots, key = place
    value = slots[key]
    return None if value is None else value.detach().clone()


def _tried(run: Run, micro: Micro, places: Mapping[str, Place], before: Mapping[str, Tensor | None]) -> dict[str, Rule]:
    """The rules as this rank's samples show them; "unknown" where none holds."""
    count = micro.samples
    batch = run.move(micro.batch)

    def after(start: int, stop: int) -> _Values | None:
        """What a call leaves; None where the model cannot compute this part of a batch."""
        part = batch if stop - start == count else _slice(batch, count, start, stop)
        try:
            with autocast(run.precision, run.device):
                call_model(run.job, run.model, copy_tensors(part))
        except Exception:  # an error of the whole batch is raised by the step itself
            return None
        finally:
            run.rest()
        values = {}
        for name, (slots, key) in places.items():
            value = slots[key] if key in slots else None  # noqa: SIM401 (torch.jit's slots have no get)
            start_value = before[name]
            if value is None or not _is_state(value):
                continue
            if start_value is None:
                values[name], slots[key] = value.detach().clone(), None
            elif value.shape == start_value.shape:
                values[name] = value.detach().clone()
                if not torch.equal(value, start_value):  # a write would make it one that changes
                    value.copy_(start_value)
        return values

    def is_changed(name: str, value: Tensor) -> bool:
        start_value = before[name]
        return start_value is None or not torch.equal(value, start_value)

    cut = max(count // 3, 1)
    with unchanged(run.job, run.model), _undone(run.model), Stillness(random=True)():
        whole = after(0, count)
        changed = whole is not None and any(is_changed(name, value) for name, value in whole.items())
        if not any(run.ranks.gather(changed)):
            return {}
        # Every rank calls as often, as calls may wait for other ranks.
        parts = [after(0, cut), after(cut, count)] if count > 1 else [after(0, count), after(0, count)]
    if whole is None or None in parts:
        return {}
    weights = [cut / count, 1 - cut / count] if count > 1 else [0.5, 0.5]
    found = {}
    for name, value in whole.items():
        pieces = [part[name] for part in parts if part is not None and name in part]
        if before[name] is None and len(pieces) < 2:
            found[name] = Rule("unknown", value.shape, made=True)
        elif len(pieces) == 2 and any(is_changed(name, each) for each in (value, *pieces)):
            start_value = before[name]
            if any(each.shape != value.shape for each in pieces):
                kind = "unknown"
            else:
                zero = torch.zeros_like(value) if start_value is None else start_value
                kind = _rule(zero.double(), value.double(), [each.double() for each in pieces], weights)
            found[name] = Rule(kind, value.shape, made=start_value is None)
    return found


def _rule(before: Tensor, whole: Tensor, parts: list[Tensor], weights: list[float]) -> str:
    first, second = parts
    candidates = {
        "same": first if torch.equal(first, second) else None,
        "mean": weights[0] * first + weights[1] * second,
        "sum": first + second - before,
        "max": torch.maximum(first, second),
        "min": torch.minimum(first, second),
    }
    size = max(float((each - before).abs().max()) for each in (whole, *parts)) or 1.0
    errors = {
        rule: float((value - whole).abs().max()) / size for rule, value in candidates.items() if value is not None
    }
    best = min(errors, key=errors.__getitem__)
    # In the order of the table: parts that leave the same leave their mean as well.
    return (
        next((rule for rule, error in errors.items() if error <= 10 * errors[best] + 1e-9), best)
        if errors[best] <= _CLOSE
        else "unknown"
    )


def _agreed(run: Run, name: str, found: Sequence[Rule], declared: Mapping[str, str], ranks: int) -> Rule:
    """`ranks`: how many have tried it."""
    first = found[0]
    kinds = {rule.kind for rule in found}
    if first.made and (len(found) < ranks or any(rule.shape != first.shape for rule in found)):
        kinds = {"unknown"}
    elif name in declared:
        return replace(first, kind=declared[name])
    changing = kinds - {"same"}
    trained = name in dict(run.model.named_parameters())
    if trained and changing:
        raise UnpartedState(
            f"parameter {name}: forward itself changes it by this rank's samples (an initialization by the first batch, a Python flag), so that ranks "
            "or micro-batches come apart; initialize it before training, or use one process without micro-batches (dp=1)",
            tensor=name,
            cause="forward writes to a parameter",
        )
    if len(changing) > 1 or "unknown" in changing:
        raise UnpartedState(
            f"buffer {name}: what a call leaves in it for a batch is neither the same, the mean, the sum, the largest nor the least of what calls leave "
            "for its parts (a queue, a codebook by moving sums), so that ranks or micro-batches cannot keep it as one device does; declare a rule in its "
            f"module (buffer_reductions = {{{name.rpartition('.')[2]!r}: 'mean'}}; one of {', '.join(RULES)}), add it up over ranks in forward, or use one process "
            "without micro-batches (dp=1)",
            tensor=name,
            cause="a buffer without a known reduction",
        )
    return replace(first, kind=next(iter(changing or kinds)))


def _declared(model: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        for key, rule in dict(getattr(module, "buffer_reductions", None) or {}).items():
            name = f"{path}.{key}" if path else key
            if rule not in RULES:
                raise JobError(
                    f"buffer_reductions of {path or 'the model'}: {key!r} is {rule!r}, not one of {', '.join(RULES)}"
                )
            found[name] = rule
    return found


def _slice(batch: Any, count: int, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of a collated batch."""

    def part(leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count else leaf

    return tree_map(part, batch)


@contextlib.contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Have a model's modules as they were, afterwards: what they keep, and buffers."""
    held = Snapshot({"model": model}, without={id(value) for value in model.parameters()})
    try:
        yield
    finally:
        held.put_back()


def late_state(name: str, step: int, what: str, kind: str = "mean") -> DivergenceError:
    """For a buffer that calls change from a later step on, when its rule was not known."""
    rule = f"buffer_reductions = {{{name.rpartition('.')[2]!r}: {kind!r}}}"
    return DivergenceError(
        f"step {step + 1}: buffer {name} has changed for the first time, and {what}; declare its rule in its module, {rule} (one of "
        f"{', '.join(RULES)}), or use one process without micro-batches (dp=1)",
        tensor=name,
        cause="a buffer without a known reduction",
    )


class CallState:
    """State that calls change by a known rule, kept as one device keeps it that calls the model once a step.

    Every part of the batch finds the state as it was before the step. What the parts leave is put together by the rule, over micro-batches here and
    over ranks in the step's message.
    """

    news: Tensor | None = None

    def __init__(self, run: Run, rules: Mapping[str, Rule]) -> None:
        places = state_places(run.model)
        self._places = {name: places[name] for name in rules if name in places}
        #: What it keeps, by name.
        self.rules = {name: rules[name] for name in self._places}
        self._rules = {name: rule.kind for name, rule in self.rules.items()}
        self._group = run._together
        self._before: dict[str, Tensor | None] = {}
        self._left: _Values = {}
        self._device = run.device
        self._lengths = {
            name: rules[name].shape.numel() * (self._group.size if rule in ("max", "min") else 1)
            for name, rule in self._rules.items()
            if rule != "same"
        }
        self.size = sum(self._lengths.values())

    def _tensor(self, name: str) -> Tensor:
        slots, key = self._places[name]
        value = slots[key]
        if value is None:
            raise DivergenceError(
                f"buffer {name}: forward makes it for some samples and not for others, so that ranks or micro-batches cannot keep it as one device "
                "does; make it in the module's constructor",
                tensor=name,
                cause="a buffer that forward makes for some samples only",
            )
        return value

    @torch.no_grad()
    def begin(self) -> None:
        """Before the step's first forward."""
        self._before = {name: _clone(place) for name, place in self._places.items()}
        self._left = {}

    @torch.no_grad()
    def begin_part(self) -> None:
        """Before a later micro-batch's forward: the state as it was."""
        if self._left:
            for name, value in self._before.items():
                if value is None:
                    slots, key = self._places[name]
                    slots[key] = None
                else:
                    self._tensor(name).copy_(value)

    @torch.no_grad()
    def end_part(self, weight: float) -> None:
        """After a micro-batch's forward; `weight`: its part of the batch's samples."""
        for name, rule in self._rules.items():
            value = self._tensor(name).detach().to(torch.float64, copy=True)
            seen = self._left.get(name)
            if rule == "mean":
                value = value * weight
            elif rule == "sum":
                value = value - self._start(name)
            if seen is not None:
                value = {"max": torch.maximum, "min": torch.minimum, "same": lambda _, new: new}.get(rule, torch.add)(
                    seen, value
                )
            self._left[name] = value

    def _start(self, name: str) -> Tensor:
        value = self._before[name]
        return torch.zeros_like(self._tensor(name), dtype=torch.float64) if value is None else value.double()

    def share(self) -> Tensor:
        parts = [self._slots(name) for name in self._lengths]
        return (
            torch.cat([part.to(self._device) for part in parts])
            if parts
            else torch.zeros(0, device=self._device).double()
        )

    def _slots(self, name: str) -> Tensor:
        value = self._left[name].reshape(-1)
        if self._rules[name] not in ("max", "min"):
            return value
        slots = value.new_zeros(self._group.size, len(value))
        slots[self._group.rank] = value
        return slots.view(-1)

    @torch.no_grad()
    def set(self, sums: Tensor) -> None:
        for (name, _), part in zip(self._lengths.items(), sums.split(list(self._lengths.values())), strict=True):
            tensor, rule = self._tensor(name), self._rules[name]
            if rule in ("max", "min"):
                slots = part.view(self._group.size, -1)
                part = slots.amax(0) if rule == "max" else slots.amin(0)
            elif rule == "sum":
                part = part + self._start(name).reshape(-1).to(part)
            part = part if tensor.is_floating_point() else part.round()
            tensor.copy_(part.view_as(tensor))

    def settle(self) -> None:
        """Nothing comes late here."""
