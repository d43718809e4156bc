"""The constants that no data sheet prints: each with a meaning, a unit and physical bounds, fitted to published runs.

All of them stand in `fitted.json`; `python -m bench.published --fit FILE` finds their values. None depends on a model, a device or a source.
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
    """What each means and its unit: `fitted.json`."""

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
    """The constants as they stand in the file."""
    return FittedConstants(
        **{field.name: float(_read_entries()[field.name]["value"]) for field in fields(FittedConstants)}
    )


def constant_bounds() -> dict[str, tuple[float, float]]:
    """The physical range of each constant."""
    return {
        field.name: (float(_read_entries()[field.name]["low"]), float(_read_entries()[field.name]["high"]))
        for field in fields(FittedConstants)
    }


def fit_setting(name: str) -> float:
    """A figure of the fit itself that was chosen by how well it did, and counts among the constants therefore."""
    return float(_read_entries()[name]["value"])


@cache
def constants_digest() -> str:
    """Tells one set of constants from another."""
    return hashlib.sha256(repr(load_constants()).encode()).hexdigest()[:8]


def round_constants(constants: FittedConstants) -> FittedConstants:
    """With as many digits as the file has."""
    return FittedConstants(
        **{field.name: float(f"{getattr(constants, field.name):.4g}") for field in fields(FittedConstants)}
    )


def format_constants_file(constants: FittedConstants) -> str:
    """The file with other values."""
    values = asdict(round_constants(constants))
    lines = [
        f"  {json.dumps(name)}: {json.dumps(entry | {'value': values.get(name, entry['value'])})}"
        for name, entry in _read_entries().items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _read_entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return entries
