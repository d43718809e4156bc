"""What a run folder's job is set to, and what may change when it is resumed.

`job.json` in a run folder keeps the job's inputs (flow/identity.py) and every resolved setting. A run is resumed only with the
settings that it had; a changed one is applied where `override` names it, and refused otherwise. A longer or shorter training is no
such change: it goes on, with its schedules rebuilt.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.errors import JobError
from echelon.plan.inputs import differences, digest_variable
from echelon.plan.store import user_files

if TYPE_CHECKING:
    from echelon.engine.run import Run
    from echelon.flow.prepare import Subject

#: A step number is a place in one order of one data set, and state belongs to one kind of optimizer and one set of parameters.
_FIXED = frozenset({"drop_last", "optimizer"})
#: Loading a checkpoint compares these itself.
_LOADED = frozenset({"batch", "seed", "parameters"})
_LENGTH = ("epochs", "steps", "total_steps")
#: What judges the training and does not change it: a metric that failed is mended and the run resumed.
_JUDGED = ("metrics.", "evaluation")
_INPUTS, _SOURCE = "inputs", "source"
_VARIABLE = "environment "


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What job.json holds."""

    file: str = ""
    sha256: str = ""
    inputs: dict[str, str] | None = None  #: None: of a run that did not record them
    settings: dict[str, Any] | None = None
    source: str = ""  #: hash of the sources' syntax trees
    overrides: tuple[str, ...] = ()  #: settings that were overridden since the first checkpoint

    @classmethod
    def read(cls, plain: Any) -> JobRecord:
        """From JSON; what is missing or damaged counts as not recorded."""
        if not isinstance(plain, dict):
            return cls()
        kinds = {"file": str, "sha256": str, "inputs": dict, "settings": dict, "source": str, "overrides": list}
        kept = {name: plain[name] for name, kind in kinds.items() if isinstance(plain.get(name), kind)}
        return cls(**kept | {"overrides": tuple(kept.get("overrides", ()))})


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

    job, parts = subject.job, subject.identity.parts
    found: dict[str, Any] = {
        "batch": job.batch, "seed": job.seed, "clip": job.clip, "precision": job.precision, "drop_last": job.drop_last,
        "epochs": job.epochs, "steps": job.steps, "total_steps": run.total_steps, "parameters": run.fingerprint,
    }  # fmt: skip
    found |= optimizer_settings(run) | schedule_settings(run)
    for name in ("model", "loss", "inputs", "collate"):
        if f"code {name}" in parts:
            found[name] = parts[f"code {name}"]
    if "code schedule" in parts:
        found["schedule.code"] = parts["code schedule"]
    found |= {name.removeprefix("code "): digest for name, digest in parts.items() if name.startswith("code metrics.")}
    found |= {name: parts[name] for name in ("data", "evaluation", "warmup_data") if name in parts}
    plain: dict[str, Any] = json.loads(json.dumps(found))  # as it is read back: tuples are lists
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
    rebuild: bool = False  #: schedules are for another length
    warnings: tuple[str, ...] = ()


def compare(
    folder: Path, before: JobRecord, now: JobRecord, *, override: Sequence[str], step: int, finished: bool
) -> Changes:
    """What to apply on resume from `step`; a JobError where a setting changed that is not overridden."""
    if before.settings is None or now.settings is None:
        return Changes(warnings=_source_warning(folder, before, now) if before.sha256 != now.sha256 else ())
    _require_known(override, before.settings, now.settings)
    changed = _changed(before.settings, now.settings)
    longer = any(name in _LENGTH for name in changed)
    if longer:  # schedules come with the length
        changed = {name: pair for name, pair in changed.items() if not name.startswith("schedule.")}
    changed = {name: pair for name, pair in changed.items() if name not in _LENGTH and name not in _LOADED}
    then = before.inputs
    inputs = [] if then is None else differences(then, with_variables(now.inputs or {}, then))
    source = bool(before.source) and before.source != now.source
    explained = bool(changed) or longer
    said: list[str] = []
    free = [] if finished else [name for name in changed if name.startswith(_JUDGED)]
    refused = {
        name: pair for name, pair in changed.items() if name in _FIXED or not (name in free or _names(override, name))
    }
    lines = [f"{name}: {_text(then)} then, {_text(here)} now" for name, (then, here) in refused.items()]
    wanted = [name for name in refused if name not in _FIXED]
    if finished and not explained:
        # Nothing would be trained: its result must be of this very job.
        if inputs and _INPUTS not in override:
            lines += [f"{_INPUTS}: {each}" for each in inputs]
            wanted.append(_INPUTS)
        if source and _SOURCE not in override:
            lines.append(f"{_SOURCE}: the code that trained it was another")
            wanted.append(_SOURCE)
    if lines:
        raise JobError(_refusal(folder, step, lines, wanted, fixed=[name for name in refused if name in _FIXED]))
    if inputs and not explained and not finished:
        said.append(f"{folder} is resumed from step {step} with other inputs: {'; '.join(inputs)}")
    if source and not finished:
        said += _source_warning(folder, before, now)
    said += [
        f"{'changed' if name in free else 'override'}: {name} is {_text(here)} from step {step} on, {_text(then)} before"
        for name, (then, here) in changed.items()
    ]
    rebuild = longer or any(name.startswith("schedule") for name in changed)
    applied = frozenset({*before.overrides, *changed})
    return Changes(overrides=applied, rebuild=rebuild, warnings=tuple(said))


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
    return (
        f"{folder} was trained by another text of the job file (then {before.sha256[:12]}, {now.file} now {now.sha256[:12]}); it goes on as "
        "the file is now; --fresh starts anew in another folder",
    )
