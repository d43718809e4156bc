"""What a run folder's job is set to, and what may change when it is resumed.

`job.json` in a run folder keeps the job's inputs (flow/job_identity.py) and every resolved setting, and so does each checkpoint, for the job
that wrote it. A run is resumed only with the settings that it had; a changed one is applied where `override` names it, and refused
otherwise. A longer or shorter training is no such change: it goes on, with its schedules rebuilt.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.errors import ForeignCheckpoint, JobError
from echelon.plan.document_cache import user_files
from echelon.plan.input_digests import differences, digest_variable

if TYPE_CHECKING:
    from echelon.engine.run import Run
    from echelon.flow.resolve_plan import Subject

#: A step number is a place in one order of one data set, and state belongs to one kind of optimizer and one set of parameters.
_FIXED = re.compile(r"drop_last|optimizer\d*")
#: Loading a checkpoint compares these itself.
_LOADED = frozenset({"batch", "seed", "parameters"})
_LENGTH = ("epochs", "steps", "total_steps")
#: What judges the training and does not change it: a metric that failed is mended and the run resumed.
_JUDGED = ("metrics.", "evaluation")
#: First values of parameters, which a checkpoint replaces: they decide a run's result, not whether it can go on.
_VALUES = ".values"
_CODE = ".code"
_INPUTS, _SOURCE = "inputs", "source"
_VARIABLE = "environment "
#: The step of overrides in records that have none.
_ALWAYS = 1 << 62

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
    def read(cls, plain: Any) -> JobRecord:
        """From JSON; what is missing or damaged counts as not recorded."""
        if not isinstance(plain, dict):
            return cls()
        kinds = {"file": str, "sha256": str, "inputs": dict, "settings": dict, "source": str}
        kept = {name: plain[name] for name, kind in kinds.items() if isinstance(plain.get(name), kind)}
        given = plain.get("overrides")
        if isinstance(given, list):
            given = dict.fromkeys(map(str, given), _ALWAYS)
        steps = given if isinstance(given, dict) else {}
        return cls(**kept, overrides={name: step for name, step in steps.items() if type(step) is int})


def run_inputs(subject: Subject) -> dict[str, str]:
    """The inputs that decide to which run folder a job belongs. The length of the training is left out where an argument or a
    variable gives it: a run with more epochs is the same run."""
    length = str(subject.job.epochs or subject.job.steps)
    given = subject.identity.inputs()
    return {
        name: "(length)" if digest == length and name.startswith(("argument ", _VARIABLE)) else digest
        for name, digest in given.items()
    }


def with_variables(now: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """`now` with the present values of the environment variables among `names`: steps read them, so they are not known before one was made."""
    variables = [name for name in names if name.startswith(_VARIABLE) and name not in now]
    return {**now, **{name: digest_variable(name.removeprefix(_VARIABLE), os.environ) for name in variables}}


def resolve_settings(run: Run, subject: Subject) -> dict[str, Any]:
    """Every setting of the job by name, as plain values. Every rank must call it, before a checkpoint is loaded."""
    from echelon.engine.overrides import optimizer_settings, schedule_settings
    from echelon.flow.job_identity import DATA, SETTINGS

    job, identity = subject.job, subject.identity
    found: dict[str, Any] = {name: getattr(job, name) for name in (*SETTINGS, "epochs", "steps")}
    found |= {"total_steps": run.total_steps, "parameters": run.fingerprint}
    found |= optimizer_settings(run) | schedule_settings(run)
    for part, digest in identity.parts.items():
        name = part.removeprefix("code ")
        if name in identity.by_length:
            found[f"{name}{_CODE}"] = [digest, identity.by_length[name]]
        elif part.startswith("code ") or part in (*DATA, "weights"):
            found[name] = digest
    found |= {f"{name}{_VALUES}": digest for name, digest in identity.values.items()}
    return _as_read(found)


def _as_read(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As they are read back from JSON: tuples are lists, and numbers that JSON does not have are text."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings)), parse_constant=str)
    return plain


def source_hash() -> str:
    """Hash of the user's sources as Python reads them: comments and layout do not count."""
    found = hashlib.blake2b(digest_size=16)
    for path in user_files(sys.modules):
        try:
            state = path.stat()
            found.update(_syntax_hash(path, state.st_mtime_ns, state.st_size))
        except (OSError, SyntaxError, ValueError):
            continue
    return found.hexdigest()


@cache
def _syntax_hash(path: Path, changed: int, size: int) -> bytes:
    """Of one file; `changed` and `size` tell when to look again: parsing takes milliseconds a file."""
    return hashlib.blake2b(ast.dump(ast.parse(path.read_bytes())).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """How a job differs from the one that trained in a run folder, as far as it is resumed all the same."""

    overrides: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()


def compare(
    folder: Path,
    before: JobRecord,
    now: JobRecord,
    *,
    override: Sequence[str],
    step: int,
    finished: bool,
    schedule_for: ScheduleFor | None = None,
) -> Changes:
    """What to apply on resume from `step`; a JobError where a setting changed that is not overridden."""
    if before.settings is None or now.settings is None:
        return Changes(warnings=_source_warning(folder, before, now) if before.sha256 != now.sha256 else ())
    changed = changed_settings(before.settings, now.settings, schedule_for)
    _require_known(override, before.settings, now.settings, changed)
    values = [name for name in changed if name.endswith(_VALUES) and not finished]
    begun = [f"{name.removesuffix(_VALUES)}=" for name in values]
    changed = {name: pair for name, pair in changed.items() if name not in values}
    then = before.inputs
    inputs = [] if then is None else differences(then, with_variables(now.inputs or {}, then))
    source = bool(before.source) and before.source != now.source
    explained = bool(changed) or before.settings.get("total_steps") != now.settings.get("total_steps")
    said: list[str] = []
    free = [] if finished else [name for name in changed if name.startswith(_JUDGED)]
    refused = {
        name: pair
        for name, pair in changed.items()
        if _FIXED.fullmatch(name) or not (name in free or _names(override, name))
    }
    fixed = [name for name in refused if _FIXED.fullmatch(name)]
    lines = [_line(name, *pair) for name, pair in refused.items()]
    wanted = [name for name in refused if name not in fixed]
    if finished and not explained:
        # Nothing would be trained: its result must be of this very job.
        if inputs and _INPUTS not in override:
            lines += [f"{_INPUTS}: {each}" for each in inputs]
            wanted.append(_INPUTS)
        if source and _SOURCE not in override:
            lines.append(f"{_SOURCE}: the code that trained it was another")
            wanted.append(_SOURCE)
    if lines:
        raise JobError(_refusal(folder, step, lines, wanted, fixed))
    if inputs and not explained and not finished:
        said.append(f"{folder} is resumed from step {step} with other inputs: {'; '.join(inputs)}")
    if source and not finished:
        said += _source_warning(folder, before, now)
    if begun:
        said.append(
            f"{folder} began from other values of {' and '.join(begun)} than the job has now, and continues from its checkpoint; set a seed before "
            "the module is built, or pass the function that builds it, to begin from the same values each time"
        )
    said += [
        f"{'changed' if name in free else 'override'}: {name} is {_text(here)} from step {step} on, {_text(then)} before"
        for name, (then, here) in changed.items()
    ]
    return Changes(overrides=frozenset(changed), warnings=tuple(said))


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], schedule_for: ScheduleFor | None = None
) -> dict[str, tuple[Any, Any]]:
    """What differs, both sides by name, without the length and what follows from it, and without what loading a checkpoint compares."""
    then, here = before.get("total_steps"), now.get("total_steps")
    changed = _changed(before, now)
    if then != here and isinstance(then, int) and isinstance(here, int):
        changed = _without_length(changed, before, now, (then, here), schedule_for)
    for prefix in [name.removesuffix(".groups") for name in changed if name.endswith(".groups")]:
        changed = {
            name: pair for name, pair in changed.items() if not (name.startswith(f"{prefix}.") and _is_group(name, before, now))
        } | _by_parameter(before, now, prefix)  # fmt: skip
    for prefix in [name.removesuffix(_CODE) for name in changed if name.endswith(_CODE)]:
        one, other = before.get(f"{prefix}{_CODE}"), now.get(f"{prefix}{_CODE}")
        both = isinstance(one, list) and isinstance(other, list)
        named = any(name.startswith(prefix) and not name.endswith(_CODE) for name in changed)
        # Code that differs only in the length, or in a setting that is compared by its own name, is the same.
        if named or (both and any(map(_equal, one, other))):  # type: ignore[arg-type]
            del changed[f"{prefix}{_CODE}"]
    return {name: pair for name, pair in changed.items() if name not in _LENGTH and name not in _LOADED}


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other)


def _without_length(
    changed: Mapping[str, tuple[Any, Any]],
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    steps: tuple[int, int],
    schedule_for: ScheduleFor | None,
) -> dict[str, tuple[Any, Any]]:
    """Without schedule values that follow from the length: as they were in a schedule of now for the old length, or in proportion."""
    old = _old_schedule(steps[0], schedule_for)

    def follows(name: str, then: Any, here: Any) -> bool:
        if not name.startswith("schedule") or name.endswith(_CODE) or name not in before or name not in now:
            return False
        return (name in old and old[name] == then) or _in_proportion(then, here, steps)

    kept = {name: pair for name, pair in changed.items() if not follows(name, *pair)}
    # A script that computes T_max itself, from its number of epochs.
    scaled = [
        name for name in changed if name not in kept and name not in _LENGTH and old.get(name) != before.get(name)
    ]
    if scaled and not any(name.startswith("schedule") and name != f"schedule{_CODE}" for name in kept):
        kept.pop(f"schedule{_CODE}", None)
    return kept


def _old_schedule(steps: int, schedule_for: ScheduleFor | None) -> dict[str, Any]:
    if schedule_for is None:
        return {}
    try:
        return _as_read(schedule_for(steps))
    except Exception:  # it cannot be made for that length: what differs is listed
        return {}


def _in_proportion(then: Any, here: Any, steps: tuple[int, int]) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (then, here))
    return numbers and then != here and then * steps[1] == here * steps[0]


def _is_group(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether it is a setting of parameter groups, not an attribute or the code of the optimizer."""
    key = name.partition("[")[0]
    return name.endswith(".groups") or any(each.startswith(f"{key}[") for each in (*before, *now))


def _by_parameter(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> dict[str, tuple[Any, Any]]:
    """Settings of groups that were divided differently: by the first parameter of those that changed alike."""
    from echelon.engine.overrides import parameter_settings

    one, other = before.get(f"{prefix}.groups") or {}, now.get(f"{prefix}.groups") or {}
    found: dict[str, tuple[Any, Any]] = {}
    seen: list[tuple[str, Any, Any]] = []
    pairs: dict[tuple[Any, Any], str] = {}
    for name in sorted({*one, *other}):
        pairs.setdefault((one.get(name), other.get(name)), name)
    for name in pairs.values():
        was, here = parameter_settings(before, prefix, name), parameter_settings(now, prefix, name)
        for key, (then, current) in _changed(was, here).items():
            grouped = any(each.startswith(f"{prefix}.{key}[") for each in (*before, *now))
            if grouped and (key, then, current) not in seen:
                seen.append((key, then, current))
                found[f"{prefix}.{key}[{name}]"] = (then, current)
    return found


def require_own(folder: Path, step: int, stored: JobRecord, kept: JobRecord, now: JobRecord, **given: Any) -> set[str]:
    """The settings in which a loaded checkpoint differs from the job of now, as overrides account for them; a ForeignCheckpoint where they
    do not. `stored`: its own record, `kept`: the folder's. `given`: names that are overridden, and `schedule_for`."""
    if stored.settings is None or now.settings is None:
        return set(given["override"])
    changed = changed_settings(stored.settings, now.settings, given["schedule_for"])
    earlier = [name for name, last in kept.overrides.items() if step <= last]
    allowed = [*given["override"], *earlier, *(name.partition("[")[0] for name in earlier)]
    others = {
        name: pair
        for name, pair in changed.items()
        if not (name.startswith(_JUDGED) or name.endswith(_VALUES) or _names(allowed, name))
    }
    if kept.settings is not None and _INPUTS not in given["override"]:
        first = _changed(stored.settings, kept.settings)
        others |= {name: pair for name, pair in first.items() if name.endswith(_VALUES) and not _names(allowed, name)}
    if others:
        lines = "\n".join(f"  - {_line(name, *pair)}" for name, pair in others.items())
        raise ForeignCheckpoint(
            f"{folder}: the checkpoint of step {step} is another run's; its job differs from this one's:\n{lines}\n"
            "remove it from the folder, or start over in another folder with --fresh (resume=False)"
        )
    return set(changed)


def first_values(before: JobRecord, now: JobRecord, overrides: Iterable[str]) -> dict[str, Any]:
    """The settings of now, with the first values of parameters that the run began from."""
    assert now.settings is not None
    then, named = before.settings or {}, list(overrides)
    begun = {name: value for name, value in then.items() if name.endswith(_VALUES) and not _names(named, name)}
    return now.settings | {name: value for name, value in begun.items() if name in now.settings}


def _line(name: str, then: Any, here: Any) -> str:
    line = f"{name}: {_text(then)} then, {_text(here)} now"
    if not name.endswith(_VALUES):
        return line
    return f"{line} (first values of parameters; to keep them, set a seed before the module is built, or pass the function that builds it)"


def _names(override: Sequence[str], name: str) -> bool:
    """Whether `name` is overridden: by itself, or by what it is a part of (optimizer.lr for optimizer.lr[1])."""
    return any(name == each or name.partition("[")[0] == each or name.startswith(f"{each}.") for each in override)


def _require_known(override: Sequence[str], *settings: Mapping[str, Any]) -> None:
    known = {_INPUTS, _SOURCE}.union(*settings)
    for name in override:
        if not any(_names([name], each) for each in known):
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"did you mean {near[0]}?" if near else f"its settings are {', '.join(sorted(known))}"
            raise JobError(f"override={name}: the job has no such setting; {hint}")


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*now, *(name for name in before if name not in now)]
    return {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}


def _text(value: Any) -> str:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) and len(each) == 16 for each in value):
        value = value[0]  # digests of code: without and with the length
    return str(value)[:12] if isinstance(value, str) and len(value) > 24 else str(value)


def _refusal(folder: Path, step: int, lines: Sequence[str], wanted: Sequence[str], fixed: Sequence[str]) -> str:
    flags = " ".join(f"--override {name}" for name in wanted)
    python = f"override=[{', '.join(repr(name) for name in wanted)}]"
    remedies = [
        f"put {'it' if len(lines) == 1 else 'them'} back",
        *(
            [f"apply the change with {flags} (in Python {python}, else ECHELON_OVERRIDE)"]
            if wanted and not fixed
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


def _source_warning(folder: Path, before: JobRecord, now: JobRecord) -> tuple[str, ...]:
    if not before.sha256:
        return ()
    what = f"the job file (then {before.sha256[:12]}, {now.file} now {now.sha256[:12]})"
    if before.sha256 == now.sha256:
        what = "modules that the job file imports, or of the program that calls it"
    return (
        f"{folder} was trained by another text of {what}; it continues with the text as it is now; --fresh starts over in another folder",
    )
