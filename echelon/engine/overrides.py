"""Settings of a run's optimizers and schedules: read by name, and changed when a run is resumed with others.

`InitialSettings` keeps what the job asks for; what the user overrides is applied after loading. Schedules for another length or around other
settings are replayed: `before`, the old schedule from the first settings to the checkpoint's step, and `now`, the new one. Where both agree, the
checkpoint's state stays. Where `before` gives what the checkpoint holds, `now` replaces it. Otherwise something else moves the settings.
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

_Settings = Mapping[str, Any]
_Groups = Sequence[_Settings]
#: A schedule's progress, and what it keeps for each group: no settings.
_PROGRESS_KEYS = frozenset(
    {"last_epoch", "_step_count", "_last_lr", "base_lrs", "T_cur", "_get_lr_called_within_step", "_is_initial", "verbose", "lr_lambdas"}
)  # fmt: skip
_NON_SETTINGS = ("groups", "code")


@dataclass(frozen=True, slots=True)
class InitialSettings:
    """What the job sets each parameter group and each optimizer to, before a checkpoint is loaded."""

    groups: tuple[tuple[dict[str, Any], ...], ...]
    attributes: tuple[dict[str, Any], ...]


def initial_settings(run: RunState) -> InitialSettings:
    """The current settings."""
    groups = tuple(tuple(map(_initial_group_settings, optimizer.param_groups)) for optimizer in run.optimizers)
    return InitialSettings(groups, tuple(map(_user_attributes, run.optimizers)))


def _initial_group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group, with the first rate, which a schedule keeps."""
    initial = {key: copy.deepcopy(value) for key, value in group.items() if key in read_group_settings(group)}
    if "initial_lr" in initial:
        initial["lr"] = initial.pop("initial_lr")
    return initial


@cache
def _torch_attributes() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])))


def _user_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Plain attributes of the user's class (`self.factor = 0.9`)."""
    own = {n: v for n, v in vars(optimizer).items() if n not in _torch_attributes() and not n.startswith("_")}
    return {name: copy.deepcopy(value) for name, value in own.items() if is_plain_json(value)}


def _prefix(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name}{index + 1}"


def _optimizer_prefix(run: RunState, index: int) -> str:
    return _prefix("optimizer", index, len(run.optimizers))


def optimizer_settings(run: RunState) -> dict[str, Any]:
    """Every setting by name: optimizer.lr, or optimizer.lr[1] for the second of differing groups (optimizer.groups). Every rank must call it."""
    names_by_id, local_groups = map_parameter_names(run), []
    for optimizer in run.optimizers:
        groups = []
        for group in optimizer.param_groups:
            members = sorted(names_by_id[id(p)] for p in group["params"] if id(p) in names_by_id)
            values = read_group_settings(_initial_group_settings(group))
            groups.append((members, {key: value for key, value in values.items() if is_plain_json(value)}))
        local_groups.append((type(optimizer).__name__, groups))
    settings: dict[str, Any] = {}
    for index, stages in enumerate(zip(*run.axes["pp"].all_gather_object(local_groups), strict=True)):
        prefix = _optimizer_prefix(run, index)
        settings |= {f"{prefix}.{key}": value for key, value in _user_attributes(run.optimizers[index]).items()}
        settings[prefix] = stages[0][0]
        groups = sorted((group for _, stage in stages for group in stage if group[0]), key=lambda group: group[0])
        distinct: list[dict[str, Any]] = []  # groups with equal settings are one: stages cut groups in two
        for _, values in groups:
            if values not in distinct:
                distinct.append(values)
        if len(distinct) > 1:
            settings[f"{prefix}.groups"] = {n: distinct.index(values) for members, values in groups for n in members}
        for key in sorted({key for values in distinct for key in values}):
            of_groups = [values.get(key) for values in distinct]
            if all(value == of_groups[0] for value in of_groups):
                settings[f"{prefix}.{key}"] = of_groups[0]
            else:
                settings |= {f"{prefix}.{key}[{group}]": value for group, value in enumerate(of_groups)}
    return settings


def parameter_settings(settings: Mapping[str, Any], prefix: str, name: str) -> dict[str, Any]:
    """The `optimizer_settings` of one parameter, by key."""
    group = settings.get(f"{prefix}.groups", {}).get(name)
    of_parameter = {}
    for full_name, value in settings.items():
        key, _, index = full_name.removeprefix(f"{prefix}.").partition("[")
        if full_name.startswith(f"{prefix}.") and key not in _NON_SETTINGS and (not index or index == f"{group}]"):
            of_parameter[key] = value
    return of_parameter


def schedule_settings(run: RunState, total_steps: int | None = None) -> dict[str, Any]:
    """The schedules' settings by name (lr_schedule.T_max). `total_steps`: those of a run of that many steps, before a checkpoint is loaded."""
    schedules, settings = run.schedules, dict[str, Any]()
    if total_steps is not None:
        _, schedules = _replay_schedules(run, initial_settings(run).groups, total_steps, [0] * len(run.schedules))
    for index, schedule in enumerate(schedules):
        prefix = _prefix("lr_schedule", index, len(schedules))
        settings[prefix] = type(schedule).__name__
        try:
            state = schedule_state.read_state(schedule)
        except JobError:  # saving it is refused
            continue
        settings |= dict(_plain_leaves(state, prefix))
    return settings


def _plain_leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Plain values in the state of a schedule and of those that it holds, by path."""
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
    """Apply the job's values of `changed_names`; returns whether schedules were rebuilt. `saved`: the settings in the checkpoint."""
    schedules_replaced = any(name.startswith("lr_schedule") for name in changed_names)
    length_changed = saved.get("total_steps", run.total_steps) != run.total_steps
    keys: list[set[str]] = []
    for index, optimizer in enumerate(run.optimizers):
        prefix, attributes = f"{_optimizer_prefix(run, index)}.", initial.attributes[index]
        names = {name.removeprefix(prefix) for name in changed_names if name.startswith(prefix)}
        keys.append({name.partition("[")[0] for name in names})
        for key in keys[index] & attributes.keys():
            setattr(optimizer, key, copy.deepcopy(attributes[key]))
    if schedules_replaced or (run.schedules and (length_changed or any(keys))):
        return _rebuild_schedules(run, initial, saved, keys, replaced=schedules_replaced, length_changed=length_changed)
    for optimizer, groups, changed_keys in zip(run.optimizers, initial.groups, keys, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            _set_keys(group, values, changed_keys & values.keys())
    return False


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
    run: RunState, groups: Sequence[_Groups], total_steps: int, step_counts: Sequence[int]
) -> tuple[list[Optimizer], list[Any]]:
    """Copies of the optimizers with these settings, and their schedules for `total_steps` steps, advanced by `step_counts`."""
    copies = []
    for optimizer, group_settings in zip(run.optimizers, groups, strict=True):
        optimizer_copy = object.__new__(type(optimizer))
        vars(optimizer_copy).update({key: value for key, value in vars(optimizer).items() if key != "step"})
        optimizer_copy.param_groups = []
        for group, settings in zip(optimizer.param_groups, group_settings, strict=True):
            other = {key: value for key, value in group.items() if key not in read_group_settings(group)}
            optimizer_copy.param_groups.append(other | copy.deepcopy(dict(settings)))
        copies.append(optimizer_copy)
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
    run: RunState, initial: InitialSettings, saved: Mapping[str, Any], keys: Sequence[Set[str]], *, replaced: bool,
    length_changed: bool,
) -> bool:  # fmt: skip
    """`replaced`: what was loaded, if anything, is of other schedules."""
    old_schedules = run.schedules
    step_counts = [int(getattr(schedule, "last_epoch", run.step_number)) for schedule in old_schedules]
    step_counts = [run.step_number] * len(old_schedules) if replaced else step_counts
    first = [_first_settings(run, index, initial, saved) for index in range(len(run.optimizers))]
    loaded = [[read_group_settings(group) for group in optimizer.param_groups] for optimizer in run.optimizers]
    old_total_steps = saved.get("total_steps", run.total_steps)
    replayed = None if replaced else _replay_schedules(run, first, old_total_steps, step_counts)
    for optimizer, groups in zip(run.optimizers, initial.groups, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            _set_keys(group, values, read_group_settings(group).keys() | values.keys())
    # Made over the optimizers themselves: a schedule holds the one that it steps.
    run.schedules = _make_advanced_schedules(run, run.optimizers, run.total_steps, step_counts)
    rebuilt = False
    for index, optimizer in enumerate(run.optimizers):
        new = [dict(read_group_settings(group)) for group in optimizer.param_groups]
        # What the optimizer moves by itself stays.
        adopted = [set(keys[index]) | ({"initial_lr"} if "lr" in keys[index] else set())] * len(new)
        keeps_old_schedule = False
        if replayed is None:
            records = zip(loaded[index], first[index], new, initial.groups[index], strict=True)
            adopted = [_keys_moved_by_schedule(*settings) for settings in records]
        else:
            old = [read_group_settings(group) for group in replayed[0][index].param_groups]
            states = map(schedule_state.read_state, (replayed[1][index], run.schedules[index]))
            is_same = _same_settings(old, new) and _is_close(*states)
            keeps_old_schedule = is_same or takes_metric(old_schedules[index])
            if not keeps_old_schedule and _same_settings(old, loaded[index]):
                adopted = [_differing_keys(*settings) for settings in zip(old, new, strict=True)]
            elif not keeps_old_schedule and length_changed:
                raise JobError(_irreproducible_message(run, old, loaded[index], old_total_steps))
        for group, before, after, adopted_keys in zip(optimizer.param_groups, loaded[index], new, adopted, strict=True):
            values = {**before, **{key: after[key] for key in adopted_keys & after.keys()}}
            values = {key: value for key, value in values.items() if key in after or key not in adopted_keys}
            _set_keys(group, values, before.keys() | after.keys())
        if keeps_old_schedule:
            run.schedules[index] = old_schedules[index]
        rebuilt |= not keeps_old_schedule
    return rebuilt


def _first_settings(run: RunState, index: int, initial: InitialSettings, saved: _Settings) -> list[dict[str, Any]]:
    names_by_id, first_settings = map_parameter_names(run), []
    for group, initial_group in zip(run.optimizers[index].param_groups, initial.groups[index], strict=True):
        name = next((names_by_id[id(p)] for p in group["params"] if id(p) in names_by_id), "")
        saved_settings = parameter_settings(saved, _optimizer_prefix(run, index), name)
        first_group = copy.deepcopy(initial_group)
        for key in first_group.keys() & saved_settings.keys():
            if is_plain_json(read_group_settings({key: first_group[key]})[key]):
                value = saved_settings[key]
                _set_key(first_group, key, tuple(value) if isinstance(first_group[key], tuple) else value)
        first_settings.append(first_group)
    return first_settings


def _keys_moved_by_schedule(loaded: _Settings, old: _Settings, new: _Settings, initial: _Settings) -> set[str]:
    """Settings that a schedule moves or moved: those that differ from the first ones, in the checkpoint or now."""
    moved_before = _differing_keys(read_group_settings(old), loaded)
    moved_now = _differing_keys(read_group_settings(initial), new)
    return ({"lr", "initial_lr"} | moved_before | moved_now) & (loaded.keys() | new.keys())


def _differing_keys(left: _Settings, right: _Settings) -> set[str]:
    return {key for key in left.keys() | right.keys() if not _is_close(left.get(key), right.get(key))}


def _same_settings(left: _Groups, right: _Groups) -> bool:
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


def _irreproducible_message(run: RunState, replayed: _Groups, loaded: _Groups, old_total_steps: int) -> str:
    index = next(i for i, pair in enumerate(zip(replayed, loaded, strict=True)) if _differing_keys(*pair))
    key = min(_differing_keys(replayed[index], loaded[index]))
    values = f"{key}={replayed[index].get(key)} for the old length, and the checkpoint has {loaded[index].get(key)}"
    problem = f"cannot be rebuilt for {run.total_steps} steps ({old_total_steps} before): at step {run.step_number} it gives {values}"
    remedy = "keep the length, give a schedule that does not depend on it, or start a new run with weights= from it"
    return f"lr_schedule=: {problem}, so something else changes {key} as well; {remedy}"
