"""Settings of parameter groups, by parameter name.

Each pipeline stage makes groups of its own parameters: their number and order differ from stage to stage, and from plan to plan. So a
checkpoint lists which parameters have each combination of settings, and a group restores what its own parameters had.
"""

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


def gather_optimizer_groups(run: RunState) -> list[list[dict[str, Any]]]:
    """The groups of each optimizer, merged over all stages, as JSON. Every rank must call it."""
    with run.ranks.raise_on_all_ranks():
        local_groups = _encode_local_groups(run)
    return [
        _merge_groups(stage_groups)
        for stage_groups in zip(*run.axes["pp"].all_gather_object(local_groups), strict=True)
    ]


def _encode_local_groups(run: RunState) -> list[list[dict[str, Any]]]:
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
        raise JobError(
            f"optimizer= is {type(optimizer).__name__}, with {error.reason} in a parameter group ({error.path}), which a checkpoint cannot hold; "
            "use numbers, strings and containers of these"
        ) from error


def _merge_groups(stage_groups: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One group per combination of settings."""
    groups: dict[str, dict[str, Any]] = {}
    for group in (stage_group for stage in stage_groups for stage_group in stage if stage_group["names"]):
        merged = groups.setdefault(json.dumps(_settings_of(group), sort_keys=True), group | {"names": []})
        merged["names"] = list(dict.fromkeys(merged["names"] + group["names"]))
    return list(groups.values())


def _settings_of(group: Mapping[str, Any]) -> list[Any]:
    return [group["settings"], group["schedule"]]


def require_matching_groups(
    run: RunState,
    stored_groups: Sequence[Sequence[dict[str, Any]]],
    current_groups: Sequence[Sequence[dict[str, Any]]],
    folder: Path,
) -> None:
    """Refuse a checkpoint whose settings this run's groups (`gather_optimizer_groups`) cannot restore."""
    stored_names, current_names = (
        [{name for group in optimizer_groups for name in group["names"]} for optimizer_groups in groups]
        for groups in (stored_groups, current_groups)
    )
    if stored_names != current_names:
        raise IncompatibleCheckpointError(
            f"{folder}: its optimizers train other parameters than this job's; start a new run in another folder"
        )
    names_by_id = map_parameter_names(run)
    for optimizer, optimizer_groups in zip(run.optimizers, stored_groups, strict=True):
        settings = {name: _settings_of(group) for group in optimizer_groups for name in group["names"]}
        for group in optimizer.param_groups:
            names = _names_in_group(group, names_by_id)
            differing = next((name for name in names if settings[name] != settings[names[0]]), None)
            if differing is not None:
                raise IncompatibleCheckpointError(
                    f"{folder}: {names[0]} and {differing} share a group of this job's optimizer, and have different settings in the checkpoint; "
                    "restore the groups, or start a new run in another folder with weights= from this one"
                )


def decode_group_settings(
    run: RunState, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The stored settings for each group of `optimizer`."""
    return [
        {
            key: _restore_type(decode(value, decode_inline), group.get(key))
            for key, value in stored_group["settings"].items()
            if key not in IMPLEMENTATION_KEYS
        }
        for group, stored_group in zip(optimizer.param_groups, match_stored_groups(run, optimizer, groups), strict=True)
    ]


def _restore_type(value: Any, example: Any) -> Any:
    """A stored setting as the type that the group has: a number becomes a tensor where `example` is one."""
    if isinstance(example, Tensor) and type(value) in (bool, int, float, complex):
        return torch.full_like(example, value)
    if type(value) in (list, tuple) and isinstance(example, list | tuple) and len(example) == len(value):
        return type(value)(_restore_type(item, example_item) for item, example_item in zip(value, example, strict=True))
    return value


def match_stored_groups(
    run: RunState, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The stored group of each live group's parameters; the first for a group without any, so that it stays in step."""
    names_by_id = map_parameter_names(run)
    by_name = {name: group for group in groups for name in group["names"]}
    default_group = groups[0] if groups else {"settings": {}, "schedule": {}}
    first_names = (next(iter(_names_in_group(group, names_by_id)), None) for group in optimizer.param_groups)
    return [default_group if name is None else by_name[name] for name in first_names]
