"""What a run folder's job is set to, and what may change when it is resumed.

`job.json` in a run folder keeps the job's inputs (flow/job_identity.py) and every resolved setting, and so does each checkpoint, for the job
that wrote it. A run is resumed only with the settings that it had; a changed one is applied where `override` names it, and refused
otherwise. A longer or shorter training is no such change: it goes on, with its schedules rebuilt.
"""

from __future__ import annotations

import ast
import hashlib
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.errors import IncompatibleCheckpointError, JobError, suggest_name
from echelon.plan.document_cache import user_source_files
from echelon.plan.input_digests import describe_differences, digest_variable

if TYPE_CHECKING:
    from echelon.engine.run import Run
    from echelon.flow.job_source import JobSource

#: A step number is a place in one order of one data set, and state belongs to one kind of optimizer and one set of parameters.
_FIXED_SETTINGS = re.compile(r"drop_last|optimizer\d*")
#: Loading a checkpoint compares these itself.
_CHECKED_ON_LOAD = frozenset({"batch_size", "seed", "parameters"})
_LENGTH_SETTINGS = ("epochs", "steps", "total_steps")
#: What judges the training and does not change it: a metric that failed is mended and the run resumed.
_EVALUATION_PREFIXES = ("metrics.", "eval_data")
#: First values of parameters, which a checkpoint replaces: they decide a run's result, not whether it can go on.
_VALUES_SUFFIX = ".values"
_CODE_SUFFIX = ".code"
_INPUTS, _SOURCE = "inputs", "source"
_VARIABLE_PREFIX = "environment "
#: The step of overrides in records that have none.
_NO_STEP_LIMIT = 1 << 62

#: Returns the settings of the schedules for a number of steps.
ScheduleFor = Callable[[int], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What job.json holds, and each checkpoint."""

    file: str = ""
    sha256: str = ""
    inputs: dict[str, str] | None = None  #: None: not recorded
    settings: dict[str, Any] | None = None
    source: str = ""  #: hash of the sources' syntax trees
    overrides: dict[str, int] = field(
        default_factory=dict
    )  #: settings that were overridden, and the last step before that

    @classmethod
    def from_plain(cls, plain: Any) -> JobRecord:
        """From JSON; what is missing or damaged counts as not recorded."""
        if not isinstance(plain, dict):
            return cls()
        field_types = {"file": str, "sha256": str, "inputs": dict, "settings": dict, "source": str}
        valid_fields = {
            name: plain[name] for name, field_type in field_types.items() if isinstance(plain.get(name), field_type)
        }
        overrides = plain.get("overrides")
        if isinstance(overrides, list):
            overrides = dict.fromkeys(map(str, overrides), _NO_STEP_LIMIT)
        override_steps = overrides if isinstance(overrides, dict) else {}
        return cls(**valid_fields, overrides={name: step for name, step in override_steps.items() if type(step) is int})


def run_inputs(job_source: JobSource) -> dict[str, str]:
    """The inputs that decide to which run folder a job belongs. The length of the training is left out where an argument or a
    variable gives it: a run with more epochs is the same run."""
    total_length = str(job_source.job.epochs or job_source.job.steps)
    inputs = job_source.identity.inputs()
    return {
        name: "(length)" if digest == total_length and name.startswith(("argument ", _VARIABLE_PREFIX)) else digest
        for name, digest in inputs.items()
    }


def with_variables(inputs: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """`inputs` with the present values of the environment variables among `names`: steps read them, so they are not known before one was made."""
    variables = [name for name in names if name.startswith(_VARIABLE_PREFIX) and name not in inputs]
    return {**inputs, **{name: digest_variable(name.removeprefix(_VARIABLE_PREFIX), os.environ) for name in variables}}


def resolve_settings(run: Run, job_source: JobSource) -> dict[str, Any]:
    """Every setting of the job by name, as plain values. Every rank must call it, before a checkpoint is loaded."""
    from echelon.engine.overrides import optimizer_settings, schedule_settings
    from echelon.flow.job_identity import DATA_FIELDS, SETTING_FIELDS

    job, identity = job_source.job, job_source.identity
    settings: dict[str, Any] = {name: getattr(job, name) for name in (*SETTING_FIELDS, "epochs", "steps")}
    settings |= {"total_steps": run.total_steps, "parameters": run.fingerprint}
    settings |= optimizer_settings(run) | schedule_settings(run)
    for part, digest in identity.digests.items():
        name = part.removeprefix("code ")
        if name in identity.length_free_code:
            settings[f"{name}{_CODE_SUFFIX}"] = [digest, identity.length_free_code[name]]
        elif part.startswith("code ") or part in (*DATA_FIELDS, "weights"):
            settings[name] = digest
    settings |= {f"{name}{_VALUES_SUFFIX}": digest for name, digest in identity.parameter_values.items()}
    return _json_round_trip(settings)


def _json_round_trip(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As they are read back from JSON: tuples are lists, and numbers that JSON does not have are text."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings)), parse_constant=str)
    return plain


def hash_sources() -> str:
    """Hash of the user's sources as Python reads them: comments and layout do not count."""
    hasher = hashlib.blake2b(digest_size=16)
    for path in user_source_files(sys.modules):
        try:
            stat = path.stat()
            hasher.update(_hash_syntax(path, stat.st_mtime_ns, stat.st_size))
        except (OSError, SyntaxError, ValueError):
            continue
    return hasher.hexdigest()


@cache
def _hash_syntax(path: Path, mtime_ns: int, size: int) -> bytes:
    """Of one file; `mtime_ns` and `size` tell when to look again: parsing takes milliseconds a file."""
    return hashlib.blake2b(ast.dump(ast.parse(path.read_bytes())).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeChanges:
    """How a job differs from the one that trained in a run folder, as far as it is resumed all the same."""

    overrides: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()


def compare_records(
    folder: Path,
    previous_record: JobRecord,
    current_record: JobRecord,
    *,
    override: Sequence[str],
    step: int,
    finished: bool,
    schedule_for: ScheduleFor | None = None,
) -> ResumeChanges:
    """What to apply on resume from `step`; a JobError where a setting changed that is not overridden."""
    if previous_record.settings is None or current_record.settings is None:
        return ResumeChanges(
            warnings=_source_warning(folder, previous_record, current_record)
            if previous_record.sha256 != current_record.sha256
            else ()
        )
    changes = changed_settings(previous_record.settings, current_record.settings, schedule_for)
    _require_known_names(override, previous_record.settings, current_record.settings, changes)
    changed_values = [name for name in changes if name.endswith(_VALUES_SUFFIX) and not finished]
    initial_value_fields = [f"{name.removesuffix(_VALUES_SUFFIX)}=" for name in changed_values]
    changes = {name: pair for name, pair in changes.items() if name not in changed_values}
    previous = previous_record.inputs
    input_changes = (
        []
        if previous is None
        else describe_differences(previous, with_variables(current_record.inputs or {}, previous))
    )
    has_source_changed = bool(previous_record.source) and previous_record.source != current_record.source
    has_setting_changes = bool(changes) or previous_record.settings.get("total_steps") != current_record.settings.get(
        "total_steps"
    )
    warnings: list[str] = []
    unrestricted = [] if finished else [name for name in changes if name.startswith(_EVALUATION_PREFIXES)]
    refused = {
        name: pair
        for name, pair in changes.items()
        if _FIXED_SETTINGS.fullmatch(name) or not (name in unrestricted or _is_overridden(override, name))
    }
    fixed = [name for name in refused if _FIXED_SETTINGS.fullmatch(name)]
    lines = [_describe_change(name, *pair) for name, pair in refused.items()]
    overridable = [name for name in refused if name not in fixed]
    if finished and not has_setting_changes:
        # Nothing would be trained: its result must be of this very job.
        if input_changes and _INPUTS not in override:
            lines += [f"{_INPUTS}: {input_change}" for input_change in input_changes]
            overridable.append(_INPUTS)
        if has_source_changed and _SOURCE not in override:
            lines.append(f"{_SOURCE}: the code that trained it was another")
            overridable.append(_SOURCE)
    if lines:
        raise JobError(_refusal_message(folder, step, lines, overridable, fixed))
    if input_changes and not has_setting_changes and not finished:
        warnings.append(f"{folder} is resumed from step {step} with other inputs: {'; '.join(input_changes)}")
    if has_source_changed and not finished:
        warnings += _source_warning(folder, previous_record, current_record)
    if initial_value_fields:
        warnings.append(
            f"{folder} began from other values of {' and '.join(initial_value_fields)} than the job has now, and continues from its checkpoint; set a seed before "
            "the module is built, or pass the function that builds it, to begin from the same values each time"
        )
    warnings += [
        f"{'changed' if name in unrestricted else 'override'}: {name} is {_format_value(current)} from step {step} on, {_format_value(previous)} before"
        for name, (previous, current) in changes.items()
    ]
    return ResumeChanges(overrides=frozenset(changes), warnings=tuple(warnings))


def changed_settings(
    old_settings: Mapping[str, Any], new_settings: Mapping[str, Any], schedule_for: ScheduleFor | None = None
) -> dict[str, tuple[Any, Any]]:
    """What differs, both sides by name, without the length and what follows from it, and without what loading a checkpoint compares."""
    old_total, new_total = old_settings.get("total_steps"), new_settings.get("total_steps")
    changed = _diff(old_settings, new_settings)
    if old_total != new_total and isinstance(old_total, int) and isinstance(new_total, int):
        changed = _without_length(changed, old_settings, new_settings, (old_total, new_total), schedule_for)
    for prefix in [name.removesuffix(".groups") for name in changed if name.endswith(".groups")]:
        changed = {
            name: pair for name, pair in changed.items() if not (name.startswith(f"{prefix}.") and _is_group_setting(name, old_settings, new_settings))
        } | _changes_by_parameter(old_settings, new_settings, prefix)  # fmt: skip
    for prefix in [name.removesuffix(_CODE_SUFFIX) for name in changed if name.endswith(_CODE_SUFFIX)]:
        old_code, new_code = old_settings.get(f"{prefix}{_CODE_SUFFIX}"), new_settings.get(f"{prefix}{_CODE_SUFFIX}")
        have_both = isinstance(old_code, list) and isinstance(new_code, list)
        has_named_change = any(name.startswith(prefix) and not name.endswith(_CODE_SUFFIX) for name in changed)
        # Code that differs only in the length, or in a setting that is compared by its own name, is the same.
        if has_named_change or (have_both and any(map(operator.eq, old_code, new_code))):  # type: ignore[arg-type]
            del changed[f"{prefix}{_CODE_SUFFIX}"]
    return {
        name: pair for name, pair in changed.items() if name not in _LENGTH_SETTINGS and name not in _CHECKED_ON_LOAD
    }


def _without_length(
    changed: Mapping[str, tuple[Any, Any]],
    old_settings: Mapping[str, Any],
    new_settings: Mapping[str, Any],
    steps: tuple[int, int],
    schedule_for: ScheduleFor | None,
) -> dict[str, tuple[Any, Any]]:
    """Without schedule values that follow from the length: as they were in a schedule of now for the old length, or in proportion."""
    old_schedule = _old_schedule(steps[0], schedule_for)

    def follows_length(name: str, previous: Any, current: Any) -> bool:
        if (
            not name.startswith("lr_schedule")
            or name.endswith(_CODE_SUFFIX)
            or name not in old_settings
            or name not in new_settings
        ):
            return False
        return (name in old_schedule and old_schedule[name] == previous) or _is_proportional(previous, current, steps)

    remaining = {name: pair for name, pair in changed.items() if not follows_length(name, *pair)}
    # A script that computes T_max itself, from its number of epochs.
    rescaled = [
        name
        for name in changed
        if name not in remaining and name not in _LENGTH_SETTINGS and old_schedule.get(name) != old_settings.get(name)
    ]
    if rescaled and not any(
        name.startswith("lr_schedule") and name != f"lr_schedule{_CODE_SUFFIX}" for name in remaining
    ):
        remaining.pop(f"lr_schedule{_CODE_SUFFIX}", None)
    return remaining


def _old_schedule(total_steps: int, schedule_for: ScheduleFor | None) -> dict[str, Any]:
    if schedule_for is None:
        return {}
    try:
        return _json_round_trip(schedule_for(total_steps))
    except Exception:  # it cannot be made for that length: what differs is listed
        return {}


def _is_proportional(previous: Any, current: Any, steps: tuple[int, int]) -> bool:
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (previous, current))
    return are_numbers and previous != current and previous * steps[1] == current * steps[0]


def _is_group_setting(name: str, old_settings: Mapping[str, Any], new_settings: Mapping[str, Any]) -> bool:
    """Whether it is a setting of parameter groups, not an attribute or the code of the optimizer."""
    key = name.partition("[")[0]
    return name.endswith(".groups") or any(setting.startswith(f"{key}[") for setting in (*old_settings, *new_settings))


def _changes_by_parameter(
    old_settings: Mapping[str, Any], new_settings: Mapping[str, Any], prefix: str
) -> dict[str, tuple[Any, Any]]:
    """Settings of groups that were divided differently: by the first parameter of those that changed alike."""
    from echelon.engine.overrides import parameter_settings

    old_groups, new_groups = old_settings.get(f"{prefix}.groups") or {}, new_settings.get(f"{prefix}.groups") or {}
    changes: dict[str, tuple[Any, Any]] = {}
    seen: list[tuple[str, Any, Any]] = []
    pairs: dict[tuple[Any, Any], str] = {}
    for name in sorted({*old_groups, *new_groups}):
        pairs.setdefault((old_groups.get(name), new_groups.get(name)), name)
    for name in pairs.values():
        old_values, new_values = (
            parameter_settings(old_settings, prefix, name),
            parameter_settings(new_settings, prefix, name),
        )
        for key, (previous, current) in _diff(old_values, new_values).items():
            is_per_group = any(setting.startswith(f"{prefix}.{key}[") for setting in (*old_settings, *new_settings))
            if is_per_group and (key, previous, current) not in seen:
                seen.append((key, previous, current))
                changes[f"{prefix}.{key}[{name}]"] = (previous, current)
    return changes


def require_own_checkpoint(
    folder: Path,
    step: int,
    checkpoint_record: JobRecord,
    folder_record: JobRecord,
    job_record: JobRecord,
    **options: Any,
) -> set[str]:
    """The settings in which a loaded checkpoint differs from the job of now, as overrides account for them; a ForeignCheckpoint where they
    do not. `checkpoint_record`: its own record, `folder_record`: the folder's. `options`: names that are overridden, and `schedule_for`."""
    if checkpoint_record.settings is None or job_record.settings is None:
        return set(options["override"])
    changed = changed_settings(checkpoint_record.settings, job_record.settings, options["schedule_for"])
    earlier_overrides = [name for name, last_step in folder_record.overrides.items() if step <= last_step]
    allowed = [*options["override"], *earlier_overrides, *(name.partition("[")[0] for name in earlier_overrides)]
    unexplained = {
        name: pair
        for name, pair in changed.items()
        if not (name.startswith(_EVALUATION_PREFIXES) or name.endswith(_VALUES_SUFFIX) or _is_overridden(allowed, name))
    }
    if folder_record.settings is not None and _INPUTS not in options["override"]:
        initial_changes = _diff(checkpoint_record.settings, folder_record.settings)
        unexplained |= {
            name: pair
            for name, pair in initial_changes.items()
            if name.endswith(_VALUES_SUFFIX) and not _is_overridden(allowed, name)
        }
    if unexplained:
        lines = "\n".join(f"  - {_describe_change(name, *pair)}" for name, pair in unexplained.items())
        raise IncompatibleCheckpointError(
            f"{folder}: the checkpoint of step {step} is another run's; its job differs from this one's:\n{lines}\n"
            "remove it from the folder, or start over in another folder with --fresh (resume=False)"
        )
    return set(changed)


def keep_initial_values(
    previous_record: JobRecord, current_record: JobRecord, overrides: Iterable[str]
) -> dict[str, Any]:
    """The settings of now, with the first values of parameters that the run began from."""
    assert current_record.settings is not None
    stored, overridden = previous_record.settings or {}, list(overrides)
    initial_values = {
        name: value
        for name, value in stored.items()
        if name.endswith(_VALUES_SUFFIX) and not _is_overridden(overridden, name)
    }
    return current_record.settings | {
        name: value for name, value in initial_values.items() if name in current_record.settings
    }


def _describe_change(name: str, previous: Any, current: Any) -> str:
    line = f"{name}: {_format_value(previous)} then, {_format_value(current)} now"
    if not name.endswith(_VALUES_SUFFIX):
        return line
    return f"{line} (first values of parameters; to keep them, set a seed before the module is built, or pass the function that builds it)"


def _is_overridden(overrides: Sequence[str], name: str) -> bool:
    """Whether `name` is overridden: by itself, or by what it is a part of (optimizer.lr for optimizer.lr[1])."""
    return any(
        name == overridden or name.partition("[")[0] == overridden or name.startswith(f"{overridden}.")
        for overridden in overrides
    )


def _require_known_names(override: Sequence[str], *settings: Mapping[str, Any]) -> None:
    known_names = {_INPUTS, _SOURCE}.union(*settings)
    for name in override:
        if not any(_is_overridden([name], known_name) for known_name in known_names):
            raise JobError(f"override={name}: the job has no such setting; {suggest_name(name, sorted(known_names))}")


def _diff(old_settings: Mapping[str, Any], new_settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*new_settings, *(name for name in old_settings if name not in new_settings)]
    return {
        name: (old_settings.get(name), new_settings.get(name))
        for name in names
        if old_settings.get(name) != new_settings.get(name)
    }


def _format_value(value: Any) -> str:
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(digest, str) and len(digest) == 16 for digest in value)
    ):
        value = value[0]  # digests of code: without and with the length
    return str(value)[:12] if isinstance(value, str) and len(value) > 24 else str(value)


def _refusal_message(
    folder: Path, step: int, lines: Sequence[str], overridable: Sequence[str], fixed: Sequence[str]
) -> str:
    flags = " ".join(f"--override {name}" for name in overridable)
    python = f"override=[{', '.join(repr(name) for name in overridable)}]"
    remedies = [
        f"put {'it' if len(lines) == 1 else 'them'} back",
        *(
            [f"apply the change with {flags} (in Python {python}, else ECHELON_OVERRIDE)"]
            if overridable and not fixed
            else []
        ),
        *([f"{', '.join(fixed)} cannot change within a run"] if fixed else []),
        "start over in another folder with --fresh (resume=False)",
    ]
    return (
        f"{folder}: not resumed from step {step}, because the job changed:\n"
        + "\n".join(f"  - {line}" for line in lines)
        + f"\n{'; '.join(remedies)}"
    )


def _source_warning(folder: Path, previous_record: JobRecord, current_record: JobRecord) -> tuple[str, ...]:
    if not previous_record.sha256:
        return ()
    sources = (
        f"the job file (then {previous_record.sha256[:12]}, {current_record.file} now {current_record.sha256[:12]})"
    )
    if previous_record.sha256 == current_record.sha256:
        sources = "modules that the job file imports, or of the program that calls it"
    return (
        f"{folder} was trained by another text of {sources}; it continues with the text as it is now; --fresh starts over in another folder",
    )
