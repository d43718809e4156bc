"""What parameter groups are set to, by parameter name.

A stage makes groups of its own parameters: how many there are and which is the first differs from stage to stage, and from plan to
plan. So a checkpoint lists for each setting which parameters have it, and a group takes up what its own parameters had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.engine.checkpoint.json_values import Unstorable, decode, encode, from_inline, inline
from echelon.engine.checkpoint.schedule_state import per_group
from echelon.errors import ForeignCheckpoint, JobError

if TYPE_CHECKING:
    from echelon.engine.run import Run

#: Entries of a parameter group that name live parameters.
_LIVE = ("params", "param_names")
#: How a group's step is computed, not what: the running plan's choice, since the plan that saved may have had other kernels.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")


def names(run: Run) -> dict[int, str]:
    """Parameter identity -> its first name; also of the loss's own, and of the whole tensors that stand for a parameter in its optimizer."""
    named = [*run.model.named_parameters(), *run.loss_parameters.items()]
    named += [pair for each in run.whole.values() for pair in each.parameters.items()]
    return {id(value): name for name, value in reversed(named)}


def entries(run: Run, optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """What an optimizer keeps on this rank for each parameter."""
    known = names(run)
    return [(known[id(value)], entry) for value, entry in optimizer.state.items() if id(value) in known]


def is_plain(value: Any) -> bool:
    """Whether JSON holds it as it is."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


def _frozen(value: Any) -> Any:
    """A setting as a plain value: a tensor of one number (a learning rate) as its number."""
    if type(value) in (list, tuple):
        return type(value)(_frozen(each) for each in value)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group is set to: not which parameters it has, and not how its step is computed."""
    return {key: _frozen(value) for key, value in group.items() if key not in (*_LIVE, *_IMPLEMENTATION)}


def _thawed(value: Any, example: Any) -> Any:
    """What `_frozen` made, as what it was."""
    if isinstance(example, Tensor) and type(value) in (bool, int, float, complex):
        return torch.full_like(example, value)
    if type(value) in (list, tuple) and isinstance(example, list | tuple) and len(example) == len(value):
        return type(value)(_thawed(each, was) for each, was in zip(value, example, strict=True))
    return value


def _stored_settings(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for JSON; code (a function as a setting) stays the job's."""
    try:
        return {
            str(key): encode(value, str(key), inline) for key, value in settings(group).items() if not callable(value)
        }
    except Unstorable as error:
        raise JobError(
            f"optimizer= is {type(optimizer).__name__}, with {error.why} in a parameter group ({error.path}): a checkpoint does not hold it; "
            "use numbers, strings and containers of these"
        ) from error


def optimizer_groups(run: Run) -> list[list[dict[str, Any]]]:
    """The groups of each optimizer, of all stages together, for JSON. Every rank must call it."""
    with run.ranks.together():
        here = _groups_here(run)
    return [_merged(parts) for parts in zip(*run.axes["pp"].gather(here), strict=True)]


def _groups_here(run: Run) -> list[list[dict[str, Any]]]:
    known = names(run)
    found = []
    for index, optimizer in enumerate(run.optimizers):
        lists = per_group(run.schedules[index]) if run.schedules else {}
        found.append([
            {
                "names": [known[id(value)] for value in group["params"] if id(value) in known],
                "settings": _stored_settings(optimizer, group),
                "schedule": {path: values[i] for path, values in lists.items() if i < len(values)},
            }
            for i, group in enumerate(optimizer.param_groups)
        ])  # fmt: skip
    return found


def _merged(parts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One group for each setting."""
    groups: dict[str, dict[str, Any]] = {}
    for group in (each for part in parts for each in part if each["names"]):
        same = groups.setdefault(json.dumps(_set_to(group), sort_keys=True), group | {"names": []})
        same["names"] = list(dict.fromkeys(same["names"] + group["names"]))
    return list(groups.values())


def _set_to(group: Mapping[str, Any]) -> list[Any]:
    return [group["settings"], group["schedule"]]


def require_groups(
    run: Run, stored: Sequence[Sequence[dict[str, Any]]], here: Sequence[Sequence[dict[str, Any]]], folder: Path
) -> None:
    """Refuse a checkpoint whose settings the groups of this rank cannot take up. `here`: `optimizer_groups` of this run."""
    covered = [{name for group in groups for name in group["names"]} for groups in stored]
    if covered != [{name for group in groups for name in group["names"]} for groups in here]:
        raise ForeignCheckpoint(
            f"{folder}: its optimizers cover other parameters than this job's; start anew in another folder"
        )
    known = names(run)
    for optimizer, groups in zip(run.optimizers, stored, strict=True):
        places = {name: place for place, group in enumerate(groups) for name in group["names"]}
        for group in optimizer.param_groups:
            mine = [known[id(value)] for value in group["params"] if id(value) in known]
            other = next(
                (name for name in mine if _set_to(groups[places[name]]) != _set_to(groups[places[mine[0]]])), None
            )
            if other is not None:
                raise ForeignCheckpoint(
                    f"{folder}: {mine[0]} and {other} are in one group of this job's optimizer, and in the checkpoint they have different "
                    "settings; put the groups back as they were, or start anew in another folder with weights= from this one"
                )


def group_settings(
    run: Run, index: int, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """For each live group the settings that its parameters had."""
    return [
        {
            key: _thawed(decode(value, from_inline), group.get(key))
            for key, value in old["settings"].items()
            if key not in _IMPLEMENTATION
        }
        for group, old in zip(optimizer.param_groups, own_groups(run, optimizer, groups), strict=True)
    ]


def own_groups(run: Run, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For each live group the stored one of its parameters; for one that has none the first, to be in step with it."""
    known = names(run)
    by_name = {name: group for group in groups for name in group["names"]}
    spare = groups[0] if groups else {"settings": {}, "schedule": {}}
    return [
        next((by_name[known[id(value)]] for value in group["params"] if id(value) in known), spare)
        for group in optimizer.param_groups
    ]
