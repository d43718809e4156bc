"""Constants that no data sheet gives, each with a meaning, a unit and physical bounds, fitted to published runs.

They are in `fitted.json`; `python -m bench.published --fit FILE` finds their values. None depends on a model, a device or a source.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("fitted.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """`fitted.json` gives the meaning and the unit of each."""

    product: float
    traffic: float
    flash: float
    score: float
    stream: float
    compiled: float
    launch: float
    inside: float
    between: float
    latency_inside: float
    latency_between: float
    overlap: float
    straggling: float
    micro: float
    step: float
    slack: float
    cached: float
    context: float
    buffers: float
    spread: float
    unsure: float


@cache
def load_constants() -> FittedConstants:
    """The constants in the file."""
    entries = _read_entries()
    return FittedConstants(**{each.name: float(entries[each.name]["value"]) for each in fields(FittedConstants)})


def constant_bounds() -> dict[str, tuple[float, float]]:
    """The physical range of each constant."""
    entries = {each.name: _read_entries()[each.name] for each in fields(FittedConstants)}
    return {name: (float(entry["low"]), float(entry["high"])) for name, entry in entries.items()}


def fit_setting(name: str) -> float:
    """A hyperparameter of the fit. It was tuned on the same runs, so it counts as one of the constants."""
    return float(_read_entries()[name]["value"])


@cache
def constants_digest() -> str:
    """Identifies a set of constants."""
    return hashlib.sha256(repr(load_constants()).encode()).hexdigest()[:8]


def round_constants(constants: FittedConstants) -> FittedConstants:
    """Round to the precision of the file."""
    return FittedConstants(**{name: float(f"{value:.4g}") for name, value in asdict(constants).items()})


def format_constants_file(constants: FittedConstants) -> str:
    """The content of the file with these values."""
    values = asdict(round_constants(constants))
    lines = [
        f"  {json.dumps(name)}: {json.dumps(entry | {'value': values.get(name, entry['value'])})}"
        for name, entry in _read_entries().items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _read_entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return entries
