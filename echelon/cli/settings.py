"""The settings of `echelon train`: command line over environment over file over default, each with where it came from."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError

#: The file that is looked for in the current folder; its settings stand under [train].
FILE = "echelon.toml"
#: Name -> kind. A name is --keep on the command line, ECHELON_KEEP in the environment, keep in the file.
KINDS: dict[str, type] = {
    "plan": str,
    "out": str,
    "keep": int,
    "every": int,
    "resume": bool,
    "require_certificate": str,
    "quiet": bool,
    "workers": int,
}
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One resolved value and its source."""

    name: str
    value: Any
    source: str


def resolve(
    given: Mapping[str, Any], environment: Mapping[str, str], file: Path, defaults: Mapping[str, Any]
) -> dict[str, Setting]:
    """Every setting. `given` is the command line's (None: not given), `environment` what the world read as ECHELON_*."""
    stored = _read(file)
    settings = {}
    for name, kind in KINDS.items():
        variable = f"ECHELON_{name.upper()}"
        if given.get(name) is not None:
            value, source = given[name], "command line"
        elif name in environment:
            value, source = _parse(environment[name], kind, variable), f"environment ({variable})"
        elif name in stored:
            value, source = _typed(stored[name], kind, f"{file}: train.{name}"), f"file ({file})"
        else:
            value, source = defaults[name], "default"
        settings[name] = Setting(name=name, value=value, source=source)
    return settings


def _read(file: Path) -> dict[str, Any]:
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
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(KINDS)}"
            raise EchelonError(f"{file}: train.{name} is no setting; {hint}")
    return train


def _parse(text: str, kind: type, where: str) -> Any:
    if kind is int and text.strip().lstrip("-").isdigit():
        return int(text)
    if kind is bool and text.strip().lower() in _WORDS:
        return _WORDS[text.strip().lower()]
    return _typed(text, kind, where)


def _typed(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        wanted = {int: "a whole number", bool: "true or false", str: "text"}[kind]
        raise EchelonError(f"{where}={value!r}: give {wanted}")
    return value
