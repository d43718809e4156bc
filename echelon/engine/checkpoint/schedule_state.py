"""State of learning rate schedules as JSON: `state_dict()`, or the attributes of a schedule that has none.

Values per parameter group are stored with the groups, by parameter name; the rest is one tree. Schedules may contain schedules (SequentialLR
their state dicts, others the objects). Functions in them are not stored: the job makes them again.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
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
_CODE_TYPES = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type, types.ModuleType, Optimizer,
)  # fmt: skip
#: Marks the state dict of an object that a schedule holds.
OBJECT_STATE_KEY = "state of an object"


def takes_metric(schedule: Any) -> bool:
    """Whether `step` needs the value of a metric, as ReduceLROnPlateau's does."""
    arguments = _required_step_arguments(schedule)
    return len(arguments) == 1 and arguments[0].startswith(("metric", "loss", "val"))


def require_steppable(schedule: Any) -> None:
    """Refuse a schedule that a run cannot step."""
    name = type(schedule).__name__
    if not hasattr(schedule, "step"):
        raise JobError(f"lr_schedule= gives {name}, which has no step(); return a torch LRScheduler")
    if _required_step_arguments(schedule) and not takes_metric(schedule):
        raise JobError(
            f"lr_schedule= gives {name}, whose step() needs {', '.join(_required_step_arguments(schedule))}: schedules are stepped once per optimizer step, "
            "without arguments, or with the evaluation loss if they take a metric (ReduceLROnPlateau); return a torch LRScheduler"
        )


def _required_step_arguments(schedule: Any) -> list[str]:
    try:
        parameters = inspect.signature(schedule.step).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def read_state(schedule: Any) -> dict[str, Any]:
    """A schedule's state; objects that it holds as their state dicts."""
    if hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict"):
        state = schedule.state_dict()
    elif hasattr(schedule, "__dict__"):
        state = {key: value for key, value in vars(schedule).items() if not isinstance(value, _CODE_TYPES)}
    else:
        raise JobError(
            f"lr_schedule= gives {type(schedule).__name__}, which has neither state_dict() and load_state_dict() nor attributes, so its "
            "progress cannot be saved; add both methods"
        )
    if not isinstance(state, dict):
        raise JobError(f"lr_schedule= gives {type(schedule).__name__}, whose state_dict() is not a dict; return one")
    return {key: _expand_objects(value) for key, value in state.items() if not isinstance(value, _CODE_TYPES)}


def _expand_objects(value: Any) -> Any:
    if isinstance(value, _CODE_TYPES):
        return {OBJECT_STATE_KEY: {}}
    if isinstance(value, Tensor | np.generic | np.ndarray | torch.dtype | torch.device):
        return value
    stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    if stateful or (callable(value) and hasattr(value, "__dict__")):
        return {OBJECT_STATE_KEY: read_state(value)}
    if type(value) is dict:
        return {key: _expand_objects(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_expand_objects(item) for item in value)
    return value


def collect_group_values(schedule: Any) -> dict[str, list[Any]]:
    """Values per parameter group, as JSON: `base_lrs`, `_schedulers/0/base_lrs`."""
    return _group_values(read_state(schedule), "")


def collect_common_state(schedule: Any) -> dict[str, Any]:
    """The rest of the state, as JSON."""
    try:
        encoded = encode(_without_group_values(read_state(schedule)), "", encode_inline)
    except UnstorableValue as error:
        raise JobError(
            f"lr_schedule= gives {type(schedule).__name__}, which keeps {error.reason} ({error.path.lstrip('/')}): a checkpoint cannot hold it, and a "
            "resumed run would lose it; keep numbers, strings and containers of these, or leave it out of state_dict()"
        ) from error
    assert isinstance(encoded, dict)
    return encoded


def restore_state(schedule: Any, encoded: Mapping[str, Any], stored_groups: Sequence[Mapping[str, Any]]) -> None:
    """Restore `collect_common_state` and `collect_group_values`; `stored_groups`: of the latter, the values of each live group."""
    state = _merge_states(read_state(schedule), decode(dict(encoded), decode_inline), stored_groups, "")
    _load_state(schedule, state)


def _load_state(schedule: Any, state: dict[str, Any]) -> None:
    if not (hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict")):
        vars(schedule).update({key: _collapse_objects(value, vars(schedule).get(key)) for key, value in state.items()})
        return
    live = schedule.state_dict()
    schedule.load_state_dict(
        dict(live) | {key: _collapse_objects(value, live.get(key)) for key, value in state.items()}
    )


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


def _nested_states(state: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """States of the schedules inside a schedule."""
    for key, value in state.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) and "last_epoch" in item for item in value):
            yield key, value
        elif isinstance(value, dict) and value.keys() == {OBJECT_STATE_KEY}:
            yield key, [value[OBJECT_STATE_KEY]]


def _group_values(state: Mapping[str, Any], path: str) -> dict[str, list[Any]]:
    values_by_path = {}
    for key, value in state.items():
        if key in _GROUP_KEYS and isinstance(value, list | tuple):
            values_by_path[f"{path}{key}"] = [encode(item, f"{path}{key}", encode_inline) for item in value]
    for key, states in _nested_states(state):
        for i, item in enumerate(states):
            values_by_path |= _group_values(item, f"{path}{key}/{i}/")
    return values_by_path


def _without_group_values(state: Mapping[str, Any]) -> dict[str, Any]:
    inner = dict(_nested_states(state))
    rest = {key: value for key, value in state.items() if key not in _GROUP_KEYS and key not in inner}
    return rest | {
        key: [_without_group_values(nested_state) for nested_state in states] for key, states in inner.items()
    }


def _merge_states(
    live: Mapping[str, Any], stored: Mapping[str, Any], stored_groups: Sequence[Mapping[str, Any]], path: str
) -> dict[str, Any]:
    """A live schedule's state, updated with the stored one."""
    merged = {key: value for key, value in stored.items() if key not in dict(_nested_states(live))}
    for key, states in _nested_states(live):
        stored_states = stored.get(key)
        if isinstance(stored_states, list) and len(stored_states) == len(states):
            merged_states = [
                _merge_states(item, stored_state, stored_groups, f"{path}{key}/{i}/")
                for i, (item, stored_state) in enumerate(zip(states, stored_states, strict=True))
            ]
            merged[key] = {OBJECT_STATE_KEY: merged_states[0]} if isinstance(live[key], dict) else merged_states
    for key in _GROUP_KEYS:
        values = [group[path + key] for group in stored_groups if path + key in group]
        if key in live and len(values) == len(stored_groups):
            decoded = [decode(item, decode_inline) for item in values]
            merged[key] = tuple(decoded) if isinstance(live[key], tuple) else decoded
    return dict(live) | merged
