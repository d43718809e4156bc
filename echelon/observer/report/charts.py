"""Lay out line charts and histograms: SVG paths in a box of 1000 x 1000, labels in percent of it. The template draws them.

The SVG stretches to its place while labels are HTML on top, so that text keeps its size on any screen. Colours are CSS variables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Points = Sequence[tuple[float, float]]

#: A raw curve is drawn as the extremes of this many columns: spikes stay, the page stays small.
_MAX_COLUMNS = 400
_MAX_POINTS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve. `role` is a CSS class: raw, main, second."""

    label: str
    points: Points
    role: str = "main"
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart laid out. `label` is for screen readers; without `hover` no values are shown under the pointer."""

    title: str = ""
    label: str
    #: (CSS class, SVG path data)
    paths: Sequence[tuple[str, str]]
    #: (CSS class, position as CSS, text)
    ticks: Sequence[tuple[str, str, str]]
    #: (CSS variable of the colour, name) of each curve
    legend: Sequence[tuple[str, str]] = ()
    hover: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    low: float
    high: float
    log: bool = False

    def position(self, value: float) -> float:
        """Where `value` lies, 0 to 1, clipped."""
        if self.log:
            fraction = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            fraction = (value - self.low) / (self.high - self.low)
        return min(max(fraction, 0.0), 1.0)

    def ticks(self, approximate_count: int = 4) -> list[float]:
        """Round values inside the interval."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps: tuple[int, ...] = (1, 3) if len(decades) > 2 else (1, 2, 5)
            steps = (1,) if len(decades) > approximate_count + 1 else steps
            stride = max(len(decades) // (approximate_count + 2), 1)
            values = [m * 10.0**d for d in decades if d % stride == 0 for m in steps]
        else:
            step = _round_step((self.high - self.low) / approximate_count)
            first = math.ceil(self.low / step - 1e-9)
            values = [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [value for value in values if self.low <= value * (1 + 1e-12) and value <= self.high * (1 + 1e-12)]


def fit_scale(values: Sequence[float], *, zero: bool = False, log: bool = False) -> Scale:
    """A scale that shows all of `values` with a little room; logarithmic where asked and the values span enough."""
    low, high = min(values), max(values)
    if log and low > 0 and high / low > 30:
        return Scale(low / 1.15, high * 1.15, log=True)
    if zero:
        low = min(low, 0.0)
    if high == low:
        margin = abs(high) * 0.5 or 1.0
        return Scale(0.0 if low >= 0 else low - margin, high + margin)
    margin = 0.06 * (high - low)
    return Scale(low if low == 0 else max(low - margin, 0.0) if low > 0 else low - margin, high + margin)


def line_chart(
    title: str, curves: Sequence[Curve], format_value: Callable[[float], str], *, zero: bool = False, log: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> Chart:  # fmt: skip
    """Curves over steps. `format_value` writes a value with its unit; `marks` are labelled vertical lines."""
    steps = [x for curve in curves for x, _ in curve.points]
    x_scale = Scale(min(steps), max(steps)) if max(steps) > min(steps) else Scale(min(steps) - 1, min(steps) + 1)
    y_scale = fit_scale([y for curve in curves for _, y in curve.points], zero=zero, log=log)
    y_ticks = [(_y_position(y_scale, tick), format_value(tick)) for tick in y_scale.ticks()]
    x_ticks = [tick for tick in x_scale.ticks() if tick == int(tick)]
    paths = [("grid", f"M0 {position}H1000") for position, _ in y_ticks]
    paths += [("mark", f"M{1000 * x_scale.position(x):.1f} 0V1000") for x, _ in marks]
    paths += [path for curve in curves for path in _curve_paths(curve, x_scale, y_scale)]
    ticks = [("y", f"top:{position / 10:.2f}%", text) for position, text in y_ticks]
    ticks += [_x_tick(x_scale, tick, f"{'step ' * (i == 0)}{tick:,.0f}") for i, tick in enumerate(x_ticks)]
    ticks += [("word", f"left:{100 * x_scale.position(x):.2f}%", word) for x, word in marks]
    lines = [
        {"label": curve.label, "points": [[x, format_value(y)] for x, y in thin(curve.points, _MAX_POINTS)]}
        for curve in [curve for curve in curves if curve.role != "raw"] or curves
    ]
    label, legend = f"{', '.join(curve.label for curve in curves)} over steps", [(c.role, c.label) for c in curves]
    hover = {"low": x_scale.low, "high": x_scale.high, "lines": lines}
    return Chart(title=title, label=label, paths=paths, ticks=ticks, legend=legend, hover=hover)


def histogram(values: Sequence[float], format_value: Callable[[float], str], *, bins: int = 40) -> Chart:
    """How often each size occurs. The largest half percent is cut off, so that one outlier does not flatten the rest."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[min(int(len(ordered) * 0.995), len(ordered) - 1)]
    if high <= low:
        low, high = low * 0.9, low * 1.1 or 1.0
    bins = min(bins, max(len(ordered) // 4, 5))
    counts = Counter(min(int((value - low) / (high - low) * bins), bins - 1) for value in ordered if value <= high)
    width, tallest = 1000 / bins, max(counts.values())
    tops = {(i + 0.06) * width: 1000 - 960 * n / tallest for i, n in sorted(counts.items())}
    bars = [("bar", f"M{x:.1f} 1000V{top:.1f}h{width * 0.88:.1f}V1000z") for x, top in tops.items()]
    x_scale = Scale(low, high)
    ticks = [_x_tick(x_scale, tick, format_value(tick)) for tick in x_scale.ticks(5)]
    return Chart(label="distribution", paths=bars, ticks=ticks)


def smooth(points: Points, window: int | None = None) -> list[tuple[float, float]]:
    """The moving average. The window narrows towards the start, where curves are steep, and not towards the end, where one odd
    step would look like the result."""
    values = [y for _, y in points]
    # A twentieth of a short run; a long one has detail that so wide a window would wash out.
    default_window = min(len(values) // 20, max(len(values) // 200, 100))
    half = (default_window if window is None else window) // 2 or 1
    sums = [0.0, *accumulate(values)]
    windows = [(max(i - half, 0), min(i + min(half, i) + 1, len(values))) for i in range(len(values))]
    means = [(sums[stop] - sums[begin]) / (stop - begin) for begin, stop in windows]
    return [(x, mean) for (x, _), mean in zip(points, means, strict=True)]


def thin(points: Points, limit: int) -> list[tuple[float, float]]:
    """At most `limit` of the points, evenly chosen, both ends among them."""
    if len(points) <= limit:
        return list(points)
    return [points[round(i * (len(points) - 1) / (limit - 1))] for i in range(limit)]


def envelope(points: Points, columns: int = _MAX_COLUMNS) -> list[tuple[float, float]]:
    """The lowest and highest point of each of `columns` stretches, in order: what the eye would see of all of them."""
    if len(points) <= 2 * columns:
        return list(points)
    extremes: list[tuple[float, float]] = []
    for i in range(columns):
        stretch = points[i * len(points) // columns : (i + 1) * len(points) // columns]
        extremes += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return extremes


def _curve_paths(curve: Curve, x_scale: Scale, y_scale: Scale) -> list[tuple[str, str]]:
    points = envelope(curve.points) if curve.role == "raw" else thin(curve.points, _MAX_POINTS)
    positions = [f"{round(1000 * x_scale.position(x), 1):g} {_y_position(y_scale, y):g}" for x, y in points]
    has_dots = curve.dots or len(positions) == 1
    dots = [(f"dot {curve.role}", f"M{position}h.01") for position in positions if has_dots]
    return [(f"line {curve.role}", f"M{'L'.join(positions)}"), *dots]


def _x_tick(x_scale: Scale, tick: float, text: str) -> tuple[str, str, str]:
    """A label below the plot, aligned to stay inside at either end."""
    position = x_scale.position(tick)
    side = " first" if position < 0.04 else " last" if position > 0.94 else ""
    return f"x{side}", f"left:{100 * position:.2f}%", text


def _y_position(y_scale: Scale, value: float) -> float:
    return round(1000 * (1 - y_scale.position(value)), 1)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * 0.999)
