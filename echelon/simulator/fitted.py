"""The constants that no data sheet prints: each with a meaning, a unit and physical bounds, fitted to published runs.

All of them stand in `fitted.json`; `python -m bench.published --fit` finds their values. None depends on a model, a device or a source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("fitted.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
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


@cache
def fitted() -> Fitted:
    """The constants as they stand in the file."""
    plain = json.loads(_FILE.read_text(encoding="utf-8"))
    return Fitted(**{field.name: float(plain[field.name]["value"]) for field in fields(Fitted)})


@cache
def bounds() -> dict[str, tuple[float, float]]:
    """The physical range of each constant."""
    plain = json.loads(_FILE.read_text(encoding="utf-8"))
    return {name: (float(each["low"]), float(each["high"])) for name, each in plain.items()}


def keep(constants: Fitted) -> None:
    """Write new values into the file."""
    plain = json.loads(_FILE.read_text(encoding="utf-8"))
    for name in plain:
        plain[name]["value"] = float(f"{getattr(constants, name):.4g}")
    lines = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in plain.items()]
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    fitted.cache_clear()
