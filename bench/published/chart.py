"""Forecast against printed step time as one figure: a point for each set of repeated runs, the diagonal, and a band of 20 %."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from bench.published.cases import Outcome
from bench.published.rows import Row, sets


def draw(rows: Sequence[Row], found: Mapping[str, Outcome], path: Path | str) -> int:
    """Write the figure as .svg or .png; returns how many points it has. A set of repeats is one point, at its median."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[float, float]]] = {}
    for alike in sets(row for row in rows if "time" in row.counts):
        printed = median(row.measured["iteration_s"] for row in alike)
        points.setdefault(alike[0].hardware["gpu"].split("-")[0], []).append(
            (printed, median(found[row.id].seconds for row in alike))
        )
    seconds = [value for each in points.values() for pair in each for value in pair]
    ends = (min(seconds) / 1.5, max(seconds) * 1.5)
    # Text as paths would be ten times as large, a date or random ids would change the file though nothing changed.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "echelon", "font.size": 10}):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.fill_between(
            ends, [end * 0.8 for end in ends], [end * 1.2 for end in ends], color="0.9", label="within 20 %"
        )
        axes.plot(ends, ends, color="0.5", linewidth=1)
        for gpu, pairs in sorted(points.items(), key=lambda item: -len(item[1])):
            axes.scatter(*zip(*pairs, strict=True), s=12, alpha=0.6, linewidths=0, label=f"{gpu} ({len(pairs)} runs)")
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="printed step time, s", ylabel="forecast, s")
        axes.legend(frameon=False, loc="upper left")
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)
    return sum(map(len, points.values()))
