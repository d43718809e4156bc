"""Settings of a run's optimizers and schedules: read by name, and changed when a run is resumed with other ones.

A checkpoint brings back what each parameter group was set to. `InitialSettings` keeps what the job asks for now, so that settings which the
user overrides can be applied after loading. Schedules for another length or around other settings are replayed:

    before   the schedule as it was, from the first settings, advanced to the checkpoint's step
    now      the schedule as it is to be, from the settings of now, advanced as far

Where both come to the same, the checkpoint's state stays. Where `before` gives what the checkpoint holds, `now` replaces it. Else
something besides the schedule moves the settings, and a schedule for another length cannot be derived.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.engine.checkpoint import schedule_state
from echelon.engine.checkpoint.param_group_state import map_parameter_names
from echelon.engine.checkpoint.schedule_state import takes_metric
from echelon.engine.group_settings import is_plain_json, read_group_settings
from echelon.engine.optimizers import make_schedules
from echelon.engine.run_state import RunState
from echelon.errors import JobError

#: How far a schedule has come, and what it keeps for each group: not what it is set to.
_PROGRESS_KEYS = frozenset(
    {"last_epoch", "_step_count", "_last_lr", "base_lrs", "T_cur", "_get_lr_called_within_step", "_is_initial", "verbose", "lr_lambdas"}
)  # fmt: skip
#: Names that are no settings of a group or an optimizer.
_NON_SETTINGS = ("groups", "code")


@dataclass(frozen=True, slots=True)
class InitialSettings:
    """What the job sets each parameter group and each optimizer to, before a checkpoint is loaded."""

    groups: tuple[tuple[dict[str, Any], ...], ...]
    attributes: tuple[dict[str, Any], ...]


def initial_settings(run: RunState) -> InitialSettings:
    """Keep what the groups and optimizers are set to now."""
    return InitialSettings(
        tuple(tuple(map(_initial_group_settings, optimizer.param_groups)) for optimizer in run.optimizers),
        tuple(_user_attributes(optimizer) for optimizer in run.optimizers),
    )


def _initial_group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group; a schedule has changed the rate already, and keeps the first one with it."""
    initial = {key: copy.deepcopy(value) for key, value in group.items() if key in read_group_settings(group)}
    if "initial_lr" in initial:
        initial_rate = initial.pop("initial_lr")
        initial["lr"] = initial_rate
    return initial


@cache
def _torch_attributes() -> frozenset[str]:
    """What torch itself keeps in every optimizer."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])))


def _user_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What the user's class keeps in plain attributes (`self.factor = 0.9`)."""
    return {
        key: copy.deepcopy(value)
        for key, value in vars(optimizer).items()
        if key not in _torch_attributes() and not key.startswith("_") and is_plain_json(value)
    }


def _optimizer_prefix(run: RunState, index: int) -> str:
    return "optimizer" if len(run.optimizers) == 1 else f"optimizer{index + 1}"


def optimizer_settings(run: RunState) -> dict[str, Any]:
    """Every setting by name: optimizer.lr, or optimizer.lr[1] for the second of groups that differ in it; optimizer.groups lists which
    parameters are in which. Every rank must call it."""
    names_by_id, local_groups = map_parameter_names(run), []
    for optimizer in run.optimizers:
        groups = []
        for group in optimizer.param_groups:
            members = sorted(names_by_id[id(setting)] for setting in group["params"] if id(setting) in names_by_id)
            values_by_key = {
                key: setting
                for key, setting in read_group_settings(_initial_group_settings(group)).items()
                if is_plain_json(setting)
            }
            groups.append((members, values_by_key))
        local_groups.append((type(optimizer).__name__, groups))
    settings_by_name: dict[str, Any] = {}
    for position, stages in enumerate(zip(*run.axes["pp"].all_gather_object(local_groups), strict=True)):
        prefix = _optimizer_prefix(run, position)
        settings_by_name |= {
            f"{prefix}.{key}": setting for key, setting in _user_attributes(run.optimizers[position]).items()
        }
        settings_by_name[prefix] = stages[0][0]
        groups = sorted(
            (
                (members, values_by_key)
                for _, stage_groups in stages
                for members, values_by_key in stage_groups
                if members
            ),
            key=lambda group: group[0],
        )
        distinct = _distinct_groups([values_by_key for _, values_by_key in groups])
        if len(distinct) > 1:
            settings_by_name[f"{prefix}.groups"] = {
                name: distinct.index(values_by_key) for members, values_by_key in groups for name in members
            }
        for key in sorted({key for values_by_key in distinct for key in values_by_key}):
            values = [values_by_key.get(key) for values_by_key in distinct]
            if all(setting == values[0] for setting in values):
                settings_by_name[f"{prefix}.{key}"] = values[0]
            else:
                settings_by_name |= {f"{prefix}.{key}[{index}]": setting for index, setting in enumerate(values)}
    return settings_by_name


def _distinct_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A stage cuts a group in two: what is set alike is one."""
    distinct: list[dict[str, Any]] = []
    for group in groups:
        if group not in distinct:
            distinct.append(group)
    return distinct


def parameter_settings(settings_by_name: Mapping[str, Any], prefix: str, name: str) -> dict[str, Any]:
    """What `optimizer_settings` found for one parameter, by key."""
    group = settings_by_name.get(f"{prefix}.groups", {}).get(name)
    settings_of_parameter = {}
    for full_name, value in settings_by_name.items():
        key, _, index = full_name.removeprefix(f"{prefix}.").partition("[")
        if full_name.startswith(f"{prefix}.") and key not in _NON_SETTINGS and (not index or index == f"{group}]"):
            settings_of_parameter[key] = value
    return settings_of_parameter


def schedule_settings(run: RunState, total_steps: int | None = None) -> dict[str, Any]:
    """The schedules' settings by name (schedule.T_max). `total_steps`: those of a run of that many steps, before a checkpoint is loaded."""
    schedules = run.schedules
    if total_steps is not None:
        schedules = _replay_schedules(run, initial_settings(run).groups, total_steps, [0] * len(run.schedules))[1]
    settings_by_name: dict[str, Any] = {}
    for index, schedule in enumerate(schedules):
        prefix = "lr_schedule" if len(schedules) == 1 else f"lr_schedule{index + 1}"
        settings_by_name[prefix] = type(schedule).__name__
        try:
            state = schedule_state.read_state(schedule)
        except JobError:  # saving it is refused
            continue
        settings_by_name |= dict(_plain_leaves(state, prefix))
    return settings_by_name


def _plain_leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Plain values in a schedule's state, and in those of the schedules that it holds, by path."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key not in _PROGRESS_KEYS:
                yield from _plain_leaves(value, f"{path}.{key}" if key != schedule_state.OBJECT_STATE_KEY else path)
    elif is_plain_json(state):
        yield path, list(state) if isinstance(state, tuple) else state
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _plain_leaves(value, f"{path}.{index}")


def apply_overrides(run: RunState, initial: InitialSettings, saved: Mapping[str, Any], changed_names: Set[str]) -> bool:
    """Set what `changed_names` names as the job has it now, and rebuild schedules around it; whether any was. `saved`: the settings with which
    the checkpoint was written."""
    schedules_replaced = any(name.startswith("lr_schedule") for name in changed_names)
    length_changed = saved.get("total_steps", run.total_steps) != run.total_steps
    keys = [_keys_below(changed_names, _optimizer_prefix(run, index)) for index in range(len(run.optimizers))]
    for optimizer, changed_keys, values in zip(run.optimizers, keys, initial.attributes, strict=True):
        for key in changed_keys & values.keys():
            setattr(optimizer, key, copy.deepcopy(values[key]))
    if not (schedules_replaced or (length_changed and run.schedules) or any(keys)):
        return False
    if run.schedules or schedules_replaced:
        return _rebuild_schedules(
            run, initial, saved, keys, schedules_replaced=schedules_replaced, length_changed=length_changed
        )
    for optimizer, groups, changed_keys in zip(run.optimizers, initial.groups, keys, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            _set_keys(group, values, changed_keys & values.keys())
    return False


def _keys_below(names: Set[str], prefix: str) -> set[str]:
    return {name.removeprefix(f"{prefix}.").partition("[")[0] for name in names if name.startswith(f"{prefix}.")}


def _set_key(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(float(value))
    else:
        group[key] = copy.deepcopy(value)


def _set_keys(group: dict[str, Any], new_values: Mapping[str, Any], keys: Set[str]) -> None:
    for key in keys:
        if key in new_values:
            _set_key(group, key, new_values[key])
        else:
            group.pop(key, None)


def _replay_schedules(
    run: RunState, groups: Sequence[Sequence[Mapping[str, Any]]], total_steps: int, step_counts: Sequence[int]
) -> tuple[list[Optimizer], list[Any]]:
    """Copies of the optimizers with these settings, and their schedules for `total_steps` steps, advanced by `step_counts`."""
    copies = []
    for optimizer, group_settings in zip(run.optimizers, groups, strict=True):
        copy_of_optimizer = object.__new__(type(optimizer))
        vars(copy_of_optimizer).update({key: value for key, value in vars(optimizer).items() if key != "step"})
        copy_of_optimizer.param_groups = [
            {key: value for key, value in group.items() if key not in read_group_settings(group)}
            | copy.deepcopy(dict(settings_of_group))
            for group, settings_of_group in zip(optimizer.param_groups, group_settings, strict=True)
        ]
        copies.append(copy_of_optimizer)
    return copies, _make_advanced_schedules(run, copies, total_steps, step_counts)


def _make_advanced_schedules(
    run: RunState, optimizers: list[Optimizer], total_steps: int, step_counts: Sequence[int]
) -> list[Any]:
    with run.schedule_read_check.watch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedules expect a step of their optimizer before each of theirs
        schedules = make_schedules(run.job, optimizers, total_steps)
        for schedule, count in zip(schedules, step_counts, strict=True):
            for _ in range(0 if takes_metric(schedule) else count):
                schedule.step()
    return schedules


def _rebuild_schedules(
    run: RunState,
    initial: InitialSettings,
    saved: Mapping[str, Any],
    keys: Sequence[Set[str]],
    *,
    schedules_replaced: bool,
    length_changed: bool,
) -> bool:
    old_schedules = run.schedules
    step_counts = [int(getattr(schedule, "last_epoch", run.step_number)) for schedule in old_schedules]
    if schedules_replaced:  # what was loaded, if anything, is of other schedules
        step_counts = [run.step_number] * len(old_schedules)
    first_settings = [_first_settings(run, index, initial, saved) for index in range(len(run.optimizers))]
    loaded = [[read_group_settings(group) for group in optimizer.param_groups] for optimizer in run.optimizers]
    replayed = (
        None
        if schedules_replaced
        else _replay_schedules(run, first_settings, saved.get("total_steps", run.total_steps), step_counts)
    )
    for optimizer, groups in zip(run.optimizers, initial.groups, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            _set_keys(group, values, read_group_settings(group).keys() | values.keys())
    # Made over the optimizers themselves: a schedule holds the one that it steps.
    run.schedules = _make_advanced_schedules(run, run.optimizers, run.total_steps, step_counts)
    rebuilt = False
    for index, optimizer in enumerate(run.optimizers):
        new_settings = [dict(read_group_settings(group)) for group in optimizer.param_groups]
        old_settings = (
            [read_group_settings(group) for group in replayed[0][index].param_groups]
            if replayed is not None
            else first_settings[index]
        )
        is_same = (
            replayed is not None
            and _same_settings(old_settings, new_settings)
            and _same_schedule(replayed[1][index], run.schedules[index])
        )
        follows_metric = replayed is not None and takes_metric(old_schedules[index])
        if replayed is None:
            moved_keys = [
                _keys_moved_by_schedule(*settings_of_group)
                for settings_of_group in zip(
                    loaded[index], old_settings, new_settings, initial.groups[index], strict=True
                )
            ]
        elif follows_metric:
            moved_keys = [set(keys[index]) | ({"initial_lr"} if "lr" in keys[index] else set()) for _ in new_settings]
        elif not is_same and _same_settings(old_settings, loaded[index]):
            moved_keys = [
                _differing_keys(*settings_of_group)
                for settings_of_group in zip(old_settings, new_settings, strict=True)
            ]
        elif not is_same and length_changed:
            raise JobError(_irreproducible_message(run, old_settings, loaded[index], saved))
        else:  # the optimizer moves its own settings
            moved_keys = [set(keys[index]) | ({"initial_lr"} if "lr" in keys[index] else set()) for _ in new_settings]
        for group, old_group, new_group, adopted in zip(
            optimizer.param_groups, loaded[index], new_settings, moved_keys, strict=True
        ):
            _set_keys(
                group,
                {**old_group, **{key: new_group[key] for key in adopted & new_group.keys()}},
                old_group.keys() | new_group.keys(),
            )
            for key in adopted - new_group.keys():
                group.pop(key, None)
        if replayed is not None and (is_same or follows_metric):
            run.schedules[index] = old_schedules[index]
        else:
            rebuilt = True
    return rebuilt


def _first_settings(
    run: RunState, index: int, initial: InitialSettings, saved: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What each group was set to before a schedule moved it, by the record of the checkpoint."""
    names_by_id, first_settings = map_parameter_names(run), []
    for group, initial_group in zip(run.optimizers[index].param_groups, initial.groups[index], strict=True):
        name = next((names_by_id[id(parameter)] for parameter in group["params"] if id(parameter) in names_by_id), "")
        saved_settings = parameter_settings(saved, _optimizer_prefix(run, index), name)
        first_group = copy.deepcopy(initial_group)
        for key in first_group.keys() & saved_settings.keys():
            if is_plain_json(read_group_settings({key: first_group[key]})[key]):
                _set_key(
                    first_group,
                    key,
                    tuple(saved_settings[key]) if isinstance(first_group[key], tuple) else saved_settings[key],
                )
        first_settings.append(first_group)
    return first_settings


def _keys_moved_by_schedule(
    loaded: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any], initial: Mapping[str, Any]
) -> set[str]:
    """Settings that a schedule moves or moved: those that differ from the first ones, in the checkpoint or now."""
    keys = (
        {"lr", "initial_lr"}
        | _differing_keys(read_group_settings(old), loaded)
        | _differing_keys(read_group_settings(initial), new)
    )
    return keys & (loaded.keys() | new.keys())


def _differing_keys(left: Mapping[str, Any], right: Mapping[str, Any]) -> set[str]:
    return {key for key in left.keys() | right.keys() if not _is_close(left.get(key), right.get(key))}


def _same_settings(left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]) -> bool:
    return not any(_differing_keys(*pair) for pair in zip(left, right, strict=True))


def _is_close(left: Any, right: Any) -> bool:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_is_close(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_is_close, left, right))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right))
    if isinstance(left, float | int) and isinstance(right, float | int):
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-300) or (left != left and right != right)
    return callable(left) or bool(left == right)


def _same_schedule(left: Any, right: Any) -> bool:
    return _is_close(schedule_state.read_state(left), schedule_state.read_state(right))


def _irreproducible_message(
    run: RunState, replayed: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]
) -> str:
    index = next(
        index_of_group
        for index_of_group, pair in enumerate(zip(replayed, loaded, strict=True))
        if _differing_keys(*pair)
    )
    key = sorted(_differing_keys(replayed[index], loaded[index]))[0]
    return (
        f"lr_schedule=: cannot be rebuilt for {run.total_steps} steps ({saved.get('total_steps')} before): at step {run.step_number} it gives "
        f"{key}={replayed[index].get(key)} for the old length, and the checkpoint has {loaded[index].get(key)}, so something else changes {key} as well; "
        "keep the length, give a schedule that does not depend on it, or start over in another folder with weights= from this one"
    )
