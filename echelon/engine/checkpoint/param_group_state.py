"""Settings of parameter groups, by parameter name: stages and plans group parameters differently, so a checkpoint lists the parameters
of each combination of settings, and a group restores what its own parameters had."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.engine.checkpoint.json_values import UnstorableValue, decode, decode_inline, encode, encode_inline
from echelon.engine.checkpoint.schedule_state import collect_group_values
from echelon.engine.group_settings import IMPLEMENTATION_KEYS, read_group_settings
from echelon.engine.run_state import RunState
from echelon.errors import IncompatibleCheckpointError, JobError

#: Parameter groups as JSON, and those of each optimizer.
_Groups = Sequence[dict[str, Any]]
OptimizerGroups = Sequence[_Groups]


def map_parameter_names(run: RunState) -> dict[int, str]:
    """Id -> first name of every parameter: the model's, the loss's, and the full tensors that optimizers step in their place."""
    named_parameters = [*run.model.named_parameters(), *run.loss_parameters.items()]
    for optimizer in run.full_tensor_optimizers.values():
        named_parameters += optimizer.parameters.items()
    return {id(parameter): name for name, parameter in reversed(named_parameters)}


def optimizer_entries(run: RunState, optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """An optimizer's state on this rank, by parameter name."""
    names_by_id = map_parameter_names(run)
    entries = optimizer.state.items()
    return [(names_by_id[id(parameter)], entry) for parameter, entry in entries if id(parameter) in names_by_id]


def gather_optimizer_groups(run: RunState) -> OptimizerGroups:
    """The groups of each optimizer, merged over all stages. Every rank must call it."""
    with run.ranks.raise_on_all_ranks():
        local_groups = _encode_local_groups(run)
    return [_merge_groups(g) for g in zip(*run.axes["pp"].all_gather_object(local_groups), strict=True)]


def _encode_local_groups(run: RunState) -> OptimizerGroups:
    names_by_id = map_parameter_names(run)
    groups = []
    for index, optimizer in enumerate(run.optimizers):
        schedule_values = collect_group_values(run.schedules[index]) if run.schedules else {}
        groups.append([
            {
                "names": _names_in_group(group, names_by_id),
                "settings": _encode_settings(optimizer, group),
                "schedule": {path: values[i] for path, values in schedule_values.items() if i < len(values)},
            }
            for i, group in enumerate(optimizer.param_groups)
        ])  # fmt: skip
    return groups


def _names_in_group(group: Mapping[str, Any], names_by_id: Mapping[int, str]) -> list[str]:
    return [names_by_id[id(parameter)] for parameter in group["params"] if id(parameter) in names_by_id]


def _encode_settings(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings as JSON, without functions: those are the job's."""
    settings = {str(key): value for key, value in read_group_settings(group).items() if not callable(value)}
    try:
        return {key: encode(value, key, encode_inline) for key, value in settings.items()}
    except UnstorableValue as error:
        problem = f"with {error.reason} in a parameter group ({error.path}), which a checkpoint cannot hold"
        remedy = "use numbers, strings and containers of these"
        raise JobError(f"optimizer= is {type(optimizer).__name__}, {problem}; {remedy}") from error


def _merge_groups(stage_groups: OptimizerGroups) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for group in (stage_group for stage in stage_groups for stage_group in stage if stage_group["names"]):
        merged = groups.setdefault(json.dumps(_settings_of(group), sort_keys=True), group | {"names": []})
        merged["names"] = list(dict.fromkeys(merged["names"] + group["names"]))
    return list(groups.values())


def _settings_of(group: Mapping[str, Any]) -> list[Any]:
    return [group["settings"], group["schedule"]]


def _trained_names(optimizers: OptimizerGroups) -> list[set[str]]:
    return [{name for group in groups for name in group["names"]} for groups in optimizers]


def require_matching_groups(run: RunState, stored: OptimizerGroups, current: OptimizerGroups, folder: Path) -> None:
    """Refuse a checkpoint whose settings this run's groups (`gather_optimizer_groups`) cannot restore."""
    if _trained_names(stored) != _trained_names(current):
        problem = "its optimizers train other parameters than this job's; start a new run in another folder"
        raise IncompatibleCheckpointError(f"{folder}: {problem}")
    names_by_id = map_parameter_names(run)
    for optimizer, groups in zip(run.optimizers, stored, strict=True):
        settings = {name: _settings_of(group) for group in groups for name in group["names"]}
        for group in optimizer.param_groups:
            names = _names_in_group(group, names_by_id)
            differing = next((name for name in names if settings[name] != settings[names[0]]), None)
            if differing is not None:
                problem = f"{names[0]} and {differing} share a group of this job's optimizer, but have different settings there"
                remedy = "restore the groups, or start a new run with weights= from it"
                raise IncompatibleCheckpointError(f"{folder}: {problem}; {remedy}")


def decode_group_settings(run: RunState, optimizer: Optimizer, stored_groups: _Groups) -> list[dict[str, Any]]:
    """The stored settings for each group of `optimizer`."""
    settings = []
    for group, stored in zip(optimizer.param_groups, match_stored_groups(run, optimizer, stored_groups), strict=True):
        encoded = {key: value for key, value in stored["settings"].items() if key not in IMPLEMENTATION_KEYS}
        settings.append({k: _restore_type(decode(v, decode_inline), group.get(k)) for k, v in encoded.items()})
    return settings


def _restore_type(value: Any, example: Any) -> Any:
    """A stored setting as the type that the group has: a number becomes a tensor where `example` is one."""
    if isinstance(example, Tensor) and type(value) in (bool, int, float, complex):
        return torch.full_like(example, value)
    if type(value) in (list, tuple) and isinstance(example, list | tuple) and len(example) == len(value):
        return type(value)(_restore_type(item, example_item) for item, example_item in zip(value, example, strict=True))
    return value


def match_stored_groups(run: RunState, optimizer: Optimizer, groups: _Groups) -> list[Mapping[str, Any]]:
    """The stored group of each live group's parameters; the first for a group without any, so that it stays in step."""
    names_by_id = map_parameter_names(run)
    by_name = {name: group for group in groups for name in group["names"]}
    default_group = groups[0] if groups else {"settings": {}, "schedule": {}}
    first_names = (next(iter(_names_in_group(group, names_by_id)), None) for group in optimizer.param_groups)
    return [default_group if name is None else by_name[name] for name in first_names]
