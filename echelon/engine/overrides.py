"""Settings of a run's optimizers and schedules: read by name, and changed when a run is resumed with other ones.

A checkpoint brings back what each parameter group was set to. `Fresh` keeps what the job asks for now, so that settings which the
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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.engine.checkpoint import schedule_state
from echelon.engine.checkpoint.param_group_state import is_plain, names, settings
from echelon.engine.checkpoint.schedule_state import takes_metric
from echelon.engine.optimizers import make_schedules
from echelon.errors import JobError

if TYPE_CHECKING:
    from echelon.engine.run import Run

#: How far a schedule has come, and what it keeps for each group: not what it is set to.
_PROGRESS = frozenset(
    {"last_epoch", "_step_count", "_last_lr", "base_lrs", "T_cur", "_get_lr_called_within_step", "_is_initial", "verbose", "lr_lambdas"}
)  # fmt: skip
#: Names that are no settings of a group or an optimizer.
_DERIVED = ("groups", "code")


@dataclass(frozen=True, slots=True)
class Fresh:
    """What the job sets each parameter group and each optimizer to, before a checkpoint is loaded."""

    groups: tuple[tuple[dict[str, Any], ...], ...]
    attributes: tuple[dict[str, Any], ...]


def fresh_settings(run: Run) -> Fresh:
    """Keep what the groups and optimizers are set to now."""
    return Fresh(
        tuple(tuple(map(_initial, optimizer.param_groups)) for optimizer in run.optimizers),
        tuple(_attributes(optimizer) for optimizer in run.optimizers),
    )


def _initial(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group; a schedule has changed the rate already, and keeps the first one with it."""
    kept = {key: copy.deepcopy(value) for key, value in group.items() if key in settings(group)}
    if "initial_lr" in kept:
        first = kept.pop("initial_lr")
        kept["lr"] = first
    return kept


@cache
def _of_torch() -> frozenset[str]:
    """What torch itself keeps in every optimizer."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])))


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What the user's class keeps in plain attributes (`self.factor = 0.9`)."""
    return {
        key: copy.deepcopy(value)
        for key, value in vars(optimizer).items()
        if key not in _of_torch() and not key.startswith("_") and is_plain(value)
    }


def _prefix(run: Run, place: int) -> str:
    return "optimizer" if len(run.optimizers) == 1 else f"optimizer{place + 1}"


def optimizer_settings(run: Run) -> dict[str, Any]:
    """Every setting by name: optimizer.lr, or optimizer.lr[1] for the second of groups that differ in it; optimizer.groups lists which
    parameters are in which. Every rank must call it."""
    known, here = names(run), []
    for optimizer in run.optimizers:
        groups = []
        for group in optimizer.param_groups:
            held = sorted(known[id(value)] for value in group["params"] if id(value) in known)
            plain = {key: value for key, value in settings(_initial(group)).items() if is_plain(value)}
            groups.append((held, plain))
        here.append((type(optimizer).__name__, groups))
    found: dict[str, Any] = {}
    for place, parts in enumerate(zip(*run.axes["pp"].gather(here), strict=True)):
        prefix = _prefix(run, place)
        found |= {f"{prefix}.{key}": value for key, value in _attributes(run.optimizers[place]).items()}
        found[prefix] = parts[0][0]
        groups = sorted(
            ((held, plain) for _, part in parts for held, plain in part if held), key=lambda group: group[0]
        )
        distinct = _distinct([plain for _, plain in groups])
        if len(distinct) > 1:
            found[f"{prefix}.groups"] = {name: distinct.index(plain) for held, plain in groups for name in held}
        for key in sorted({key for plain in distinct for key in plain}):
            values = [plain.get(key) for plain in distinct]
            if all(value == values[0] for value in values):
                found[f"{prefix}.{key}"] = values[0]
            else:
                found |= {f"{prefix}.{key}[{index}]": value for index, value in enumerate(values)}
    return found


def _distinct(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A stage cuts a group in two: what is set alike is one."""
    found: list[dict[str, Any]] = []
    for group in groups:
        if group not in found:
            found.append(group)
    return found


def parameter_settings(found: Mapping[str, Any], prefix: str, name: str) -> dict[str, Any]:
    """What `optimizer_settings` found for one parameter, by key."""
    group = found.get(f"{prefix}.groups", {}).get(name)
    kept = {}
    for full, value in found.items():
        key, _, index = full.removeprefix(f"{prefix}.").partition("[")
        if full.startswith(f"{prefix}.") and key not in _DERIVED and (not index or index == f"{group}]"):
            kept[key] = value
    return kept


def schedule_settings(run: Run, total: int | None = None) -> dict[str, Any]:
    """The schedules' settings by name (schedule.T_max). `total`: those of a run of that many steps, before a checkpoint is loaded."""
    schedules = run.schedules
    if total is not None:
        schedules = _replay(run, fresh_settings(run).groups, total, [0] * len(run.schedules))[1]
    found: dict[str, Any] = {}
    for place, schedule in enumerate(schedules):
        prefix = "schedule" if len(schedules) == 1 else f"schedule{place + 1}"
        found[prefix] = type(schedule).__name__
        try:
            state = schedule_state.state_of(schedule)
        except JobError:  # saving it is refused
            continue
        found |= dict(_leaves(state, prefix))
    return found


def _leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Plain values in a schedule's state, and in those of the schedules that it holds, by path."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key not in _PROGRESS:
                yield from _leaves(value, f"{path}.{key}" if key != schedule_state.HELD else path)
    elif is_plain(state):
        yield path, list(state) if isinstance(state, tuple) else state
    elif isinstance(state, list | tuple):
        for place, value in enumerate(state):
            yield from _leaves(value, f"{path}.{place}")


def apply_overrides(run: Run, fresh: Fresh, then: Mapping[str, Any], changed: Set[str]) -> bool:
    """Set what `changed` names as the job has it now, and rebuild schedules around it; whether any was. `then`: the settings with which
    the checkpoint was written."""
    replaced = any(name.startswith("schedule") for name in changed)
    longer = then.get("total_steps", run.total_steps) != run.total_steps
    keys = [_keys(changed, _prefix(run, place)) for place in range(len(run.optimizers))]
    for optimizer, wanted, given in zip(run.optimizers, keys, fresh.attributes, strict=True):
        for key in wanted & given.keys():
            setattr(optimizer, key, copy.deepcopy(given[key]))
    if not (replaced or (longer and run.schedules) or any(keys)):
        return False
    if run.schedules or replaced:
        return _rebuild(run, fresh, then, keys, replaced=replaced, longer=longer)
    for optimizer, groups, wanted in zip(run.optimizers, fresh.groups, keys, strict=True):
        for group, given in zip(optimizer.param_groups, groups, strict=True):
            _set_all(group, given, wanted & given.keys())
    return False


def _keys(changed: Set[str], prefix: str) -> set[str]:
    return {name.removeprefix(f"{prefix}.").partition("[")[0] for name in changed if name.startswith(f"{prefix}.")}


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(float(value))
    else:
        group[key] = copy.deepcopy(value)


def _set_all(group: dict[str, Any], values: Mapping[str, Any], keys: Set[str]) -> None:
    for key in keys:
        if key in values:
            _set(group, key, values[key])
        else:
            group.pop(key, None)


def _replay(
    run: Run, groups: Sequence[Sequence[Mapping[str, Any]]], total: int, counts: Sequence[int]
) -> tuple[list[Optimizer], list[Any]]:
    """Copies of the optimizers with these settings, and their schedules for `total` steps, advanced by `counts`."""
    copies = []
    for optimizer, wanted in zip(run.optimizers, groups, strict=True):
        made = object.__new__(type(optimizer))
        vars(made).update({key: value for key, value in vars(optimizer).items() if key != "step"})
        made.param_groups = [
            {key: value for key, value in group.items() if key not in settings(group)} | copy.deepcopy(dict(each))
            for group, each in zip(optimizer.param_groups, wanted, strict=True)
        ]
        copies.append(made)
    return copies, _advanced(run, copies, total, counts)


def _advanced(run: Run, optimizers: list[Optimizer], total: int, counts: Sequence[int]) -> list[Any]:
    with run.schedule_reads.watching(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedules expect a step of their optimizer before each of theirs
        schedules = make_schedules(run.job, optimizers, total)
        for schedule, count in zip(schedules, counts, strict=True):
            for _ in range(0 if takes_metric(schedule) else count):
                schedule.step()
    return schedules


def _rebuild(
    run: Run, fresh: Fresh, then: Mapping[str, Any], keys: Sequence[Set[str]], *, replaced: bool, longer: bool
) -> bool:
    kept = run.schedules
    counts = [int(getattr(schedule, "last_epoch", run.step_number)) for schedule in kept]
    if replaced:  # what was loaded, if anything, is of other schedules
        counts = [run.step_number] * len(kept)
    first = [_first_settings(run, place, fresh, then) for place in range(len(run.optimizers))]
    loaded = [[settings(group) for group in optimizer.param_groups] for optimizer in run.optimizers]
    before = None if replaced else _replay(run, first, then.get("total_steps", run.total_steps), counts)
    for optimizer, groups in zip(run.optimizers, fresh.groups, strict=True):
        for group, given in zip(optimizer.param_groups, groups, strict=True):
            _set_all(group, given, settings(group).keys() | given.keys())
    # Made over the optimizers themselves: a schedule holds the one that it steps.
    run.schedules = _advanced(run, run.optimizers, run.total_steps, counts)
    rebuilt = False
    for place, optimizer in enumerate(run.optimizers):
        now = [dict(settings(group)) for group in optimizer.param_groups]
        was = [settings(group) for group in before[0][place].param_groups] if before is not None else first[place]
        same = before is not None and _same(was, now) and _same_schedule(before[1][place], run.schedules[place])
        metric = before is not None and takes_metric(kept[place])
        if before is None:
            moved = [
                _moved_by_schedule(*each) for each in zip(loaded[place], was, now, fresh.groups[place], strict=True)
            ]
        elif metric:
            moved = [set(keys[place]) | ({"initial_lr"} if "lr" in keys[place] else set()) for _ in now]
        elif not same and _same(was, loaded[place]):
            moved = [_differing(*each) for each in zip(was, now, strict=True)]
        elif not same and longer:
            raise JobError(_irreproducible(run, was, loaded[place], then))
        else:  # the optimizer moves its own settings
            moved = [set(keys[place]) | ({"initial_lr"} if "lr" in keys[place] else set()) for _ in now]
        for group, old, new, adopted in zip(optimizer.param_groups, loaded[place], now, moved, strict=True):
            _set_all(group, {**old, **{key: new[key] for key in adopted & new.keys()}}, old.keys() | new.keys())
            for key in adopted - new.keys():
                group.pop(key, None)
        if before is not None and (same or metric):
            run.schedules[place] = kept[place]
        else:
            rebuilt = True
    return rebuilt


def _first_settings(run: Run, place: int, fresh: Fresh, then: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each group was set to before a schedule moved it, by the record of the checkpoint."""
    known, found = names(run), []
    for group, given in zip(run.optimizers[place].param_groups, fresh.groups[place], strict=True):
        name = next((known[id(value)] for value in group["params"] if id(value) in known), "")
        was = parameter_settings(then, _prefix(run, place), name)
        kept = copy.deepcopy(given)
        for key in kept.keys() & was.keys():
            if is_plain(settings({key: kept[key]})[key]):
                _set(kept, key, tuple(was[key]) if isinstance(kept[key], tuple) else was[key])
        found.append(kept)
    return found


def _moved_by_schedule(
    loaded: Mapping[str, Any], was: Mapping[str, Any], now: Mapping[str, Any], given: Mapping[str, Any]
) -> set[str]:
    """Settings that a schedule moves or moved: those that differ from the first ones, in the checkpoint or now."""
    names = {"lr", "initial_lr"} | _differing(settings(was), loaded) | _differing(settings(given), now)
    return names & (loaded.keys() | now.keys())


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {key for key in one.keys() | other.keys() if not _close(one.get(key), other.get(key))}


def _same(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> bool:
    return not any(_differing(*pair) for pair in zip(one, other, strict=True))


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_close(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-300) or (one != one and other != other)
    return callable(one) or bool(one == other)


def _same_schedule(one: Any, other: Any) -> bool:
    return _close(schedule_state.state_of(one), schedule_state.state_of(other))


def _irreproducible(
    run: Run, was: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]], then: Mapping[str, Any]
) -> str:
    place = next(at for at, pair in enumerate(zip(was, loaded, strict=True)) if _differing(*pair))
    key = sorted(_differing(was[place], loaded[place]))[0]
    return (
        f"schedule=: cannot be rebuilt for {run.total_steps} steps ({then.get('total_steps')} before): at step {run.step_number} it gives "
        f"{key}={was[place].get(key)} for the old length, and the checkpoint has {loaded[place].get(key)}, so something else changes {key} as well; "
        "keep the length, give a schedule that does not depend on it, or start over in another folder with weights= from this one"
    )
