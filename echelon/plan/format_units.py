"""Format numbers for people: with a unit, in significant digits."""

from __future__ import annotations

import math
from collections.abc import Callable

#: Formats a value with its unit.
Formatter = Callable[[float], str]


def format_seconds(value: float) -> str:
    """A duration: `840 µs`, `12.3 ms`, `4.56 s`, `3 min 20 s`, `2 h 05 min`, `3 d 04 h`."""
    if value < 0 or not math.isfinite(value):
        return "–"
    if value < 59.95:
        for unit, unit_seconds in (("s", 1.0), ("ms", 1e-3)):
            if value >= 0.9995 * unit_seconds:
                return f"{format_digits(value / unit_seconds)} {unit}"
        return f"{format_digits(value * 1e6)} µs"
    whole_seconds = round(value)
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    minutes = round(value / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(value / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def format_clock(value: float) -> str:
    """A duration on a progress bar: `0:07`, `12:34`, `2:05:09`."""
    whole_seconds = max(round(value), 0)
    hours, remainder = divmod(whole_seconds, 3600)
    return f"{hours}:{remainder // 60:02d}:{remainder % 60:02d}" if hours else f"{remainder // 60}:{remainder % 60:02d}"


def format_bytes(value: float) -> str:
    """Bytes in decimal units: `512 B`, `4.20 MB`."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if abs(value) >= 0.9995 * 10**power:
            return f"{format_digits(value / 10**power)} {unit}"
    return f"{value:.0f} B"


def format_count(value: float) -> str:
    """A count: `1,234`, `1.23 million`, `4.56 billion`."""
    for unit, power in (("trillion", 12), ("billion", 9), ("million", 6)):
        if abs(value) >= 0.9995 * 10**power:
            return f"{format_digits(value / 10**power)} {unit}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else format_digits(value)


def format_rate(value: float, unit: str = "samples") -> str:
    """A rate: `8,123 samples/s`."""
    return f"{format_count(value)} {unit}/s"


def format_percent(value: float) -> str:
    """A fraction as percent: `93 %`, `4.2 %`, `0.03 %`."""
    percent = 100 * value
    if abs(percent) >= 9.95 or percent == 0:
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if abs(percent) >= 0.095 else f"{percent:.2g} %"


def format_digits(value: float) -> str:
    """Three significant digits without an exponent: `4.56`, `45.6`, `456`."""
    magnitude = abs(value)
    if magnitude >= 99.95 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"


def format_number(value: float | None) -> str:
    """A loss or a metric: four significant digits, an exponent only where it must be."""
    if value is None or not math.isfinite(value):
        return "not a number"
    magnitude = abs(value)
    if value == 0 or 1e-4 <= magnitude < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= magnitude < 1e6 else f"{value:.3g}"
