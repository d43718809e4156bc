"""What optimizers and schedules are set to, by parameter name.

A stage makes groups of its own parameters: how many there are and which is the first differs from stage to stage, and from plan to
plan. So a checkpoint tells for each setting which parameters have it, and a group takes up what its own parameters had.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import ForeignCheckpoint

if TYPE_CHECKING:
    from echelon.engine.run import Run

#: Entries of a parameter group that name live parameters.
_LIVE = ("params", "param_names")
#: How a group's step is computed, not what: the running plan's choice, since the plan that saved may have had other kernels.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
#: Entries of a stored group that are not the optimizer's own.
_OURS = ("names", "schedule")
#: What torch's schedules keep for each group.
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums")


def names(model: nn.Module) -> dict[int, str]:
    """Parameter identity -> its first name."""
    return {id(value): name for name, value in reversed(list(model.named_parameters()))}


def entries(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """What an optimizer keeps for each parameter."""
    known = names(model)
    return [(known[id(value)], entry) for value, entry in optimizer.state.items() if id(value) in known]


def is_plain(value: Any) -> bool:
    """Whether JSON holds it as it is."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


def _frozen(value: Any) -> Any:
    """A setting for JSON: a tensor of one number (a learning rate) as its number."""
    if isinstance(value, list | tuple):
        return [_frozen(each) for each in value]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group is set to: not which parameters it has, and not how its step is computed."""
    return {key: _frozen(value) for key, value in group.items() if key not in (*_LIVE, *_IMPLEMENTATION)}


def _thawed(value: Any, example: Any) -> Any:
    """What `_frozen` made, as what it was: JSON has neither tensors nor tuples (AdamW's betas)."""
    if isinstance(example, Tensor) and is_plain(value):
        return torch.full_like(example, value)
    if isinstance(example, list | tuple) and isinstance(value, list) and len(example) == len(value):
        return type(example)(_thawed(each, was) for each, was in zip(value, example, strict=True))
    return tuple(value) if isinstance(example, tuple) else value


def optimizer_plain(run: Run) -> list[dict[str, Any]]:
    """Settings with the names that they cover, and plain state, of each optimizer, of all stages together; fit for JSON.
    Every rank must call it."""
    return [_merged(parts) for parts in zip(*run.axes["pp"].gather(_plain_here(run)), strict=True)]


def schedule_plain(run: Run) -> list[dict[str, Any]]:
    """What the schedules keep, but for what they keep for each group: `optimizer_plain` has that."""
    return [_common(schedule.state_dict()) for schedule in run.schedules]


def _plain_here(run: Run) -> list[dict[str, Any]]:
    known = names(run.model)
    found = []
    for index, optimizer in enumerate(run.optimizers):
        lists = _lists(run.schedules[index].state_dict()) if run.schedules else {}
        groups = [
            {key: value for key, value in settings(group).items() if is_plain(value)}
            | {
                "schedule": {path: values[i] for path, values in lists.items()},
                "names": [known[id(value)] for value in group["params"] if id(value) in known],
            }
            for i, group in enumerate(optimizer.param_groups)
        ]
        state = {
            name: {key: value for key, value in entry.items() if is_plain(value)}
            for name, entry in entries(run.model, optimizer)
        }
        found.append({"groups": groups, "state": state})
    return found


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One group for each setting."""
    groups: dict[str, dict[str, Any]] = {}
    for group in (each for part in parts for each in part["groups"] if each["names"]):
        rest = {key: value for key, value in group.items() if key != "names"}
        same = groups.setdefault(json.dumps(rest, sort_keys=True), rest | {"names": []})
        same["names"] = list(dict.fromkeys(same["names"] + group["names"]))
    return {
        "groups": list(groups.values()),
        "state": {name: entry for part in parts for name, entry in part["state"].items()},
    }


def _stored(manifest: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The groups of each optimizer of a checkpoint."""
    return [each["groups"] for each in manifest["optimizers"]]


def require_groups(run: Run, manifest: Mapping[str, Any], here: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Refuse a checkpoint whose settings the groups of this rank cannot take up. `here`: `optimizer_plain` of this run."""
    stored = _stored(manifest)
    covered = [{name for group in groups for name in group["names"]} for groups in stored]
    if covered != [{name for group in each["groups"] for name in group["names"]} for each in here]:
        raise ForeignCheckpoint(
            f"{folder}: its optimizers cover other parameters than this job's; start anew in another folder"
        )
    known = names(run.model)
    for optimizer, groups in zip(run.optimizers, stored, strict=True):
        places = {name: place for place, group in enumerate(groups) for name in group["names"]}
        for group in optimizer.param_groups:
            mine = [known[id(value)] for value in group["params"] if id(value) in known]
            other = next(
                (name for name in mine if _settings(groups[places[name]]) != _settings(groups[places[mine[0]]])), None
            )
            if other is not None:
                raise ForeignCheckpoint(
                    f"{folder}: {mine[0]} and {other} are in one group of this job's optimizer, and in the checkpoint they have different "
                    "settings; put the groups back as they were, or start anew in another folder with weights= from this one"
                )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("names", *_IMPLEMENTATION)}


def set_optimizers(run: Run, saved: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
    """Put back what `optimizer_tensors` and `optimizer_plain` gave, through each optimizer's own load_state_dict."""
    known = names(run.model)
    for index, (optimizer, groups) in enumerate(zip(run.optimizers, _stored(manifest), strict=True)):
        order = {
            known[id(value)]: i
            for i, value in enumerate(v for group in optimizer.param_groups for v in group["params"])
            if id(value) in known
        }
        kept = {name: dict(values) for name, values in manifest["optimizers"][index]["state"].items()}
        for path, value in saved.items():
            which, name, key = path.split("/", 2)
            if int(which) == index:
                kept.setdefault(name, {})[key] = value
        state = optimizer.state_dict()
        for group, old in zip(state["param_groups"], _own(known, optimizer, groups), strict=True):
            theirs = {key: value for key, value in old.items() if key not in (*_OURS, *_IMPLEMENTATION)}
            group.update({key: _thawed(value, group.get(key)) for key, value in theirs.items()})
        # What a parameter server trains has its state there, and what stands for it here keeps its own.
        served = run.hub.trained if run.hub is not None else frozenset()
        own = {
            place: state["state"][place] for name, place in order.items() if name in served and place in state["state"]
        }
        mine = {order[name]: entry for name, entry in kept.items() if name in order and name not in served}
        state["state"] = mine | own  # not other stages'
        optimizer.load_state_dict(state)


def set_schedules(run: Run, manifest: Mapping[str, Any]) -> None:
    """Put back what `schedule_plain` and `optimizer_plain` gave of the schedules."""
    known, stored = names(run.model), _stored(manifest)
    for index, schedule in enumerate(run.schedules):
        own = [group["schedule"] for group in _own(known, run.optimizers[index], stored[index])]
        old = _common(manifest["schedules"][index])
        schedule.load_state_dict(_with_lists(schedule.state_dict(), old, own, ""))


def _own(known: Mapping[int, str], optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each live group what its parameters had; for one that has none what the first had, to be in step with it."""
    by_name = {name: group for group in groups for name in group["names"]}
    spare = groups[0] if groups else {"schedule": {}}
    return [
        next((by_name[known[id(value)]] for value in group["params"] if id(value) in known), spare)
        for group in optimizer.param_groups
    ]


# A schedule's state: what it keeps for each group, and the rest. Schedules may hold schedules (SequentialLR).


def _inner(state: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The states of the schedules that a schedule holds."""
    for key, value in state.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) and "last_epoch" in each for each in value):
            yield key, value


def _lists(state: Mapping[str, Any], path: str = "") -> dict[str, list[Any]]:
    """What is kept for each group: `base_lrs`, `_schedulers/0/base_lrs`."""
    found = {
        f"{path}{key}": _frozen(value)
        for key, value in state.items()
        if key in _BY_GROUP and isinstance(value, list | tuple) and is_plain(_frozen(value))
    }
    for key, states in _inner(state):
        for i, each in enumerate(states):
            found |= _lists(each, f"{path}{key}/{i}/")
    return found


def _common(state: Mapping[str, Any]) -> dict[str, Any]:
    """The rest, fit for JSON."""
    inner = {key: [_common(each) for each in states] for key, states in _inner(state)}
    return {key: value for key, value in state.items() if key not in _BY_GROUP and is_plain(value)} | inner


def _with_lists(
    mine: Mapping[str, Any], old: Mapping[str, Any], own: Sequence[Mapping[str, Any]], path: str
) -> dict[str, Any]:
    """A live schedule's state with what was stored in its place."""
    merged = {key: _thawed(value, mine.get(key)) for key, value in old.items()}
    for key, states in _inner(mine):
        if key in old and len(old[key]) == len(states):
            merged[key] = [
                _with_lists(each, was, own, f"{path}{key}/{i}/")
                for i, (each, was) in enumerate(zip(states, old[key], strict=True))
            ]
        else:
            merged.pop(key, None)
    for key in _BY_GROUP:
        values = [group[path + key] for group in own if path + key in group]
        if key in mine and len(values) == len(own):
            merged[key] = _thawed(values, mine[key])
    return dict(mine) | merged
