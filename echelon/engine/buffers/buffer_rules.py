"""Find the rule by which forward changes a model's state: call it with a part of a batch, with the rest and with all of it, and compare.

The rules are those of reduced_state.py. A module may declare them instead: `buffer_reductions = {"queue": "same"}`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.data.loader import MicroBatch
from echelon.data.sample_digest import digest
from echelon.engine.buffers.reduced_state import RULES
from echelon.engine.buffers.slots import TensorSlot, find_state_slots, make_writable
from echelon.engine.checkpoint.function_state import preserve_function_state
from echelon.engine.precision import autocast
from echelon.engine.run_state import RunState
from echelon.errors import JobError, UnshardableStateError
from echelon.job import call_model
from echelon.tree import copy_tensors, map_tensors, tree_leaves, tree_map
from echelon.trials.determinism import DeterministicMode
from echelon.trials.snapshot import Snapshot

_RULE_WORDS = {"same": "same", "mean": "mean", "sum": "sum", "max": "largest", "min": "least"}
#: Parameters above this size are not copied to see whether forward changes them.
_PARAMETER_COPY_LIMIT = 2**28
#: How far, relative to the change, a rule may be off.
_RULE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class _Observation:
    """Of one tensor on one rank: the rules that hold, and, where a single sample cannot show them, a digest of what its call leaves."""

    rules: tuple[str, ...]
    digest: str = ""
    is_float: bool = False


@torch.no_grad()
def find_rules(
    run: RunState, batch: MicroBatch, other_batch: MicroBatch, *, known_rules: Mapping[str, str], caches_exist: bool
) -> dict[str, str]:
    """By name, the rule of everything that a call of the model changes, and the declared ones. Every rank must call it.

    `other_batch`: supplies a second sample where the first has one. `caches_exist`: steps have allocated all caches, so that what still changes
    its shape is state.
    """
    declared_rules = _declared_rules(run.model)
    parameter_bytes = sum(p.nbytes for p in run.model.parameters() if not isinstance(p, DTensor))
    slots = find_state_slots(run.model, include_parameters=parameter_bytes <= _PARAMETER_COPY_LIMIT)
    if not slots:
        return {}
    max_norm_ids = set(map(id, run.rank_model.max_norm_weights))
    slots = {name: slot for name, slot in slots.items() if id(slot.tensor) not in max_norm_ids}
    trial = _Trial(run, slots, caches_exist)
    rank_observations = run.ranks.all_gather_object((set(trial.before), trial.observe(batch, other_batch)))
    rules = {name: rule for name, rule in declared_rules.items() if name in trial.before}
    for name in sorted(set[str]().union(*(observed for _, observed in rank_observations))):
        # No rule holds for a tensor that forward has not created on some rank.
        has_result = [observed for names, observed in rank_observations if name in observed or name not in names]
        observations = [observed.get(name, _Observation(())) for observed in has_result]
        rules[name] = declared_rules.get(name) or _choose_rule(run, name, observations, known_rules.get(name))
    return dict(sorted(rules.items()))


class _Trial:
    """Calls of the model that leave no trace, and what each leaves in `slots`."""

    def __init__(self, run: RunState, slots: Mapping[str, TensorSlot], caches_exist: bool) -> None:
        self._run, self._slots, self._caches_exist = run, slots, caches_exist
        self.before = {name: slot.tensor.clone() for name, slot in slots.items() if slot.tensor is not None}
        #: What the last call left of another shape.
        self._resized: dict[str, Tensor] = {}

    def _state_after(self, batch: Any) -> dict[str, Tensor] | None:
        """What a call leaves; None where the model cannot compute this part of a batch."""
        run = self._run
        try:
            with autocast(run.precision, run.device):
                call_model(run.job, run.model, copy_tensors(batch))
        except Exception:  # an error of the whole batch is raised by the step itself
            return None
        finally:
            run.rank_model.reshard()
        values = {}
        for name, slot in self._slots.items():
            value = slot.tensor
            if value is not None and value.shape == self.before[name].shape:
                values[name] = value.detach().clone()
                if self._has_changed(name, value):  # a write would make it one that changes
                    make_writable(slot).copy_(self.before[name])
            elif value is not None and self._caches_exist:
                self._resized[name] = value.detach().clone()
        return values

    def _has_changed(self, name: str, value: Tensor) -> bool:
        return not torch.equal(value, self.before[name])

    def observe(self, micro_batch: MicroBatch, other_micro_batch: MicroBatch) -> dict[str, _Observation]:
        """What rules hold for this rank's samples; of what no call changes nothing."""
        run, count = self._run, micro_batch.samples
        batch, other_batch = run.move_batch(micro_batch.batch), run.move_batch(other_micro_batch.batch)
        can_concatenate = _leaf_shapes(batch) == _leaf_shapes(other_batch)
        split_at = max(count // 3, min(2, count // 2))  # of a single sample some layers have no statistics
        observations: dict[str, _Observation] = {}
        unchanged_functions = preserve_function_state(run.job, run.model)
        with unchanged_functions, _restore_modules(run.model), DeterministicMode(fix_random=True)():
            whole = self._state_after(batch)
            changed = whole is not None and any(self._has_changed(name, value) for name, value in whole.items())
            if self._caches_exist and any(run.ranks.all_gather_object(bool(self._resized))):
                first_resized = dict(self._resized)
                self._state_after(batch)  # a cache stays as it is now
                unstable = [n for n, value in first_resized.items() if not torch.equal(value, self._resized[n])]
                observations = dict.fromkeys(unstable, _Observation(()))
            if not any(run.ranks.all_gather_object(changed)):
                return observations
            # Every rank makes as many calls, because a call may wait for other ranks.
            spans = [slice(split_at), slice(split_at, count)]
            halves = [_slice_samples(batch, count, span) for span in spans] if count > 1 else [batch, other_batch]
            parts = [self._state_after(half) for half in halves]
            if any(run.ranks.all_gather_object(count == 1)):
                joined_batch = _concatenate_samples(batch, other_batch if can_concatenate else batch)
                joined = self._state_after(batch if count > 1 else joined_batch)
                whole = whole if count > 1 else joined
        if whole is None or parts[0] is None or parts[1] is None:
            return observations
        weights = (0.5, 0.5) if count == 1 else (split_at / count, 1 - split_at / count)
        for name in whole.keys() & parts[0].keys() & parts[1].keys():
            value, first, second = whole[name], parts[0][name], parts[1][name]
            if not any(self._has_changed(name, left) for left in (value, first, second)):
                continue
            rules = _matching_rules(self.before[name], value, first, second, weights)
            if count == 1 and not can_concatenate:
                rules = tuple(rule for rule in rules if rule == "same")
            is_single = count == 1 and (other_micro_batch is micro_batch or not can_concatenate)
            observations[name] = _Observation(rules, digest(first) if is_single else "", value.is_floating_point())
        return observations


def _matching_rules(
    before: Tensor, whole: Tensor, first: Tensor, second: Tensor, weights: tuple[float, float]
) -> tuple[str, ...]:
    """The rules that hold, in the order of the table: parts that leave the same leave their mean as well."""
    if not whole.numel():
        return RULES
    eps = torch.finfo(whole.dtype).eps if whole.is_floating_point() else 0.0
    rounding_error = 4 * eps * float(whole.abs().nan_to_num(posinf=0.0).max())
    before, whole, first, second = (tensor.double() for tensor in (before, whole, first, second))
    candidates = {
        "same": first if torch.equal(first, second) else None,
        "mean": weights[0] * first + weights[1] * second,
        "sum": first + second - before,
        "max": torch.maximum(first, second),
        "min": torch.minimum(first, second),
    }
    # An observer of ranges starts at infinity.
    finite_before = torch.where(before.isfinite(), before, 0.0)
    largest_change = max(float((tensor - finite_before).abs().max()) for tensor in (whole, first, second)) or 1.0
    differences = {rule: (value - whole).abs() for rule, value in candidates.items() if value is not None}
    errors = {rule: float(d.nan_to_num(nan=math.inf).max()) / largest_change for rule, d in differences.items()}
    best_error, rounding_floor = min(errors.values()), rounding_error / largest_change
    if best_error > max(_RULE_TOLERANCE, rounding_floor):
        return ()
    return tuple(rule for rule, error in errors.items() if error <= max(10 * best_error + 1e-9, rounding_floor))


def _choose_rule(run: RunState, name: str, observations: Sequence[_Observation], known_rule: str | None) -> str:
    conclusive = [observation for observation in observations if not observation.digest]
    rules = [rule for rule in RULES if all(rule in observation.rules for observation in conclusive or observations)]
    if not conclusive and len({observation.digest for observation in observations}) > 1:
        rules = []
    if known_rule is not None and known_rule in rules:
        return known_rule
    if observations[0].is_float and ("max" in rules or "min" in rules):
        # A sum looks alike where one part alone changes it; counters are mostly whole numbers.
        rules = [rule for rule in rules if rule != "sum"]
    declaration = f"buffer_reductions = {{{name.rpartition('.')[2]!r}: {rules[0] if rules else 'mean'!r}}}"
    if name in dict(run.model.named_parameters()) and rules[:1] != ["same"]:
        cause = "forward writes to a parameter"
        problem = (
            f"parameter {name}: forward itself changes it by this rank's samples (an initialization by the first batch, a Python flag), so that ranks "
            "or micro-batches diverge; initialize it before training"
        )
    elif rules and known_rule not in (None, "same"):
        cause = "a buffer whose reduction changes"
        problem = (
            f"buffer {name}: what a call leaves in it for a batch was the {_RULE_WORDS[known_rule]} of what calls leave for its parts at first, and is the "
            f"{_RULE_WORDS[rules[0]]} now, so that ranks or micro-batches cannot keep it as one device does; declare the rule that holds in its module "
            f"({declaration})"
        )
    elif not rules:
        cause = "a buffer without a known reduction"
        problem = (
            f"buffer {name}: what a call leaves in it for a batch is neither the same, the mean, the sum, the largest nor the least of what calls leave "
            "for its parts (a queue, a codebook by moving sums), so that ranks or micro-batches cannot keep it as one device does; declare a rule in its "
            f"module ({declaration}; one of {', '.join(RULES)}), add it up over ranks in forward"
        )
    else:
        return rules[0]
    raise UnshardableStateError(f"{problem}, or use one process without micro-batches (dp=1)", tensor=name, cause=cause)


def _declared_rules(model: nn.Module) -> dict[str, str]:
    rules: dict[str, str] = {}
    for path, module in model.named_modules():
        for key, rule in dict(getattr(module, "buffer_reductions", None) or {}).items():
            name = f"{path}.{key}" if path else key
            if rule not in RULES:
                owner, known = path or "the model", ", ".join(RULES)
                raise JobError(f"buffer_reductions of {owner}: {key!r} is {rule!r}, not one of {known}")
            rules[name] = rule
    return rules


def _leaf_shapes(batch: Any) -> list[Any]:
    return [getattr(leaf, "shape", None) for leaf in tree_leaves(batch)]


def _slice_samples(batch: Any, sample_count: int, span: slice) -> Any:
    """Some samples of a collated batch."""
    return map_tensors(lambda leaf: leaf[span] if leaf.dim() and len(leaf) == sample_count else leaf, batch)


def _concatenate_samples(batch: Any, other_batch: Any) -> Any:
    """Two collated batches of one sample each as one of two."""
    other_leaves = iter(tree_leaves(other_batch))

    def concatenate_leaf(leaf: Any) -> Any:
        other_leaf = next(other_leaves)
        is_sample = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == 1
        return torch.cat([leaf, other_leaf]) if is_sample else leaf

    return tree_map(concatenate_leaf, batch)


@contextlib.contextmanager
def _restore_modules(model: nn.Module) -> Iterator[None]:
    """Have a model's modules as they were, afterwards: what they keep, and buffers."""
    snapshot = Snapshot({"model": model}, excluded_ids={id(parameter) for parameter in model.parameters()})
    try:
        yield
    finally:
        snapshot.restore()
