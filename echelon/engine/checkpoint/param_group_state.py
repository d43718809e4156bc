"""What parameter groups are set to, by parameter name.

A stage makes groups of its own parameters: how many there are and which is the first differs from stage to stage, and from plan to
plan. So a checkpoint lists for each setting which parameters have it, and a group takes up what its own parameters had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.engine.checkpoint.group_settings import IMPLEMENTATION_KEYS, read_group_settings
from echelon.engine.checkpoint.json_values import UnstorableValue, decode, decode_inline, encode, encode_inline
from echelon.engine.checkpoint.schedule_state import collect_group_values
from echelon.engine.run_state import RunState
from echelon.errors import IncompatibleCheckpointError, JobError


def map_parameter_names(run: RunState) -> dict[int, str]:
    """Parameter identity -> its first name; also of the loss's own, and of the whole tensors that stand for a parameter in its optimizer."""
    named_parameters = [*run.model.named_parameters(), *run.loss_parameters.items()]
    named_parameters += [
        pair for optimizer in run.full_tensor_optimizers.values() for pair in optimizer.parameters.items()
    ]
    return {id(parameter): name for name, parameter in reversed(named_parameters)}


def optimizer_entries(run: RunState, optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """What an optimizer keeps on this rank for each parameter."""
    names_by_id = map_parameter_names(run)
    return [
        (names_by_id[id(parameter)], entry)
        for parameter, entry in optimizer.state.items()
        if id(parameter) in names_by_id
    ]


def _restore_type(value: Any, example: Any) -> Any:
    """What `read_group_settings` made plain, as what it was."""
    if isinstance(example, Tensor) and type(value) in (bool, int, float, complex):
        return torch.full_like(example, value)
    if type(value) in (list, tuple) and isinstance(example, list | tuple) and len(example) == len(value):
        return type(value)(_restore_type(item, example_item) for item, example_item in zip(value, example, strict=True))
    return value


def _encode_settings(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for JSON; code (a function as a setting) stays the job's."""
    try:
        return {
            str(key): encode(value, str(key), encode_inline)
            for key, value in read_group_settings(group).items()
            if not callable(value)
        }
    except UnstorableValue as error:
        raise JobError(
            f"optimizer= is {type(optimizer).__name__}, with {error.reason} in a parameter group ({error.path}): a checkpoint does not hold it; "
            "use numbers, strings and containers of these"
        ) from error


def gather_optimizer_groups(run: RunState) -> list[list[dict[str, Any]]]:
    """The groups of each optimizer, of all stages together, for JSON. Every rank must call it."""
    with run.ranks.raise_on_all_ranks():
        local_groups = _local_groups(run)
    return [
        _merge_groups(stage_groups)
        for stage_groups in zip(*run.axes["pp"].all_gather_object(local_groups), strict=True)
    ]


def _local_groups(run: RunState) -> list[list[dict[str, Any]]]:
    names_by_id = map_parameter_names(run)
    groups = []
    for index, optimizer in enumerate(run.optimizers):
        schedule_values = collect_group_values(run.schedules[index]) if run.schedules else {}
        groups.append([
            {
                "names": [names_by_id[id(value)] for value in group["params"] if id(value) in names_by_id],
                "settings": _encode_settings(optimizer, group),
                "schedule": {path: values[i] for path, values in schedule_values.items() if i < len(values)},
            }
            for i, group in enumerate(optimizer.param_groups)
        ])  # fmt: skip
    return groups


def _merge_groups(stage_groups: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One group for each setting."""
    groups: dict[str, dict[str, Any]] = {}
    for group in (stage_group for stage in stage_groups for stage_group in stage if stage_group["names"]):
        merged = groups.setdefault(json.dumps(_group_key(group), sort_keys=True), group | {"names": []})
        merged["names"] = list(dict.fromkeys(merged["names"] + group["names"]))
    return list(groups.values())


def _group_key(group: Mapping[str, Any]) -> list[Any]:
    return [group["settings"], group["schedule"]]


def require_matching_groups(
    run: RunState,
    stored_groups: Sequence[Sequence[dict[str, Any]]],
    current_groups: Sequence[Sequence[dict[str, Any]]],
    folder: Path,
) -> None:
    """Refuse a checkpoint whose settings the groups of this rank cannot take up. `current_groups`: `gather_optimizer_groups` of this run."""
    stored_names = [
        {name for group in optimizer_groups for name in group["names"]} for optimizer_groups in stored_groups
    ]
    if stored_names != [
        {name for group in optimizer_groups for name in group["names"]} for optimizer_groups in current_groups
    ]:
        raise IncompatibleCheckpointError(
            f"{folder}: its optimizers cover other parameters than this job's; start anew in another folder"
        )
    names_by_id = map_parameter_names(run)
    for optimizer, optimizer_groups in zip(run.optimizers, stored_groups, strict=True):
        group_positions = {name: position for position, group in enumerate(optimizer_groups) for name in group["names"]}
        for group in optimizer.param_groups:
            local_names = [names_by_id[id(parameter)] for parameter in group["params"] if id(parameter) in names_by_id]
            differing = next(
                (
                    name
                    for name in local_names
                    if _group_key(optimizer_groups[group_positions[name]])
                    != _group_key(optimizer_groups[group_positions[local_names[0]]])
                ),
                None,
            )
            if differing is not None:
                raise IncompatibleCheckpointError(
                    f"{folder}: {local_names[0]} and {differing} are in one group of this job's optimizer, and in the checkpoint they have different "
                    "settings; put the groups back as they were, or start anew in another folder with weights= from this one"
                )


def decode_group_settings(
    run: RunState, index: int, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """For each live group the settings that its parameters had."""
    return [
        {
            key: _restore_type(decode(value, decode_inline), group.get(key))
            for key, value in stored_group["settings"].items()
            if key not in IMPLEMENTATION_KEYS
        }
        for group, stored_group in zip(optimizer.param_groups, match_stored_groups(run, optimizer, groups), strict=True)
    ]


def match_stored_groups(
    run: RunState, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """For each live group the stored one of its parameters; for one that has none the first, to be in step with it."""
    names_by_id = map_parameter_names(run)
    by_name = {name: group for group in groups for name in group["names"]}
    default_group = groups[0] if groups else {"settings": {}, "schedule": {}}
    return [
        next(
            (by_name[names_by_id[id(parameter)]] for parameter in group["params"] if id(parameter) in names_by_id),
            default_group,
        )
        for group in optimizer.param_groups
    ]
