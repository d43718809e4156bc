"""What a run folder's job is set to, and what may change when it is resumed.

`job.json` in a run folder keeps the job's inputs (flow/job_identity.py) and every resolved setting; so does each checkpoint for the job
that wrote it. A run is resumed only with the settings that it had; a changed one is applied where `override` names it, and refused
otherwise. A longer or shorter training is no such change: it continues with its schedules rebuilt.
"""

from __future__ import annotations

import ast
import hashlib
import json
import operator
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
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
#: What evaluates the training and does not change it: a metric that failed is fixed and the run resumed.
_EVALUATION_PREFIXES = ("metrics.", "eval_data")
#: Initial parameter values, which a checkpoint replaces: they decide a run's result, not whether it can continue.
_VALUES_SUFFIX = ".values"
_CODE_SUFFIX = ".code"
_INPUTS, _SOURCE = "inputs", "source"
_VARIABLE_PREFIX = "environment "
#: The step of overrides in records that have none.
_NO_STEP_LIMIT = 1 << 62

Settings = Mapping[str, Any]
#: Settings of the schedules by the number of steps of the training; none where they cannot be made for it.
Schedules = dict[int, dict[str, Any]]
#: What differs: the old and the new value by name.
Changes = dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """Contents of job.json, and of each checkpoint's record."""

    file: str = ""
    sha256: str = ""
    inputs: dict[str, str] | None = None  #: None: not recorded
    settings: dict[str, Any] | None = None
    source: str = ""  #: hash of the sources' syntax trees
    overrides: dict[str, int] = field(default_factory=dict)  #: overridden settings, each with the last step before that

    @classmethod
    def from_plain(cls, plain: Any) -> JobRecord:
        """From JSON; what is missing or damaged counts as not recorded."""
        if not isinstance(plain, dict):
            return cls()
        types = {"file": str, "sha256": str, "inputs": dict, "settings": dict, "source": str}
        valid_fields = {name: plain[name] for name, kind in types.items() if isinstance(plain.get(name), kind)}
        overrides = plain.get("overrides")
        if isinstance(overrides, list):
            overrides = dict.fromkeys(map(str, overrides), _NO_STEP_LIMIT)
        override_steps = overrides if isinstance(overrides, dict) else {}
        return cls(**valid_fields, overrides={name: step for name, step in override_steps.items() if type(step) is int})


def run_inputs(source: JobSource) -> dict[str, str]:
    """The inputs that decide to which run folder a job belongs, without the length of the training where an argument or a
    variable gives it: a run with more epochs is the same run."""
    inputs, length = source.identity.inputs(), str(source.job.epochs or source.job.steps)
    lengths = [name for name in inputs if inputs[name] == length and name.startswith(("argument ", _VARIABLE_PREFIX))]
    return inputs | dict.fromkeys(lengths, "(length)")


def with_variables(inputs: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """`inputs` with the present values of the environment variables among `names`, which are known only once a step has read them."""
    variables = [name for name in names if name.startswith(_VARIABLE_PREFIX) and name not in inputs]
    return {**inputs, **{name: digest_variable(name.removeprefix(_VARIABLE_PREFIX), os.environ) for name in variables}}


def describe_input_changes(previous: Mapping[str, str] | None, current: Mapping[str, str] | None) -> list[str]:
    """How a job's inputs differ from those that were recorded; empty where none were."""
    return [] if previous is None else describe_differences(previous, with_variables(current or {}, previous))


def resolve_settings(run: Run, source: JobSource) -> dict[str, Any]:
    """Every setting of the job by name, as plain values. Every rank must call it, before a checkpoint is loaded."""
    from echelon.engine.overrides import optimizer_settings, schedule_settings
    from echelon.flow.job_identity import DATA_FIELDS, SETTING_FIELDS

    job, identity = source.job, source.identity
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
    return json_round_trip(settings)


def json_round_trip(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON returns them: tuples are lists, and numbers that JSON lacks are text."""
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
    """Of one file. Parsing takes milliseconds: `mtime_ns` and `size` invalidate the cache."""
    return hashlib.blake2b(ast.dump(ast.parse(path.read_bytes())).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeChanges:
    """The changes with which a run is resumed all the same."""

    overrides: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()


def compare_records(
    folder: Path, old: JobRecord, new: JobRecord, override: Sequence[str], step: int, schedules: Schedules
) -> ResumeChanges:
    """What to apply on resume from `step`; a JobError where a setting changed that is not overridden."""
    if old.settings is None or new.settings is None:
        return ResumeChanges(warnings=_source_warning(folder, old, new) if old.sha256 != new.sha256 else ())
    finished = step >= new.settings["total_steps"]
    changes = changed_settings(old.settings, new.settings, schedules)
    _require_known_names(override, old.settings, new.settings, changes)
    initial_values = [name for name in changes if name.endswith(_VALUES_SUFFIX) and not finished]
    changes = {name: pair for name, pair in changes.items() if name not in initial_values}
    input_changes = describe_input_changes(old.inputs, new.inputs)
    has_source_changed = bool(old.source) and old.source != new.source
    is_unchanged = not changes and old.settings.get("total_steps") == new.settings.get("total_steps")
    unrestricted = [] if finished else [name for name in changes if name.startswith(_EVALUATION_PREFIXES)]
    fixed = [name for name in changes if _FIXED_SETTINGS.fullmatch(name)]
    exempt = {*fixed, *unrestricted}
    overridable = [name for name in changes if name not in exempt and not _is_overridden(override, name)]
    lines = [_describe_change(name, *pair) for name, pair in changes.items() if name in (*fixed, *overridable)]
    if finished and is_unchanged:  # nothing would be trained: its result must be of this very job
        if input_changes and _INPUTS not in override:
            lines += [f"{_INPUTS}: {input_change}" for input_change in input_changes]
            overridable.append(_INPUTS)
        if has_source_changed and _SOURCE not in override:
            lines.append(f"{_SOURCE}: it was trained by other code")
            overridable.append(_SOURCE)
    if lines:
        raise JobError(_refusal_message(folder, step, lines, overridable, fixed))
    warnings: list[str] = []
    if input_changes and is_unchanged and not finished:
        warnings.append(f"{folder} is resumed from step {step} with other inputs: {'; '.join(input_changes)}")
    if has_source_changed and not finished:
        warnings += _source_warning(folder, old, new)
    if initial_values:
        fields = " and ".join(f"{name.removesuffix(_VALUES_SUFFIX)}=" for name in initial_values)
        problem = (
            f"{folder} began from other values of {fields} than the job has now, and continues from its checkpoint"
        )
        remedy = "set a seed before the module is built, or pass the function that builds it, to begin from the same values each time"
        warnings.append(f"{problem}; {remedy}")
    for name, (previous, current) in changes.items():
        kind = "changed" if name in unrestricted else "override"
        change = f"{_format_value(current)} from step {step} on, {_format_value(previous)} before"
        warnings.append(f"{kind}: {name} is {change}")
    return ResumeChanges(overrides=frozenset(changes), warnings=tuple(warnings))


def changed_settings(old: Settings, new: Settings, schedules: Schedules) -> Changes:
    """What differs, without the length and what follows from it, and without what loading a checkpoint compares."""
    changed = _diff(old, new)
    steps = old.get("total_steps"), new.get("total_steps")
    if steps[0] != steps[1] and isinstance(steps[0], int) and isinstance(steps[1], int):
        changed = _drop_length(changed, old, new, (steps[0], steps[1]), schedules.get(steps[0], {}))
    for prefix in [name.removesuffix(".groups") for name in changed if name.endswith(".groups")]:
        own = {name for name in changed if name.startswith(f"{prefix}.") and _is_group_setting(name, old, new)}
        changed = {name: changed[name] for name in changed if name not in own}
        changed |= _changes_by_parameter(old, new, prefix)
    for prefix in [name.removesuffix(_CODE_SUFFIX) for name in changed if name.endswith(_CODE_SUFFIX)]:
        name = f"{prefix}{_CODE_SUFFIX}"
        old_code, new_code = old.get(name), new.get(name)
        have_both = isinstance(old_code, list) and isinstance(new_code, list)
        has_named_change = any(other.startswith(prefix) and not other.endswith(_CODE_SUFFIX) for other in changed)
        # Code that differs only in the length, or in a setting that is compared by its own name, is the same.
        if has_named_change or (have_both and any(map(operator.eq, old_code, new_code))):  # type: ignore[arg-type]
            del changed[name]
    return {name: changed[name] for name in changed if name not in (*_LENGTH_SETTINGS, *_CHECKED_ON_LOAD)}


def _drop_length(changed: Changes, old: Settings, new: Settings, steps: tuple[int, int], schedule: Settings) -> Changes:
    """Without schedule values that follow from the length: proportional to it, or as in `schedule`, today's for the old length."""

    def follows_length(name: str, previous: Any, current: Any) -> bool:
        if not name.startswith("lr_schedule") or name.endswith(_CODE_SUFFIX) or name not in old or name not in new:
            return False
        return (name in schedule and schedule[name] == previous) or _is_proportional(previous, current, steps)

    remaining = {name: pair for name, pair in changed.items() if not follows_length(name, *pair)}
    dropped = [name for name in changed if name not in remaining and name not in _LENGTH_SETTINGS]
    # A script that computes T_max itself, from its number of epochs.
    is_rescaled = any(schedule.get(name) != old.get(name) for name in dropped)
    code = f"lr_schedule{_CODE_SUFFIX}"
    if is_rescaled and not any(name.startswith("lr_schedule") and name != code for name in remaining):
        remaining.pop(code, None)
    return remaining


def _is_proportional(previous: Any, current: Any, steps: tuple[int, int]) -> bool:
    are_numbers = all(type(value) in (int, float) for value in (previous, current))
    return are_numbers and previous * steps[1] == current * steps[0]


def _is_group_setting(name: str, old: Settings, new: Settings) -> bool:
    """Whether it is a setting of parameter groups, not an attribute or the code of the optimizer."""
    key = name.partition("[")[0]
    return name.endswith(".groups") or any(setting.startswith(f"{key}[") for setting in (*old, *new))


def _changes_by_parameter(old: Settings, new: Settings, prefix: str) -> Changes:
    """Settings of groups that were divided differently: by the first parameter of those that changed alike."""
    from echelon.engine.overrides import parameter_settings

    old_groups, new_groups = old.get(f"{prefix}.groups") or {}, new.get(f"{prefix}.groups") or {}
    first_names: dict[tuple[Any, Any], str] = {}
    for name in sorted({*old_groups, *new_groups}):
        first_names.setdefault((old_groups.get(name), new_groups.get(name)), name)
    changes: Changes = {}
    seen: list[tuple[str, tuple[Any, Any]]] = []
    for name in first_names.values():
        old_values, new_values = (parameter_settings(settings, prefix, name) for settings in (old, new))
        for key, pair in _diff(old_values, new_values).items():
            is_per_group = any(setting.startswith(f"{prefix}.{key}[") for setting in (*old, *new))
            if is_per_group and (key, pair) not in seen:
                seen.append((key, pair))
                changes[f"{prefix}.{key}[{name}]"] = pair
    return changes


def require_own_checkpoint(
    folder: Path,
    step: int,
    checkpoint: JobRecord,
    last: JobRecord,
    job: JobRecord,
    override: list[str],
    schedules: Schedules,
) -> set[str]:
    """The settings in which a loaded checkpoint differs from the job of now; an IncompatibleCheckpointError where overrides do not explain
    the difference. `checkpoint`: its own record, `last`: the run folder's."""
    if checkpoint.settings is None or job.settings is None:
        return set(override)
    changed = changed_settings(checkpoint.settings, job.settings, schedules)
    earlier_overrides = [name for name, last_step in last.overrides.items() if step <= last_step]
    allowed = [*override, *earlier_overrides, *(name.partition("[")[0] for name in earlier_overrides)]
    exempt = tuple(name for name in changed if name.startswith(_EVALUATION_PREFIXES) or name.endswith(_VALUES_SUFFIX))
    suspects = {name: pair for name, pair in changed.items() if name not in exempt}
    if last.settings is not None and _INPUTS not in override:
        initial_changes = _diff(checkpoint.settings, last.settings).items()
        suspects |= {name: pair for name, pair in initial_changes if name.endswith(_VALUES_SUFFIX)}
    unexplained = [_describe_change(name, *suspects[name]) for name in suspects if not _is_overridden(allowed, name)]
    if unexplained:
        lines = "\n".join(f"  - {line}" for line in unexplained)
        problem = f"the checkpoint of step {step} is another run's; its job differs from this one's"
        remedy = "remove it from the folder, or start over in another folder with --fresh (resume=False)"
        raise IncompatibleCheckpointError(f"{folder}: {problem}:\n{lines}\n{remedy}")
    return set(changed)


def keep_initial_values(previous: JobRecord, current: JobRecord, overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of now, with the initial parameter values from which the run began."""
    assert current.settings is not None
    names = [name for name in previous.settings or {} if name.endswith(_VALUES_SUFFIX) and name in current.settings]
    return current.settings | {n: (previous.settings or {})[n] for n in names if not _is_overridden(overrides, n)}


def _describe_change(name: str, previous: Any, current: Any) -> str:
    line = f"{name}: {_format_value(previous)} then, {_format_value(current)} now"
    if not name.endswith(_VALUES_SUFFIX):
        return line
    return f"{line} (first values of parameters; to keep them, set a seed before the module is built, or pass the function that builds it)"


def _is_overridden(overrides: Sequence[str], name: str) -> bool:
    """Whether `name` is overridden: by itself, or by what it is a part of (optimizer.lr for optimizer.lr[1])."""
    return any(part in (name, name.partition("[")[0]) or name.startswith(f"{part}.") for part in overrides)


def _require_known_names(override: Sequence[str], *settings: Settings) -> None:
    known_names = {_INPUTS, _SOURCE}.union(*settings)
    for name in override:
        if not any(_is_overridden([name], known_name) for known_name in known_names):
            raise JobError(f"override={name}: the job has no such setting; {suggest_name(name, sorted(known_names))}")


def _diff(old: Settings, new: Settings) -> Changes:
    return {name: (old.get(name), new.get(name)) for name in {**new, **old} if old.get(name) != new.get(name)}


def _format_value(value: Any) -> str:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) and len(item) == 16 for item in value):
        value = value[0]  # digests of code: without and with the length
    return str(value)[:12] if isinstance(value, str) and len(value) > 24 else str(value)


def _refusal_message(folder: Path, step: int, lines: list[str], overridable: list[str], fixed: list[str]) -> str:
    remedies = [f"put {'it' if len(lines) == 1 else 'them'} back"]
    if fixed:
        remedies.append(f"{', '.join(fixed)} cannot change within a run")
    elif overridable:
        flags = " ".join(f"--override {name}" for name in overridable)
        remedies.append(f"apply the change with {flags} (override={overridable} in Python, or ECHELON_OVERRIDE)")
    remedies.append("start over in another folder with --fresh (resume=False)")
    items = "\n".join(f"  - {line}" for line in lines)
    return f"{folder}: not resumed from step {step}, because the job changed:\n{items}\n{'; '.join(remedies)}"


def _source_warning(folder: Path, old: JobRecord, new: JobRecord) -> tuple[str, ...]:
    if not old.sha256:
        return ()
    sources = f"the job file (then {old.sha256[:12]}, {new.file} now {new.sha256[:12]})"
    if old.sha256 == new.sha256:
        sources = "modules that the job file imports, or of the program that calls it"
    warning = f"{folder} was trained by another version of {sources}; it continues with the present one; --fresh starts over in another folder"
    return (warning,)
