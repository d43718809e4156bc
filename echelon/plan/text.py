"""Parse a plan's short form: `dp=2 zero=3 micro=8`. `str(plan)` writes it.

Defaults are omitted, except dp. The plan's model and its cuts over tp and pp have no short form: the document holds them, and a plan without them is
completed.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args

from echelon.errors import PlanError
from echelon.plan.mesh import Mesh
from echelon.plan.plan import FLAG_WORDS, VALUE_WORDS, BatchNorm, ExchangeMode, Plan, Precision, Recompute, Schedule

_AXES = tuple(Mesh().sizes)
_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "batchnorm": get_args(BatchNorm),
    "schedule": get_args(Schedule),
    "recompute": get_args(Recompute),
    "exchange": get_args(ExchangeMode),
    "dense": get_args(ExchangeMode),
}


def from_text(text: str) -> Plan:
    """Parse the short form of a plan; spaces or commas separate the words."""
    changes: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    try:
        for word in filter(None, re.split(r"[,\s]+", text.strip())):
            name, equals, value = word.partition("=")
            known = name in FLAG_WORDS or name in _AXES or name in VALUE_WORDS
            if not known or (name in FLAG_WORDS and equals):
                raise ValueError(f"{word!r} is not part of a plan{_suggest(name)}")
            field = FLAG_WORDS[name][0] if name in FLAG_WORDS else VALUE_WORDS.get(name, name)
            if field in sizes or field in changes:
                raise ValueError(f"{name} is given twice")
            if name in FLAG_WORDS:
                changes[field] = FLAG_WORDS[name][1]
            elif not value:
                raise ValueError(_describe_value(name))
            elif name in _AXES:
                sizes[name] = _parse_int(name, value)
            else:
                changes[field] = _parse_value(name, value)
        return Plan(mesh=Mesh(**sizes)).replace(**changes)
    except ValueError as error:
        raise PlanError(f"plan {text!r}: {error}") from error


def _parse_value(name: str, value: str) -> Any:
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(_CHOICES[name])}")
        return value
    if name == "shares":
        if not re.fullmatch(r"\d+(:\d+)*", value):
            raise ValueError(f"shares={value!r}: integers separated by colons, one per data rank: 3:1")
        return tuple(map(int, value.split(":")))
    return None if (name, value) == ("staleness", "none") else _parse_int(name, value)


def _parse_int(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{name}={value!r} is not an integer")
    return int(value)


def _describe_value(name: str) -> str:
    if name in _CHOICES:
        return f"{name} needs one of {', '.join(_CHOICES[name])}: {name}={_CHOICES[name][0]}, without spaces"
    values = {"shares": ("a number for each data rank", "3:1"), "staleness": ("a number of steps, or none", "4")}
    kind, example = values.get(name, ("a number", "2" if name in _AXES else "1"))
    return f"{name} needs {kind}: {name}={example}, without spaces"


def _suggest(name: str) -> str:
    words = [*_AXES, *VALUE_WORDS, *FLAG_WORDS]
    close_matches = difflib.get_close_matches(name.lower(), words, 1)
    if close_matches:
        return f"; did you mean {close_matches[0]}?"
    examples = [*(f"{axis}=2" for axis in _AXES), *(f"{word}=" for word in VALUE_WORDS), *FLAG_WORDS]
    return f"; a plan is made of {' '.join(examples)}"
