"""State of learning rate schedules as JSON: `state_dict()`, or the attributes of a schedule that has none; not functions. Values per parameter
group are stored with the groups. Schedules may contain schedules (SequentialLR their state dicts, others the objects)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.engine.checkpoint.json_values import UnstorableValue, decode, decode_inline, encode, encode_inline
from echelon.errors import JobError

#: Attributes of torch's schedules with one value per group.
_GROUP_KEYS = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums")
#: Code is not stored: the live one stays.
_CODE_TYPES = (FunctionType, BuiltinFunctionType, MethodType, partial, type, ModuleType, Optimizer)
_PLAIN_OBJECT_TYPES = (Tensor, np.generic, np.ndarray, torch.dtype, torch.device)
_Groups = Sequence[Mapping[str, Any]]
#: Marks the state dict of an object that a schedule holds.
OBJECT_STATE_KEY = "state of an object"


def takes_metric(schedule: Any) -> bool:
    """Whether `step` needs the value of a metric, as ReduceLROnPlateau's does."""
    arguments = required_arguments(schedule.step)
    return len(arguments) == 1 and arguments[0].startswith(("metric", "loss", "val"))


def require_steppable(schedule: Any) -> None:
    """Refuse a schedule that a run cannot step."""
    if not hasattr(schedule, "step"):
        raise _job_error(schedule, "which has no step(); return a torch LRScheduler")
    arguments = required_arguments(schedule.step)
    if arguments and not takes_metric(schedule):
        rule = "schedules are stepped once per optimizer step, without arguments, or with the evaluation loss if they take a metric"
        problem = f"whose step() needs {', '.join(arguments)}: {rule} (ReduceLROnPlateau)"
        raise _job_error(schedule, f"{problem}; return a torch LRScheduler")


def required_arguments(function: Any) -> list[str]:
    """The names of the arguments that a call must give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _job_error(schedule: Any, problem: str) -> JobError:
    return JobError(f"lr_schedule= returns {type(schedule).__name__}, {problem}")


def collect_group_values(schedule: Any) -> dict[str, list[Any]]:
    """Values per parameter group, as JSON: `base_lrs`, `_schedulers/0/base_lrs`."""
    group_values = _split_state(read_state(schedule))[1]
    return {path: [encode(item, path, encode_inline) for item in values] for path, values in group_values.items()}


def collect_common_state(schedule: Any) -> dict[str, Any]:
    """The rest of the state, as JSON."""
    try:
        encoded: dict[str, Any] = encode(_split_state(read_state(schedule))[0], "", encode_inline)
        return encoded
    except UnstorableValue as error:
        problem = f"which keeps {error.reason} ({error.path.lstrip('/')}): a checkpoint cannot hold it, and a resumed run would lose it"
        remedy = "keep numbers, strings and containers of these, or leave it out of state_dict()"
        raise _job_error(schedule, f"{problem}; {remedy}") from error


def read_state(schedule: Any) -> dict[str, Any]:
    """A schedule's state; objects that it holds as their state dicts."""
    if not _has_state_dict(schedule) and not hasattr(schedule, "__dict__"):
        problem = "which has neither state_dict() and load_state_dict() nor attributes, so its progress cannot be saved"
        raise _job_error(schedule, f"{problem}; add both methods")
    state = schedule.state_dict() if _has_state_dict(schedule) else vars(schedule)
    if not isinstance(state, dict):
        raise _job_error(schedule, "whose state_dict() is not a dict; return one")
    return {key: _expand_objects(value) for key, value in state.items() if not isinstance(value, _CODE_TYPES)}


def _has_state_dict(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _expand_objects(value: Any) -> Any:
    if isinstance(value, _CODE_TYPES):
        return {OBJECT_STATE_KEY: {}}
    if isinstance(value, _PLAIN_OBJECT_TYPES):
        return value
    if _has_state_dict(value) or (callable(value) and hasattr(value, "__dict__")):
        return {OBJECT_STATE_KEY: read_state(value)}
    if type(value) is dict:
        return {key: _expand_objects(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_expand_objects(item) for item in value)
    return value


def _nested_states(state: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for key, value in state.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) and "last_epoch" in item for item in value):
            yield key, value
        elif isinstance(value, dict) and value.keys() == {OBJECT_STATE_KEY}:
            yield key, [value[OBJECT_STATE_KEY]]


def _split_state(state: Mapping[str, Any], path: str = "") -> tuple[dict[str, Any], dict[str, Sequence[Any]]]:
    """The state without values per parameter group, and those values by path."""
    nested = dict(_nested_states(state))
    common = {key: value for key, value in state.items() if key not in _GROUP_KEYS and key not in nested}
    group_values = {f"{path}{k}": state[k] for k in state if k in _GROUP_KEYS and isinstance(state[k], list | tuple)}
    for key, states in nested.items():
        common[key] = []
        for index, item in enumerate(states):
            nested_common, nested_values = _split_state(item, f"{path}{key}/{index}/")
            common[key].append(nested_common)
            group_values |= nested_values
    return common, group_values


def restore_state(schedule: Any, encoded: Mapping[str, Any], stored_groups: _Groups) -> None:
    """Restore `collect_common_state` and `collect_group_values`; `stored_groups`: of the latter, the values of each live group."""
    _load_state(schedule, _merge_states(read_state(schedule), decode(dict(encoded), decode_inline), stored_groups, ""))


def _merge_states(live: Mapping[str, Any], stored: Mapping[str, Any], groups: _Groups, path: str) -> dict[str, Any]:
    nested = dict(_nested_states(live))
    merged = dict(live) | {key: value for key, value in stored.items() if key not in nested}
    for key, states in nested.items():
        stored_states = stored.get(key)
        if isinstance(stored_states, list) and len(stored_states) == len(states):
            pairs = enumerate(zip(states, stored_states, strict=True))
            merged_states = [_merge_states(*pair, groups, f"{path}{key}/{index}/") for index, pair in pairs]
            merged[key] = {OBJECT_STATE_KEY: merged_states[0]} if isinstance(live[key], dict) else merged_states
    for key in _GROUP_KEYS:
        values = [decode(group[path + key], decode_inline) for group in groups if path + key in group]
        if key in live and len(values) == len(groups):
            merged[key] = tuple(values) if isinstance(live[key], tuple) else values
    return merged


def _load_state(schedule: Any, state: dict[str, Any]) -> None:
    live = schedule.state_dict() if _has_state_dict(schedule) else vars(schedule)
    loaded = {key: _collapse_objects(value, live.get(key)) for key, value in state.items()}
    if _has_state_dict(schedule):
        schedule.load_state_dict(dict(live) | loaded)
    else:
        vars(schedule).update(loaded)


def _collapse_objects(value: Any, live: Any) -> Any:
    """Load held objects' states into them, and put the objects in place."""
    if isinstance(value, dict) and value.keys() == {OBJECT_STATE_KEY}:
        if value[OBJECT_STATE_KEY]:
            _load_state(live, value[OBJECT_STATE_KEY])
        return live
    if type(value) is dict and isinstance(live, dict):
        return {key: _collapse_objects(item, live.get(key)) for key, item in value.items()}
    if type(value) in (list, tuple) and isinstance(live, list | tuple) and len(live) == len(value):
        return type(value)(_collapse_objects(item, live_item) for item, live_item in zip(value, live, strict=True))
    return value
