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

from echelon.data.loader import MicroBatch
from echelon.data.sample_digest import digest
from echelon.engine.buffers.buffer_sync import TensorSlot, make_writable
from echelon.engine.checkpoint.function_state import preserve_function_state
from echelon.engine.precision import autocast
from echelon.errors import JobError, UnshardableStateError
from echelon.job import call_model
from echelon.tree import copy_tensors, tree_leaves, tree_map
from echelon.trials.determinism import DeterministicMode
from echelon.trials.snapshot import Snapshot

if TYPE_CHECKING:
    from echelon.engine.run import Run

RULES = ("same", "mean", "sum", "max", "min")
_RULE_WORDS = {"same": "same", "mean": "mean", "sum": "sum", "max": "largest", "min": "least"}
#: Parameters above this size are not copied to see whether forward changes them.
_PARAMETER_COPY_LIMIT = 2**28
#: How far, relative to the change, a rule may be off.
_RULE_TOLERANCE = 1e-3

_TensorsByName = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Observation:
    """Of one tensor on one rank: the rules that hold, and, where a single sample cannot show them, a digest of what its call leaves."""

    rules: tuple[str, ...]
    digest: str = ""
    is_float: bool = False


def find_state_slots(model: nn.Module, *, include_parameters: bool = True) -> dict[str, TensorSlot]:
    """Where state lies that forward may change: buffers but those of batch norms, and whole parameters."""
    slots: dict[str, TensorSlot] = {}
    for path, module in model.named_modules():
        owners: list[dict[str, Any]] = [] if isinstance(module, _BatchNorm) else [module._buffers]
        for owner in [*owners, *([module._parameters] if include_parameters else [])]:
            owner = owner if isinstance(owner, dict) else dict(owner.items())  # TorchScript has a view of its own
            for key, tensor in owner.items():
                if (
                    tensor is not None
                    and not tensor.is_meta
                    and not isinstance(tensor, DTensor)
                    and _is_numeric(tensor)
                ):
                    slots[f"{path}.{key}" if path else key] = owner, key
    return slots


def _is_numeric(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype in (torch.int16, torch.int32, torch.int64)


@torch.no_grad()
def find_rules(
    run: Run,
    micro_batch: MicroBatch,
    other_micro_batch: MicroBatch,
    *,
    known_rules: Mapping[str, str] | None = None,
    caches_exist: bool = False,
) -> dict[str, str]:
    """By name, the rule of everything that a call of the model changes, and the declared ones. Every rank must call it.

    `other_micro_batch`: another micro-batch, for samples of one that has a single one. `known_rules`: rules that were found before. `caches_exist`: steps have
    made all caches, so that what still gets another shape is state.
    """
    declared_rules = _declared_rules(run.model)
    include_parameters = (
        sum(tensor.nbytes for tensor in run.model.parameters() if not isinstance(tensor, DTensor))
        <= _PARAMETER_COPY_LIMIT
    )
    slots = find_state_slots(run.model, include_parameters=include_parameters)
    if not slots:
        return {}
    max_norm_ids = {id(tensor) for tensor in run.rank_model.max_norm_weights}
    slots = {name: slot for name, slot in slots.items() if id(slot[0][slot[1]]) not in max_norm_ids}
    tensors = {name: owner[key] for name, (owner, key) in slots.items()}
    before = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    observed = _observe_rules(run, micro_batch, other_micro_batch, slots, before, caches_exist=caches_exist)
    observations: dict[str, list[_Observation]] = {}
    rank_observations = run.ranks.all_gather_object((set(before), observed))
    for name in set[str]().union(*(rank_observed for _, rank_observed in rank_observations)):
        # Where forward has not made it, no rule holds.
        observations[name] = [
            rank_observed.get(name, _Observation(()))
            for names, rank_observed in rank_observations
            if name in rank_observed or name not in names
        ]
    known_rules = known_rules or {}
    rules = {
        name: _choose_rule(run, name, rank_observed, declared_rules, known_rules.get(name))
        for name, rank_observed in observations.items()
    }
    # Samples may be such that a call leaves it as it is.
    return dict(sorted(({name: rule for name, rule in declared_rules.items() if name in before} | rules).items()))


def _observe_rules(
    run: Run,
    micro_batch: MicroBatch,
    other_micro_batch: MicroBatch,
    slots: Mapping[str, TensorSlot],
    before: _TensorsByName,
    *,
    caches_exist: bool,
) -> dict[str, _Observation]:
    """The rules that hold for this rank's samples; none: no rule does."""
    resized: _TensorsByName = {}

    def state_after(batch: Any) -> _TensorsByName | None:
        """What a call leaves; None where the model cannot compute this part of a batch."""
        try:
            with autocast(run.precision, run.device):
                call_model(run.job, run.model, copy_tensors(batch))
        except Exception:  # an error of the whole batch is raised by the step itself
            return None
        finally:
            run.reshard()
        values = {}
        for name, (owner, key) in slots.items():
            value = owner[key] if key in owner else None  # noqa: SIM401 (torch.jit's slots have no get)
            if value is not None and value.shape == before[name].shape:
                values[name] = value.detach().clone()
                if not torch.equal(value, before[name]):  # a write would make it one that changes
                    make_writable((owner, key)).copy_(before[name])
            elif value is not None and caches_exist:
                resized[name] = value.detach().clone()
        return values

    sample_count, batch, other_batch = (
        micro_batch.samples,
        run.move(micro_batch.batch),
        run.move(other_micro_batch.batch),
    )
    can_concatenate = _have_same_shapes(batch, other_batch)
    # Of a single sample some layers have no statistics.
    split_at = max(sample_count // 3, min(2, sample_count // 2))
    with preserve_function_state(run.job, run.model), _restore_modules(run.model), DeterministicMode(fix_random=True)():
        whole_state = state_after(batch)
        changed = whole_state is not None and any(
            not torch.equal(value, before[name]) for name, value in whole_state.items()
        )
        observations = {}
        if caches_exist and any(run.ranks.all_gather_object(bool(resized))):
            first_resized = dict(resized)
            state_after(batch)  # a cache stays as it is now
            observations = {
                name: _Observation(()) for name, value in first_resized.items() if not torch.equal(value, resized[name])
            }
        if not any(run.ranks.all_gather_object(changed)):
            return observations
        # Every rank calls as often, as calls may wait for other ranks.
        if sample_count > 1:
            part_states = [
                state_after(_slice_samples(batch, sample_count, 0, split_at)),
                state_after(_slice_samples(batch, sample_count, split_at, sample_count)),
            ]
        else:
            part_states = [state_after(batch), state_after(other_batch)]
        if any(run.ranks.all_gather_object(sample_count == 1)):
            joined_state = state_after(
                batch if sample_count > 1 else _concatenate_samples(batch, other_batch if can_concatenate else batch)
            )
            whole_state = whole_state if sample_count > 1 else joined_state
    if whole_state is None or None in part_states:
        return observations
    weights = [0.5, 0.5] if sample_count == 1 else [split_at / sample_count, 1 - split_at / sample_count]
    for name, value in whole_state.items():
        part_values = [part_state[name] for part_state in part_states if part_state is not None and name in part_state]
        if len(part_values) < 2 or not any(not torch.equal(tensor, before[name]) for tensor in (value, *part_values)):
            continue
        rules = _matching_rules(before[name], value, part_values, weights)
        if sample_count == 1 and not can_concatenate:
            rules = tuple(rule for rule in rules if rule == "same")
        observations[name] = _Observation(
            rules,
            digest=digest(part_values[0])
            if sample_count == 1 and (other_micro_batch is micro_batch or not can_concatenate)
            else "",
            is_float=value.is_floating_point(),
        )
    return observations


def _matching_rules(
    before: Tensor, whole_value: Tensor, part_values: list[Tensor], weights: list[float]
) -> tuple[str, ...]:
    """The rules that hold, in the order of the table: parts that leave the same leave their mean as well."""
    if not whole_value.numel():
        return RULES
    rounding_error = (
        4 * torch.finfo(whole_value.dtype).eps * float(whole_value.abs().nan_to_num(posinf=0.0).max())
        if whole_value.is_floating_point()
        else 0.0
    )
    before, whole_value, first, second = (tensor.double() for tensor in (before, whole_value, *part_values))
    candidates = {
        "same": first if torch.equal(first, second) else None,
        "mean": weights[0] * first + weights[1] * second,
        "sum": first + second - before,
        "max": torch.maximum(first, second),
        "min": torch.minimum(first, second),
    }
    # An observer of ranges starts at infinity.
    finite_before = torch.where(before.isfinite(), before, 0.0)
    largest_change = max(float((tensor - finite_before).abs().max()) for tensor in (whole_value, first, second)) or 1.0
    errors = {
        rule: float((value - whole_value).abs().nan_to_num(nan=math.inf).max()) / largest_change
        for rule, value in candidates.items()
        if value is not None
    }
    best_error, rounding_floor = min(errors.values()), rounding_error / largest_change
    return (
        tuple(rule for rule, error in errors.items() if error <= max(10 * best_error + 1e-9, rounding_floor))
        if best_error <= max(_RULE_TOLERANCE, rounding_floor)
        else ()
    )


def _choose_rule(
    run: Run, name: str, observations: Sequence[_Observation], declared_rules: Mapping[str, str], known_rule: str | None
) -> str:
    if name in declared_rules:
        return declared_rules[name]
    conclusive = [observation for observation in observations if not observation.digest]
    rules = [rule for rule in RULES if all(rule in observation.rules for observation in conclusive or observations)]
    if not conclusive and len({observation.digest for observation in observations}) > 1:
        rules = []
    if known_rule is not None and known_rule in rules:
        return known_rule
    if observations[0].is_float and ("max" in rules or "min" in rules):
        # A sum looks alike where one part alone changes it; counters are mostly whole numbers.
        rules = [rule for rule in rules if rule != "sum"]
    is_trained = name in dict(run.model.named_parameters())
    if is_trained and rules[:1] != ["same"]:
        raise UnshardableStateError(
            f"parameter {name}: forward itself changes it by this rank's samples (an initialization by the first batch, a Python flag), so that ranks "
            "or micro-batches come apart; initialize it before training, or use one process without micro-batches (dp=1)",
            tensor=name,
            cause="forward writes to a parameter",
        )
    if rules and known_rule not in (None, "same"):
        raise UnshardableStateError(
            f"buffer {name}: what a call leaves in it for a batch was the {_RULE_WORDS[known_rule]} of what calls leave for its parts at first, and is the "
            f"{_RULE_WORDS[rules[0]]} now, so that ranks or micro-batches cannot keep it as one device does; declare the rule that holds in its module "
            f"(buffer_reductions = {{{name.rpartition('.')[2]!r}: {rules[0]!r}}}), or use one process without micro-batches (dp=1)",
            tensor=name,
            cause="a buffer whose reduction changes",
        )
    if not rules:
        raise UnshardableStateError(
            f"buffer {name}: what a call leaves in it for a batch is neither the same, the mean, the sum, the largest nor the least of what calls leave "
            "for its parts (a queue, a codebook by moving sums), so that ranks or micro-batches cannot keep it as one device does; declare a rule in its "
            f"module (buffer_reductions = {{{name.rpartition('.')[2]!r}: 'mean'}}; one of {', '.join(RULES)}), add it up over ranks in forward, or use one process "
            "without micro-batches (dp=1)",
            tensor=name,
            cause="a buffer without a known reduction",
        )
    return rules[0]


def _declared_rules(model: nn.Module) -> dict[str, str]:
    rules: dict[str, str] = {}
    for path, module in model.named_modules():
        for key, rule in dict(getattr(module, "buffer_reductions", None) or {}).items():
            name = f"{path}.{key}" if path else key
            if rule not in RULES:
                raise JobError(
                    f"buffer_reductions of {path or 'the model'}: {key!r} is {rule!r}, not one of {', '.join(RULES)}"
                )
            rules[name] = rule
    return rules


def _slice_samples(batch: Any, sample_count: int, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of a collated batch."""

    def slice_leaf(leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == sample_count else leaf

    return tree_map(slice_leaf, batch)


def _concatenate_samples(batch: Any, other_batch: Any) -> Any:
    """Two collated batches of one sample each as one of two."""
    other_leaves = iter(tree_leaves(other_batch))

    def concatenate_leaf(leaf: Any) -> Any:
        other_leaf = next(other_leaves)
        is_sample = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == 1
        return torch.cat([leaf, other_leaf]) if is_sample else leaf

    return tree_map(concatenate_leaf, batch)


def _have_same_shapes(batch: Any, other_batch: Any) -> bool:
    shapes = [[getattr(leaf, "shape", None) for leaf in tree_leaves(tree)] for tree in (batch, other_batch)]
    return shapes[0] == shapes[1]


@contextlib.contextmanager
def _restore_modules(model: nn.Module) -> Iterator[None]:
    """Have a model's modules as they were, afterwards: what they keep, and buffers."""
    snapshot = Snapshot({"model": model}, excluded_ids={id(parameter) for parameter in model.parameters()})
    try:
        yield
    finally:
        snapshot.restore()


class ReducedState:
    """State that calls change by a known rule, kept as one device keeps it that calls the model once a step.

    Every part of the batch finds the state as it was before the step. What the parts leave is put together by the rule, over micro-batches here and
    over ranks in the step's message.
    """

    resync_flag: Tensor | None = None

    def __init__(self, run: Run, rules: Mapping[str, str]) -> None:
        slots = find_state_slots(run.model)
        self._slots = {name: slots[name] for name in rules if name in slots}
        #: What it keeps, by name.
        self.rules = {name: rules[name] for name in self._slots}
        self._communicator = run._reduction_ranks
        self._before: _TensorsByName = {}
        self._accumulated: _TensorsByName = {}
        self._device = run.device
        self._packed_numels = {
            name: self._tensor(name).numel() * (self._communicator.size if rule in ("max", "min") else 1)
            for name, rule in self.rules.items()
            if rule != "same"
        }
        self.size = sum(self._packed_numels.values())

    def _tensor(self, name: str) -> Tensor:
        return make_writable(self._slots[name])

    @torch.no_grad()
    def begin_step(self) -> None:
        """Before the step's first forward."""
        self._before = {name: self._tensor(name).detach().clone() for name in self.rules}
        self._accumulated = {}

    @torch.no_grad()
    def begin_micro_batch(self) -> None:
        """Before a later micro-batch's forward: the state as it was."""
        if self._accumulated:
            for name, value in self._before.items():
                self._tensor(name).copy_(value)

    @torch.no_grad()
    def end_micro_batch(self, sample_fraction: float) -> None:
        """After a micro-batch's forward; `sample_fraction`: its part of the batch's samples."""
        for name, rule in self.rules.items():
            value = self._tensor(name).detach().to(torch.float64, copy=True)
            accumulated = self._accumulated.get(name)
            if rule == "mean":
                value = value * sample_fraction
            elif rule == "sum":
                value = value - self._before[name].double()
            if accumulated is not None:
                value = {
                    "max": torch.maximum,
                    "min": torch.minimum,
                    "same": lambda _, value_of_call: value_of_call,
                }.get(rule, torch.add)(accumulated, value)
            self._accumulated[name] = value

    def pack(self) -> Tensor:
        packed_values = [self._packed_value(name) for name in self._packed_numels]
        return (
            torch.cat([packed_value.to(self._device) for packed_value in packed_values])
            if packed_values
            else torch.zeros(0, device=self._device).double()
        )

    def _packed_value(self, name: str) -> Tensor:
        value = self._accumulated[name].reshape(-1)
        if self.rules[name] not in ("max", "min"):
            return value
        rank_values = value.new_zeros(self._communicator.size, len(value))
        rank_values[self._communicator.rank] = value
        return rank_values.view(-1)

    @torch.no_grad()
    def unpack(self, sums: Tensor) -> None:
        for (name, _), value in zip(
            self._packed_numels.items(), sums.split(list(self._packed_numels.values())), strict=True
        ):
            tensor, rule = self._tensor(name), self.rules[name]
            if rule in ("max", "min"):
                rank_values = value.view(self._communicator.size, -1)
                value = rank_values.amax(0) if rule == "max" else rank_values.amin(0)
            elif rule == "sum":
                value = value + self._before[name].double().reshape(-1).to(value)
            value = value if tensor.is_floating_point() else value.round()
            tensor.copy_(value.view_as(tensor))

    def resync(self) -> None:
        """Nothing comes late here."""
