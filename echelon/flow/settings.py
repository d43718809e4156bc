"""Settings of a training, and where each comes from: explicit arguments over environment over settings file over defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, JobError, suggest_name
from echelon.world import read_settings

#: The settings file, looked up in the current folder; its settings are in the table [train].
SETTINGS_FILE = "echelon.toml"
#: Name -> type. A setting is keep= in Python, --keep on the command line, ECHELON_KEEP in the environment and keep in the file.
SETTING_TYPES: dict[str, type] = {
    "plan": str, "out": str, "keep": int, "every": int, "resume": bool, "override": list, "verify": bool, "fallback": bool,
    "require_certificate": str, "quiet": bool, "workers": int, "servers": str, "secret_file": str,
}  # fmt: skip
_TYPE_NAMES = {int: "an integer", bool: "true or false", str: "text", list: "a list of names"}
_BOOLEAN_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a job is trained, apart from what it computes and under which plan."""

    #: The run folder; None: runs/NAME.
    out: str | Path | None = None
    #: Checkpoints to keep, besides the best.
    keep: int = 3
    #: Steps between checkpoints; None: every epoch (of a stream: a tenth of the steps, at most STREAM_EVERY).
    every: int | None = None
    resume: bool = True
    #: Changed settings to apply on resume ("optimizer.lr"); any other change is refused.
    override: tuple[str, ...] = ()
    #: Prove a new job and plan before the first step.
    verify: bool = True
    #: If the requested plan is disproved, train the nearest proved one instead of raising.
    fallback: bool = True
    #: Train only if this certificate covers the run.
    require_certificate: str | Path | None = None
    quiet: bool = False
    #: Processes per rank that read data ahead.
    workers: int = 0
    #: Controller address (host:port) of parameter servers that already run, and the file with their secret.
    servers: str | None = None
    secret_file: str | Path | None = None

    def __post_init__(self) -> None:
        for name, minimum in (("keep", 1), ("every", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < minimum):
                raise JobError(f"{name}={value!r}: expected an integer of at least {minimum}")
        if isinstance(self.override, str) or not all(isinstance(name, str) and name for name in self.override):
            raise JobError(f'override={self.override!r}: expected a list of setting names, as ["optimizer.lr"]')
        object.__setattr__(self, "override", tuple(self.override))  # a list from JSON or a file
        for name in ("resume", "verify", "fallback", "quiet"):
            if type(getattr(self, name)) is not bool:
                raise JobError(f"{name}={getattr(self, name)!r}: expected True or False")
        if (self.servers is None) != (self.secret_file is None):
            present, missing = ("servers", "secret_file") if self.secret_file is None else ("secret_file", "servers")
            remedy = "`echelon server start` prints both (--servers, --secret-file)"
            raise JobError(f"{present}={getattr(self, present)}: {missing} is missing; {remedy}")
        if self.require_certificate is not None and not Path(self.require_certificate).is_file():
            raise JobError(f"{self.require_certificate}: no such certificate; `echelon verify` writes one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One resolved value and its source."""

    name: str
    value: Any
    source: str


def merge_settings(
    explicit: Mapping[str, Any], environment: Mapping[str, str] | None = None, file: Path = Path(SETTINGS_FILE)
) -> dict[str, Setting]:
    """Every setting. In `explicit` None means "not set"; `environment` holds the ECHELON_* variables by setting name."""
    environment, file_values = read_settings() if environment is None else environment, _read_file(file)
    defaults = {"plan": "auto"} | {name: getattr(Settings(), name) for name in Settings.__slots__}
    settings = {}
    for name, setting_type in SETTING_TYPES.items():
        variable = f"ECHELON_{name.upper()}"
        if explicit.get(name) is not None:
            value, source = explicit[name], "command line"
        elif name in environment:
            value, source = _parse_text(environment[name], setting_type, variable), f"environment ({variable})"
        elif name in file_values:
            value, source = _require_type(file_values[name], setting_type, f"{file}: train.{name}"), f"file ({file})"
        else:
            value, source = defaults[name], "default"
        settings[name] = Setting(name=name, value=value, source=source)
    return settings


def resolve_settings(explicit: Mapping[str, Any]) -> tuple[Any, Settings]:
    """The plan and the other settings of a training that was started with `explicit`."""
    values = {name: setting.value for name, setting in merge_settings(explicit).items()}
    return values.pop("plan"), Settings(**values)


def _read_file(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EchelonError(f"{file}: invalid TOML ({error})") from error
    train = tables.get("train", {})
    if set(tables) - {"train"} or not isinstance(train, dict):
        raise EchelonError(f"{file}: settings belong in the table [train]; found {', '.join(tables)}")
    for name in train:
        if name not in SETTING_TYPES:
            raise EchelonError(f"{file}: unknown setting train.{name}; {suggest_name(name, SETTING_TYPES)}")
    return train


def _parse_text(text: str, setting_type: type, source: str) -> Any:
    if setting_type is list:
        return [name.strip() for name in text.split(",") if name.strip()]
    if setting_type is int and text.strip().lstrip("-").isdigit():
        return int(text)
    if setting_type is bool and text.strip().lower() in _BOOLEAN_WORDS:
        return _BOOLEAN_WORDS[text.strip().lower()]
    return _require_type(text, setting_type, source)


def _require_type(value: Any, setting_type: type, source: str) -> Any:
    is_valid = type(value) is setting_type
    if not is_valid or (isinstance(value, list) and not all(isinstance(item, str) for item in value)):
        raise EchelonError(f"{source}={value!r}: expected {_TYPE_NAMES[setting_type]}")
    return value
