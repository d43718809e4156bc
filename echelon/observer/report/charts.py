"""Line charts and histograms as HTML with inline SVG.

The picture stretches to its place (the SVG has no fixed aspect, strokes do not scale) while labels are HTML laid over it, so that
text has one size on a phone and on a wide screen. Colours are CSS variables of the page, so dark mode needs no second picture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

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


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to the unit interval and back to tick labels."""

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
            steps: tuple[int, ...] = (
                (1,) if len(decades) > approximate_count + 1 else (1, 3) if len(decades) > 2 else (1, 2, 5)
            )
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
    curves: Sequence[Curve],
    format_value: Callable[[float], str],
    *,
    zero: bool = False,
    log: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Curves over steps. `format_value` writes a value with its unit; `marks` are vertical lines with a word each."""
    curves = [curve for curve in curves if curve.points]
    steps = [x for curve in curves for x, _ in curve.points]
    x_scale = Scale(min(steps), max(steps)) if max(steps) > min(steps) else Scale(min(steps) - 1, min(steps) + 1)
    y_scale = fit_scale([y for curve in curves for _, y in curve.points], zero=zero, log=log)
    paths = "".join(_draw_curve(curve, x_scale, y_scale) for curve in curves)
    grid = "".join(f'<path class="grid" d="M0 {_y_position(y_scale, tick)}H1000"/>' for tick in y_scale.ticks())
    grid += "".join(f'<path class="mark" d="M{1000 * x_scale.position(x):.1f} 0V1000"/>' for x, _ in marks)
    labels = "".join(
        f'<span class="tick y" style="top:{_y_position(y_scale, tick) / 10:.2f}%">{escape(format_value(tick))}</span>'
        for tick in y_scale.ticks()
    )
    labels += _steps_axis(x_scale)
    labels += "".join(
        f'<span class="tick word" style="left:{100 * x_scale.position(x):.2f}%">{escape(word)}</span>'
        for x, word in marks
    )
    hover_curves = [curve for curve in curves if curve.role != "raw"] or curves
    hover = {
        "low": x_scale.low,
        "high": x_scale.high,
        "lines": [
            {
                "label": curve.label,
                "points": [[x, format_value(y)] for x, y in thin(curve.points, _MAX_POINTS)],
            }
            for curve in hover_curves
        ],
    }
    return (
        f'<div class="plot" data-hover="{escape(json.dumps(hover, separators=(",", ":")))}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(", ".join(curve.label for curve in curves))} over steps">{grid}{paths}</svg>{labels}</div>'
    )


def histogram(values: Sequence[float], format_value: Callable[[float], str], *, bins: int = 40) -> str:
    """How often each size occurs. The slowest half percent is cut off, so that one hiccup does not flatten the rest."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[min(int(len(ordered) * 0.995), len(ordered) - 1)]
    if high <= low:
        low, high = low * 0.9, low * 1.1 or 1.0
    bins = min(bins, max(len(ordered) // 4, 5))
    counts = [0] * bins
    for value in ordered:
        if value <= high:
            counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    tallest = max(counts)
    width = 1000 / bins
    bars = "".join(
        f'<rect x="{i * width + width * 0.06:.1f}" y="{1000 - 960 * n / tallest:.1f}" width="{width * 0.88:.1f}" '
        f'height="{960 * n / tallest:.1f}"/>'
        for i, n in enumerate(counts)
        if n
    )
    x_scale = Scale(low, high)
    labels = "".join(_x_label(x_scale, tick, format_value(tick)) for tick in x_scale.ticks(5))
    return (
        '<div class="plot bars"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="distribution">{bars}</svg>{labels}</div>'
    )


def smooth(points: Points, window: int | None = None) -> list[tuple[float, float]]:
    """Each point as the mean of its surroundings. The window narrows towards the start, where curves are steep, and not
    towards the end, where one odd step would look like the result."""
    values = [y for _, y in points]
    # A twentieth of a short run; a long one has detail that so wide a window would wash out.
    default_window = min(len(values) // 20, max(len(values) // 200, 100))
    half = (default_window if window is None else window) // 2 or 1
    sums = [0.0, *accumulate(values)]
    smoothed = []
    for i, (x, _) in enumerate(points):
        begin, stop = i - min(half, i), min(i + min(half, i) + 1, len(values))
        smoothed.append((x, (sums[stop] - sums[begin]) / (stop - begin)))
    return smoothed


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


def _draw_curve(curve: Curve, x_scale: Scale, y_scale: Scale) -> str:
    points = envelope(curve.points) if curve.role == "raw" else thin(curve.points, _MAX_POINTS)
    positions = [(round(1000 * x_scale.position(x), 1), _y_position(y_scale, y)) for x, y in points]
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in positions)
    drawn = f'<path class="line {curve.role}" d="{path}"/>'
    if curve.dots or len(positions) == 1:
        drawn += "".join(f'<path class="dot {curve.role}" d="M{x:g} {y:g}h.01"/>' for x, y in positions)
    return drawn


def _steps_axis(x_scale: Scale) -> str:
    ticks = [tick for tick in x_scale.ticks() if tick == int(tick)]
    return "".join(_x_label(x_scale, tick, f"{'step ' * (i == 0)}{tick:,.0f}") for i, tick in enumerate(ticks))


def _x_label(x_scale: Scale, tick: float, text: str) -> str:
    """A label under the picture; at either end it keeps inside."""
    position = x_scale.position(tick)
    side_class = " first" if position < 0.04 else " last" if position > 0.94 else ""
    return f'<span class="tick x{side_class}" style="left:{100 * position:.2f}%">{escape(text)}</span>'


def _y_position(y_scale: Scale, value: float) -> float:
    return round(1000 * (1 - y_scale.position(value)), 1)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * 0.999)
