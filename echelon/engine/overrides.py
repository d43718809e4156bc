"""Settings of a run's optimizers and schedules: read by name, and changed when a run is resumed with other ones.

A checkpoint brings back what each parameter group was set to. `Fresh` keeps what the job asks for now, so that settings which the
user overrides can be applied after loading; schedules are then rebuilt and advanced to where they were.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from echelon.engine.groups import is_plain, names, settings
from echelon.engine.optimizers import make_schedules

if TYPE_CHECKING:
    from echelon.engine.run import Run

#: How far a schedule has come, and what it keeps for each group: not what it is set to.
_PROGRESS = frozenset(
    {"last_epoch", "_step_count", "_last_lr", "base_lrs", "T_cur", "_get_lr_called_within_step", "_is_initial", "verbose", "lr_lambdas"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fresh:
    """What the job sets each parameter group of each optimizer to, before a checkpoint is loaded."""

    groups: tuple[tuple[dict[str, Any], ...], ...]


def fresh_settings(run: Run) -> Fresh:
    """Keep what the groups are set to now."""
    return Fresh(tuple(tuple(map(_initial, optimizer.param_groups)) for optimizer in run.optimizers))


def _initial(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group; a schedule has changed the rate already, and keeps the first one beside it."""
    kept = {key: copy.deepcopy(value) for key, value in group.items() if key in settings(group)}
    if "initial_lr" in kept:
        first = kept.pop("initial_lr")
        kept["lr"] = first
    return kept


def optimizer_settings(run: Run) -> dict[str, Any]:
    """Every setting by name: optimizer.lr, or optimizer.lr[1] for the second of groups that differ in it. Every rank must call it."""
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
        prefix = "optimizer" if len(run.optimizers) == 1 else f"optimizer{place + 1}"
        found[prefix] = parts[0][0]
        groups = sorted(
            ((held, plain) for _, part in parts for held, plain in part if held), key=lambda group: group[0]
        )
        distinct = _distinct([plain for _, plain in groups])
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


def schedule_settings(run: Run) -> dict[str, Any]:
    """What the schedules are set to, by name: schedule.T_max."""
    found: dict[str, Any] = {}
    for place, schedule in enumerate(run.schedules):
        prefix = "schedule" if len(run.schedules) == 1 else f"schedule{place + 1}"
        found[prefix] = type(schedule).__name__
        state = schedule.state_dict() if hasattr(schedule, "state_dict") else {}
        found |= {
            f"{prefix}.{key}": list(value) if isinstance(value, tuple) else value
            for key, value in state.items()
            if key not in _PROGRESS and is_plain(value)
        }
    return found


def apply_overrides(run: Run, fresh: Fresh, overrides: Set[str], *, rebuild: bool) -> None:
    """Set what is overridden as the job has it now; `rebuild`: the schedules are for another length, or overridden."""
    for place, (optimizer, groups) in enumerate(zip(run.optimizers, fresh.groups, strict=True)):
        prefix = "optimizer" if len(run.optimizers) == 1 else f"optimizer{place + 1}"
        keys = {
            name.removeprefix(f"{prefix}.").partition("[")[0] for name in overrides if name.startswith(f"{prefix}.")
        }
        for group, wanted in zip(optimizer.param_groups, groups, strict=True):
            for key in keys & wanted.keys():
                _set(group, key, wanted[key])
                if key == "lr" and "initial_lr" in group:
                    group["initial_lr"] = _plain_rate(wanted[key])
        rebuild |= bool(keys)
    if rebuild and run.schedules:
        _rebuild_schedules(run)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(float(value))
    else:
        group[key] = copy.deepcopy(value)


def _plain_rate(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _rebuild_schedules(run: Run) -> None:
    """Make the schedules again from the first rates, for the length of now, and advance them by the steps that they had made."""
    steps = [int(getattr(schedule, "last_epoch", run.step_number)) for schedule in run.schedules]
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            if "initial_lr" in group:
                _set(group, "lr", group.pop("initial_lr"))
    with run.schedule_reads.watching():
        run.schedules = make_schedules(run.job, run.optimizers, run.total_steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # schedules expect a step of their optimizer before each of theirs
            for schedule, count in zip(run.schedules, steps, strict=True):
                for _ in range(count):
                    schedule.step()
