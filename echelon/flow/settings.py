"""How a training is run, and where each setting came from: what is given over environment over file over default."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, JobError
from echelon.world import read_settings

#: The file that is looked for in the current folder; its settings stand under [train].
SETTINGS_FILE = "echelon.toml"
#: Name -> kind. A name is --keep on the command line, ECHELON_KEEP in the environment, keep in the file.
SETTING_TYPES: dict[str, type] = {
    "plan": str,
    "out": str,
    "keep": int,
    "every": int,
    "resume": bool,
    "override": list,
    "verify": bool,
    "fallback": bool,
    "require_certificate": str,
    "quiet": bool,
    "workers": int,
    "servers": str,
    "secret_file": str,
}
_BOOLEAN_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One resolved value and its source."""

    name: str
    value: Any
    source: str


def merge_settings(
    command_line: Mapping[str, Any], environment: Mapping[str, str], file: Path, defaults: Mapping[str, Any]
) -> dict[str, Setting]:
    """Every setting. `command_line` is the command line's (None: not given), `environment` what the world read as ECHELON_*."""
    file_values = _read_file(file)
    settings = {}
    for name, setting_type in SETTING_TYPES.items():
        variable = f"ECHELON_{name.upper()}"
        if command_line.get(name) is not None:
            value, source = command_line[name], "command line"
        elif name in environment:
            value, source = _parse_text(environment[name], setting_type, variable), f"environment ({variable})"
        elif name in file_values:
            value, source = _require_type(file_values[name], setting_type, f"{file}: train.{name}"), f"file ({file})"
        else:
            value, source = defaults[name], "default"
        settings[name] = Setting(name=name, value=value, source=source)
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a training is run, apart from what and how it computes."""

    folder: str | Path | None = None
    keep: int = 3
    #: Steps between checkpoints; None: at the end of each epoch (a stream: a tenth of the steps, at most STREAM_EVERY).
    every: int | None = None
    resume: bool = True
    #: Settings of a run that are changed on resume ("optimizer.lr"); every other one must be as it was.
    override: tuple[str, ...] = ()
    #: Prove a new job and plan before the first step.
    verify: bool = True
    #: Replace a given plan that is disproved by the nearest proved one; else raise.
    fallback: bool = True
    certificate: str | Path | None = None
    quiet: bool = False
    #: Processes that read data ahead, per rank.
    workers: int = 0
    #: The controller's address (host:port) of parameter servers that run already, and the file that has their secret.
    servers: str | None = None
    secret_file: str | Path | None = None

    def __post_init__(self) -> None:
        for name, minimum in (("keep", 1), ("every", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < minimum):
                raise JobError(f"{name}={value!r}: a whole number of at least {minimum}")
        if isinstance(self.override, str) or not all(isinstance(name, str) and name for name in self.override):
            raise JobError(f'override={self.override!r}: a list of names of settings, as ["optimizer.lr"]')
        object.__setattr__(self, "override", tuple(self.override))  # a list from JSON or a file
        for name in ("verify", "fallback"):
            if type(getattr(self, name)) is not bool:
                raise JobError(f"{name}={getattr(self, name)!r}: True or False")
        if (self.servers is None) != (self.secret_file is None):
            given, missing = ("servers", "secret_file") if self.secret_file is None else ("secret_file", "servers")
            raise JobError(
                f"{given}={getattr(self, given)}: without {missing}; both are told by `echelon serve`, give both (--servers, --secret-file)"
            )
        if self.certificate is not None and not Path(self.certificate).is_file():
            raise JobError(f"{self.certificate}: no certificate there; `echelon verify` writes one")


#: What the command line, the environment and the file call differently from `Settings`.
_EXTERNAL_NAMES = {"folder": "out", "certificate": "require_certificate"}


def resolve_train_settings(plan: Any, settings: Mapping[str, Any]) -> tuple[Any, Settings]:
    """The plan and the settings of `echelon.train`: what the call says, else the environment, else the file, else the default."""
    unknown = [name for name in settings if name not in Settings.__slots__]
    if unknown:
        close_matches = difflib.get_close_matches(unknown[0], Settings.__slots__, 1)
        hint = f"did you mean {close_matches[0]}?" if close_matches else f"it takes {', '.join(Settings.__slots__)}"
        raise JobError(f"train: {unknown[0]!r} is no setting of it; {hint}")
    command_line = {_EXTERNAL_NAMES.get(name, name): value for name, value in settings.items()} | {"plan": plan}
    values = {
        name: setting.value
        for name, setting in merge_settings(
            command_line, read_settings(), Path(SETTINGS_FILE), default_values()
        ).items()
    }
    return values["plan"], Settings(**{name: values[_EXTERNAL_NAMES.get(name, name)] for name in Settings.__slots__})


def default_values() -> dict[str, Any]:
    """What happens when nothing is said, under the command line's names."""
    settings = Settings()
    return {"plan": "auto"} | {_EXTERNAL_NAMES.get(name, name): getattr(settings, name) for name in Settings.__slots__}


def _read_file(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EchelonError(f"{file}: cannot be read as TOML ({error})") from error
    train = tables.get("train", {})
    if set(tables) - {"train"} or not isinstance(train, dict):
        raise EchelonError(f"{file}: settings stand in one table, [train]; found {', '.join(tables)}")
    for name in train:
        if name not in SETTING_TYPES:
            close_matches = difflib.get_close_matches(name, SETTING_TYPES, 1)
            hint = (
                f"did you mean {close_matches[0]}?" if close_matches else f"the settings are {', '.join(SETTING_TYPES)}"
            )
            raise EchelonError(f"{file}: train.{name} is no setting; {hint}")
    return train


def _parse_text(text: str, setting_type: type, where: str) -> Any:
    if setting_type is list:
        return [name.strip() for name in text.split(",") if name.strip()]
    if setting_type is int and text.strip().lstrip("-").isdigit():
        return int(text)
    if setting_type is bool and text.strip().lower() in _BOOLEAN_WORDS:
        return _BOOLEAN_WORDS[text.strip().lower()]
    return _require_type(text, setting_type, where)


def _require_type(value: Any, setting_type: type, where: str) -> Any:
    has_right_type = type(value) is setting_type and (
        not isinstance(value, list) or all(isinstance(item, str) for item in value)
    )
    if not has_right_type:
        expected = {int: "a whole number", bool: "true or false", str: "text", list: "a list of names"}[setting_type]
        raise EchelonError(f"{where}={value!r}: give {expected}")
    return value
