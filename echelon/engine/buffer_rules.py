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
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.data.loader import Micro
from echelon.data.sample_digest import digest
from echelon.engine.buffer_sync import Place, writable
from echelon.engine.checkpoint.function_state import unchanged
from echelon.engine.precision import autocast
from echelon.errors import JobError, UnpartedState
from echelon.job import call_model
from echelon.tree import copy_tensors, tree_leaves, tree_map
from echelon.trials.determinism import Stillness
from echelon.trials.snapshot import Snapshot

if TYPE_CHECKING:
    from echelon.engine.run import Run

RULES = ("same", "mean", "sum", "max", "min")
_WORDS = {"same": "same", "mean": "mean", "sum": "sum", "max": "largest", "min": "least"}
#: Parameters above this size are not copied to see whether forward changes them.
_LARGEST = 2**28
#: How far, relative to the change, a rule may be off.
_CLOSE = 1e-3

_Values = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one tensor on one rank: the rules that hold, and, where a single sample cannot show them, a digest of what its call leaves."""

    rules: tuple[str, ...]
    digest: str = ""
    is_float: bool = False


def state_places(model: nn.Module, *, parameters: bool = True) -> dict[str, Place]:
    """Where state lies that forward may change: buffers but those of batch norms, and whole parameters."""
    found: dict[str, Place] = {}
    for path, module in model.named_modules():
        held: list[dict[str, Any]] = [] if isinstance(module, _BatchNorm) else [module._buffers]
        for slots in [*held, *([module._parameters] if parameters else [])]:
            slots = slots if isinstance(slots, dict) else dict(slots.items())  # TorchScript has a view of its own
            for key, value in slots.items():
                if value is not None and not value.is_meta and not isinstance(value, DTensor) and _has_numbers(value):
                    found[f"{path}.{key}" if path else key] = slots, key
    return found


def _has_numbers(value: Tensor) -> bool:
    return value.is_floating_point() or value.dtype in (torch.int16, torch.int32, torch.int64)


@torch.no_grad()
def find_rules(
    run: Run, micro: Micro, other: Micro, *, known: Mapping[str, str] | None = None, known_shapes: bool = False
) -> dict[str, str]:
    """By name, the rule of everything that a call of the model changes, and the declared ones. Every rank must call it.

    `other`: another micro-batch, for samples of one that has a single one. `known`: rules that were found before. `known_shapes`: steps have
    made all caches, so that what still gets another shape is state.
    """
    declared = _declared(run.model)
    small = sum(value.nbytes for value in run.model.parameters() if not isinstance(value, DTensor)) <= _LARGEST
    places = state_places(run.model, parameters=small)
    if not places:
        return {}
    shortened = {id(value) for value in run.assembly.shortened}
    places = {name: place for name, place in places.items() if id(place[0][place[1]]) not in shortened}
    held = {name: slots[key] for name, (slots, key) in places.items()}
    before = {name: value.clone() for name, value in held.items() if value is not None}
    seen = _tried(run, micro, other, places, before, known_shapes=known_shapes)
    verdicts: dict[str, list[_Seen]] = {}
    gathered = run.ranks.gather((set(before), seen))
    for name in set[str]().union(*(each for _, each in gathered)):
        # Where forward has not made it, no rule holds.
        verdicts[name] = [each.get(name, _Seen(())) for names, each in gathered if name in each or name not in names]
    known = known or {}
    found = {name: _agreed(run, name, each, declared, known.get(name)) for name, each in verdicts.items()}
    # Samples may be such that a call leaves it as it is.
    return dict(sorted(({name: rule for name, rule in declared.items() if name in before} | found).items()))


def _tried(
    run: Run, micro: Micro, other: Micro, places: Mapping[str, Place], before: _Values, *, known_shapes: bool
) -> dict[str, _Seen]:
    """The rules that hold for this rank's samples; none: no rule does."""
    resized: _Values = {}

    def after(batch: Any) -> _Values | None:
        """What a call leaves; None where the model cannot compute this part of a batch."""
        try:
            with autocast(run.precision, run.device):
                call_model(run.job, run.model, copy_tensors(batch))
        except Exception:  # an error of the whole batch is raised by the step itself
            return None
        finally:
            run.rest()
        values = {}
        for name, (slots, key) in places.items():
            value = slots[key] if key in slots else None  # noqa: SIM401 (torch.jit's slots have no get)
            if value is not None and value.shape == before[name].shape:
                values[name] = value.detach().clone()
                if not torch.equal(value, before[name]):  # a write would make it one that changes
                    writable((slots, key)).copy_(before[name])
            elif value is not None and known_shapes:
                resized[name] = value.detach().clone()
        return values

    count, batch, second = micro.samples, run.move(micro.batch), run.move(other.batch)
    fit = _fit_together(batch, second)
    # Of a single sample some layers have no statistics.
    cut = max(count // 3, min(2, count // 2))
    with unchanged(run.job, run.model), _undone(run.model), Stillness(random=True)():
        whole = after(batch)
        changed = whole is not None and any(not torch.equal(value, before[name]) for name, value in whole.items())
        found = {}
        if known_shapes and any(run.ranks.gather(bool(resized))):
            once = dict(resized)
            after(batch)  # a cache stays as it is now
            found = {name: _Seen(()) for name, value in once.items() if not torch.equal(value, resized[name])}
        if not any(run.ranks.gather(changed)):
            return found
        # Every rank calls as often, as calls may wait for other ranks.
        if count > 1:
            parts = [after(_slice(batch, count, 0, cut)), after(_slice(batch, count, cut, count))]
        else:
            parts = [after(batch), after(second)]
        if any(run.ranks.gather(count == 1)):
            joined = after(batch if count > 1 else _joined(batch, second if fit else batch))
            whole = whole if count > 1 else joined
    if whole is None or None in parts:
        return found
    weights = [0.5, 0.5] if count == 1 else [cut / count, 1 - cut / count]
    for name, value in whole.items():
        pieces = [part[name] for part in parts if part is not None and name in part]
        if len(pieces) < 2 or not any(not torch.equal(each, before[name]) for each in (value, *pieces)):
            continue
        rules = _fitting(before[name], value, pieces, weights)
        if count == 1 and not fit:
            rules = tuple(rule for rule in rules if rule == "same")
        found[name] = _Seen(
            rules,
            digest=digest(pieces[0]) if count == 1 and (other is micro or not fit) else "",
            is_float=value.is_floating_point(),
        )
    return found


def _fitting(before: Tensor, whole: Tensor, parts: list[Tensor], weights: list[float]) -> tuple[str, ...]:
    """The rules that hold, in the order of the table: parts that leave the same leave their mean as well."""
    if not whole.numel():
        return RULES
    rounding = (
        4 * torch.finfo(whole.dtype).eps * float(whole.abs().nan_to_num(posinf=0.0).max())
        if whole.is_floating_point()
        else 0.0
    )
    before, whole, first, second = (each.double() for each in (before, whole, *parts))
    candidates = {
        "same": first if torch.equal(first, second) else None,
        "mean": weights[0] * first + weights[1] * second,
        "sum": first + second - before,
        "max": torch.maximum(first, second),
        "min": torch.minimum(first, second),
    }
    # An observer of ranges starts at infinity.
    start = torch.where(before.isfinite(), before, 0.0)
    size = max(float((each - start).abs().max()) for each in (whole, first, second)) or 1.0
    errors = {
        rule: float((value - whole).abs().nan_to_num(nan=math.inf).max()) / size
        for rule, value in candidates.items()
        if value is not None
    }
    best, least = min(errors.values()), rounding / size
    return (
        tuple(rule for rule, error in errors.items() if error <= max(10 * best + 1e-9, least))
        if best <= max(_CLOSE, least)
        else ()
    )


def _agreed(run: Run, name: str, found: Sequence[_Seen], declared: Mapping[str, str], known: str | None) -> str:
    if name in declared:
        return declared[name]
    shown = [seen for seen in found if not seen.digest]
    rules = [rule for rule in RULES if all(rule in seen.rules for seen in shown or found)]
    if not shown and len({seen.digest for seen in found}) > 1:
        rules = []
    if known is not None and known in rules:
        return known
    if found[0].is_float and ("max" in rules or "min" in rules):
        # A sum looks alike where one part alone changes it; counters are mostly whole numbers.
        rules = [rule for rule in rules if rule != "sum"]
    trained = name in dict(run.model.named_parameters())
    if trained and rules[:1] != ["same"]:
        raise UnpartedState(
            f"parameter {name}: forward itself changes it by this rank's samples (an initialization by the first batch, a Python flag), so that ranks "
            "or micro-batches come apart; initialize it before training, or use one process without micro-batches (dp=1)",
            tensor=name,
            cause="forward writes to a parameter",
        )
    if rules and known not in (None, "same"):
        raise UnpartedState(
            f"buffer {name}: what a call leaves in it for a batch was the {_WORDS[known]} of what calls leave for its parts at first, and is the "
            f"{_WORDS[rules[0]]} now, so that ranks or micro-batches cannot keep it as one device does; declare the rule that holds in its module "
            f"(buffer_reductions = {{{name.rpartition('.')[2]!r}: {rules[0]!r}}}), or use one process without micro-batches (dp=1)",
            tensor=name,
            cause="a buffer whose reduction changes",
        )
    if not rules:
        raise UnpartedState(
            f"buffer {name}: what a call leaves in it for a batch is neither the same, the mean, the sum, the largest nor the least of what calls leave "
            "for its parts (a queue, a codebook by moving sums), so that ranks or micro-batches cannot keep it as one device does; declare a rule in its "
            f"module (buffer_reductions = {{{name.rpartition('.')[2]!r}: 'mean'}}; one of {', '.join(RULES)}), add it up over ranks in forward, or use one process "
            "without micro-batches (dp=1)",
            tensor=name,
            cause="a buffer without a known reduction",
        )
    return rules[0]


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


def _joined(batch: Any, other: Any) -> Any:
    """Two collated batches of one sample each as one of two."""
    others = iter(tree_leaves(other))

    def join(leaf: Any) -> Any:
        second = next(others)
        is_sample = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == 1
        return torch.cat([leaf, second]) if is_sample else leaf

    return tree_map(join, batch)


def _fit_together(batch: Any, other: Any) -> bool:
    shapes = [[getattr(leaf, "shape", None) for leaf in tree_leaves(each)] for each in (batch, other)]
    return shapes[0] == shapes[1]


@contextlib.contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Have a model's modules as they were, afterwards: what they keep, and buffers."""
    held = Snapshot({"model": model}, without={id(value) for value in model.parameters()})
    try:
        yield
    finally:
        held.put_back()


class CallState:
    """State that calls change by a known rule, kept as one device keeps it that calls the model once a step.

    Every part of the batch finds the state as it was before the step. What the parts leave is put together by the rule, over micro-batches here and
    over ranks in the step's message.
    """

    news: Tensor | None = None

    def __init__(self, run: Run, rules: Mapping[str, str]) -> None:
        places = state_places(run.model)
        self._places = {name: places[name] for name in rules if name in places}
        #: What it keeps, by name.
        self.rules = {name: rules[name] for name in self._places}
        self._group = run._together
        self._before: _Values = {}
        self._left: _Values = {}
        self._device = run.device
        self._lengths = {
            name: self._tensor(name).numel() * (self._group.size if rule in ("max", "min") else 1)
            for name, rule in self.rules.items()
            if rule != "same"
        }
        self.size = sum(self._lengths.values())

    def _tensor(self, name: str) -> Tensor:
        return writable(self._places[name])

    @torch.no_grad()
    def begin(self) -> None:
        """Before the step's first forward."""
        self._before = {name: self._tensor(name).detach().clone() for name in self.rules}
        self._left = {}

    @torch.no_grad()
    def begin_part(self) -> None:
        """Before a later micro-batch's forward: the state as it was."""
        if self._left:
            for name, value in self._before.items():
                self._tensor(name).copy_(value)

    @torch.no_grad()
    def end_part(self, weight: float) -> None:
        """After a micro-batch's forward; `weight`: its part of the batch's samples."""
        for name, rule in self.rules.items():
            value = self._tensor(name).detach().to(torch.float64, copy=True)
            seen = self._left.get(name)
            if rule == "mean":
                value = value * weight
            elif rule == "sum":
                value = value - self._before[name].double()
            if seen is not None:
                value = {"max": torch.maximum, "min": torch.minimum, "same": lambda _, new: new}.get(rule, torch.add)(
                    seen, value
                )
            self._left[name] = value

    def share(self) -> Tensor:
        parts = [self._slots(name) for name in self._lengths]
        return (
            torch.cat([part.to(self._device) for part in parts])
            if parts
            else torch.zeros(0, device=self._device).double()
        )

    def _slots(self, name: str) -> Tensor:
        value = self._left[name].reshape(-1)
        if self.rules[name] not in ("max", "min"):
            return value
        slots = value.new_zeros(self._group.size, len(value))
        slots[self._group.rank] = value
        return slots.view(-1)

    @torch.no_grad()
    def set(self, sums: Tensor) -> None:
        for (name, _), part in zip(self._lengths.items(), sums.split(list(self._lengths.values())), strict=True):
            tensor, rule = self._tensor(name), self.rules[name]
            if rule in ("max", "min"):
                slots = part.view(self._group.size, -1)
                part = slots.amax(0) if rule == "max" else slots.amin(0)
            elif rule == "sum":
                part = part + self._before[name].double().reshape(-1).to(part)
            part = part if tensor.is_floating_point() else part.round()
            tensor.copy_(part.view_as(tensor))

    def settle(self) -> None:
        """Nothing comes late here."""
