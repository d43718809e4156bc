"""All that schedules keep, for JSON: what `state_dict()` returns, or the attributes of one that has none.

What a schedule keeps for each parameter group goes with the groups, by parameter name; the rest is one tree. Schedules may hold
schedules (SequentialLR by their states, others as objects). Functions in them are the job's own, made again by it.
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

from echelon.engine.checkpoint.json_values import Unstorable, decode, encode, from_inline, inline
from echelon.errors import JobError

#: What torch's schedules keep for each group.
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums")
#: Code is the job's own: it is not stored, and the live one stays.
_CODE = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type, types.ModuleType, Optimizer,
)  # fmt: skip
#: Marks a held object that has a state dict of its own.
HELD = "state of an object"


def takes_metric(schedule: Any) -> bool:
    """Whether its `step` needs the value of a metric, as ReduceLROnPlateau's does."""
    return len(_required(schedule)) == 1 and _required(schedule)[0].startswith(("metric", "loss", "value", "val"))


def require_steps(schedule: Any) -> None:
    """Refuse a schedule that cannot be stepped here."""
    name = type(schedule).__name__
    if not hasattr(schedule, "step"):
        raise JobError(f"schedule= gives {name}, which has no step(); return a torch LRScheduler")
    if _required(schedule) and not takes_metric(schedule):
        raise JobError(
            f"schedule= gives {name}, whose step() needs {', '.join(_required(schedule))}: schedules are stepped once per optimizer step, "
            "without arguments, and those of a metric (ReduceLROnPlateau) with the evaluation's loss; return a torch LRScheduler"
        )


def _required(schedule: Any) -> list[str]:
    try:
        parameters = inspect.signature(schedule.step).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def state_of(schedule: Any) -> dict[str, Any]:
    """What it keeps, opened: held objects that have a state dict as that."""
    if hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict"):
        found = schedule.state_dict()
    elif hasattr(schedule, "__dict__"):
        found = {key: value for key, value in vars(schedule).items() if not isinstance(value, _CODE)}
    else:
        raise JobError(
            f"schedule= gives {type(schedule).__name__}, which has neither state_dict() and load_state_dict() nor attributes: where it "
            "stands could not be saved; give it both methods"
        )
    if not isinstance(found, dict):
        raise JobError(f"schedule= gives {type(schedule).__name__}, whose state_dict() is no dict; return one")
    return {key: _opened(value) for key, value in found.items() if not isinstance(value, _CODE)}


def _opened(value: Any) -> Any:
    if isinstance(value, _CODE):
        return {HELD: {}}
    if isinstance(value, Tensor | np.generic | np.ndarray | torch.dtype | torch.device):
        return value
    stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    if stateful or (callable(value) and hasattr(value, "__dict__")):
        return {HELD: state_of(value)}
    if type(value) is dict:
        return {key: _opened(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_opened(each) for each in value)
    return value


def per_group(schedule: Any) -> dict[str, list[Any]]:
    """What it keeps for each group, for JSON: `base_lrs`, `_schedulers/0/base_lrs`."""
    return _lists(state_of(schedule), "")


def common(schedule: Any) -> dict[str, Any]:
    """The rest, for JSON."""
    try:
        encoded = encode(_common(state_of(schedule)), "", inline)
    except Unstorable as error:
        raise JobError(
            f"schedule= gives {type(schedule).__name__}, which keeps {error.why} ({error.path.lstrip('/')}): a checkpoint does not hold it, and a "
            "resumed run would go on without it; keep numbers, strings and containers of these, or leave it out in state_dict()"
        ) from error
    assert isinstance(encoded, dict)
    return encoded


def set_state(schedule: Any, stored: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> None:
    """Restore what `common` and `per_group` gave; `own`: the latter's part of each live group."""
    state = _joined(state_of(schedule), decode(dict(stored), from_inline), own, "")
    _load(schedule, state)


def _load(schedule: Any, state: dict[str, Any]) -> None:
    if not (hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict")):
        vars(schedule).update({key: _closed(value, vars(schedule).get(key)) for key, value in state.items()})
        return
    live = schedule.state_dict()
    schedule.load_state_dict(dict(live) | {key: _closed(value, live.get(key)) for key, value in state.items()})


def _closed(value: Any, live: Any) -> Any:
    """With held objects in place of their states, which they have taken up."""
    if isinstance(value, dict) and value.keys() == {HELD}:
        if value[HELD]:
            _load(live, value[HELD])
        return live
    if type(value) is dict and isinstance(live, dict):
        return {key: _closed(each, live.get(key)) for key, each in value.items()}
    if type(value) in (list, tuple) and isinstance(live, list | tuple) and len(live) == len(value):
        return type(value)(_closed(each, was) for each, was in zip(value, live, strict=True))
    return value


def _inner(state: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The states of the schedules that a schedule holds."""
    for key, value in state.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) and "last_epoch" in each for each in value):
            yield key, value
        elif isinstance(value, dict) and value.keys() == {HELD}:
            yield key, [value[HELD]]


def _lists(state: Mapping[str, Any], path: str) -> dict[str, list[Any]]:
    found = {}
    for key, value in state.items():
        if key in _BY_GROUP and isinstance(value, list | tuple):
            found[f"{path}{key}"] = [encode(each, f"{path}{key}", inline) for each in value]
    for key, states in _inner(state):
        for i, each in enumerate(states):
            found |= _lists(each, f"{path}{key}/{i}/")
    return found


def _common(state: Mapping[str, Any]) -> dict[str, Any]:
    inner = dict(_inner(state))
    rest = {key: value for key, value in state.items() if key not in _BY_GROUP and key not in inner}
    return rest | {key: [_common(each) for each in states] for key, states in inner.items()}


def _joined(
    mine: Mapping[str, Any], old: Mapping[str, Any], own: Sequence[Mapping[str, Any]], path: str
) -> dict[str, Any]:
    """A live schedule's state with what was stored in its place."""
    merged = {key: value for key, value in old.items() if key not in dict(_inner(mine))}
    for key, states in _inner(mine):
        was = old.get(key)
        if isinstance(was, list) and len(was) == len(states):
            joined = [
                _joined(each, old_one, own, f"{path}{key}/{i}/")
                for i, (each, old_one) in enumerate(zip(states, was, strict=True))
            ]
            merged[key] = {HELD: joined[0]} if isinstance(mine[key], dict) else joined
    for key in _BY_GROUP:
        values = [group[path + key] for group in own if path + key in group]
        if key in mine and len(values) == len(own):
            decoded = [decode(each, from_inline) for each in values]
            merged[key] = tuple(decoded) if isinstance(mine[key], tuple) else decoded
    return dict(mine) | merged
