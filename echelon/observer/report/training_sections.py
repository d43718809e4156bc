"""The parts of the report that tell how the training went: summary, curves, time, forecast against measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from echelon.observer.eta import unhindered_rate
from echelon.observer.report.charts import Line, chart, histogram, smooth
from echelon.observer.report.html_parts import against, against_key, card, key, notes, section, stack, tile
from echelon.observer.run_reader import Record, figure
from echelon.plan import format_units
from echelon.plan.forecast import Forecast


def summary(record: Record) -> str:
    """The figures that a person asks for first."""
    steps, start = record.of("step"), record.start
    if not steps:
        return "<p>No step was finished, so there is nothing to draw: the log ends before the first one.</p>"
    total = start.get("steps")
    tiles = []
    losses = record.series("step", "loss")
    if losses:
        tail = [value for _, value in losses[-max(min(50, len(losses) // 10), 1) :]]
        extent = f"mean of the last {len(tail)} steps" if len(tail) > 1 else "of the last step"
        tiles.append(("training loss", format_units.number(statistics.fmean(tail)), extent))
    for name in _metric_names(record):
        points = record.series("evaluation", "metrics", name)
        if points:
            tiles.append((_evaluated(name), format_units.number(points[-1][1]), _span(points)))
    done = f"{steps[-1].step:,}"
    tiles.append(("steps", done, f"of {total:,}" if isinstance(total, int) else ""))
    tiles.append(("duration", format_units.seconds(record.duration), _parts(len(record.of("start")))))
    if record.rate is not None:
        tiles.append(("throughput", format_units.rate(record.rate), ""))
    single = unhindered_rate(record.forecast) if isinstance(record.forecast, Forecast) else None
    if record.rate is not None and single:
        tiles.append(
            (
                "parallel efficiency",
                format_units.share(record.rate / single),
                f"of {record.start.get('ranks')} × one rank alone, as forecast",
            )
        )
    peak = record.memory.get("peak")
    if isinstance(peak, int | float):
        tiles.append(("peak memory", format_units.size(peak), "of the largest rank"))
    return '<div class="tiles">' + "".join(tile(*figures) for figures in tiles) + "</div>"


def curves(record: Record) -> str:
    """Loss, evaluation, learning rate, gradient norm and throughput over steps."""
    marks = _marks(record)
    losses = record.series("step", "loss")
    cards: list[tuple[str, str, str]] = []
    if losses:
        lines = [Line(label="each step", points=losses, role="raw"), Line(label="training", points=smooth(losses))]
        evaluated = record.series("evaluation", "metrics", "loss")
        if evaluated:
            lines.append(Line(label="evaluation", points=evaluated, role="second", dots=len(evaluated) <= 60))
        cards.append(("Loss", key(lines), chart(lines, format_units.number, log=True, marks=marks)))
    for name in _metric_names(record):
        points = record.series("evaluation", "metrics", name)
        if name != "loss" and points:
            line = Line(label=name, points=points, role="second", dots=len(points) <= 60)
            cards.append((_evaluated(name).capitalize(), "", chart([line], format_units.number)))
    rates = record.series("step", "rate")
    if rates:
        cards.append(("Learning rate", "", chart([Line(label="rate", points=rates)], format_units.number, zero=True)))
    norms = record.series("step", "norm")
    if norms:
        lines = [Line(label="each step", points=norms, role="raw"), Line(label="norm", points=smooth(norms))]
        cards.append(("Gradient norm, before clipping", key(lines), chart(lines, format_units.number, log=True)))
    speed = [(float(event.step), (figure(event, "samples") or 0) / event.data["seconds"]) for event in record.warm]
    if speed:
        lines = [Line(label="each step", points=speed, role="raw"), Line(label="samples/s", points=smooth(speed))]
        cards.append(("Samples per second", key(lines), chart(lines, format_units.count, zero=True)))
    if not cards:
        return ""
    remarks = (
        [] if record.of("evaluation") else ["No evaluation was made: the job has no <code>evaluation=</code> data."]
    )
    broken = [event.step for event in record.of("step") if figure(event, "loss") is None]
    if broken:
        remarks.append(f"The loss was not a number at {len(broken):,} steps, first at step {broken[0]:,}.")
    if not norms and losses:
        remarks.append("Gradient norms were not recorded: they are measured where the job clips gradients.")
    # The first is wide, the others stand in pairs; one without a partner is wide too.
    alone = {0, len(cards) - 1} if len(cards) % 2 == 0 else {0}
    drawn = "".join(card(*parts, wide=index in alone) for index, parts in enumerate(cards))
    return section("Curves", f'<div class="cards">{drawn}</div>' + notes(remarks))


def times(record: Record) -> str:
    """Where the time went, and how even the steps were."""
    steps = record.of("step")
    if not steps:
        return ""
    spent = sum(figure(event, "seconds") or 0 for event in steps)
    waited = sum(figure(event, "waited") or 0 for event in steps)
    evaluating = sum(figure(event, "seconds") or 0 for event in record.of("evaluation"))
    saving = sum(figure(event, "seconds") or 0 for event in record.of("checkpoint"))
    rest = max(record.duration - spent - evaluating - saving, 0.0)
    causes = [
        ("training steps", max(spent - waited, 0.0)), ("waiting for data", waited), ("evaluation", evaluating),
        ("checkpoints", saving), ("everything else", rest),
    ]  # fmt: skip
    bar = stack([cause for cause in causes if cause[1] > 0], format_units.seconds)
    share = f"Data waits are {format_units.share(waited / spent)} of step time." if spent else ""
    cards = card("All of the run", "", bar + notes([share] if share else []))
    times = sorted(event.data["seconds"] for event in record.warm)
    if times:
        cuts = [("median", 0.5), ("95 % within", 0.95), ("99 % within", 0.99), ("slowest", 1.0)]
        rows = "".join(
            f"<dt>{name}</dt><dd class='n'>{format_units.seconds(times[min(int(part * len(times)), len(times) - 1)])}</dd>"
            for name, part in cuts
        )
        cold = figure(steps[0], "seconds")
        first = f"The first step took {format_units.seconds(cold)}; it is not counted here." if cold else ""
        body = histogram(times, format_units.seconds) + f"<dl>{rows}</dl>" + notes([first] if first else [])
        cards += card("Time of a step", "", body)
    return section("Where the time went", f'<div class="cards">{cards}</div>')


def against_forecast(record: Record) -> str:
    """What was foretold and what came."""
    forecast = record.forecast
    if not isinstance(forecast, Forecast):
        return section("Forecast against measured", f"<p>{escape(forecast)}</p>")
    time, memory = forecast.time, forecast.memory
    rows = against("Step time", time.step, time.low, time.high, record.step_time, format_units.seconds)
    peak = record.memory.get("peak")
    measured = float(peak) if isinstance(peak, int | float) else None
    # On a CPU the whole process is measured, on a GPU what the allocator gave to the training.
    apart = 0.0 if str(record.start.get("device", "")).startswith("cuda") else memory.framework
    title = "Peak memory of the largest rank" + (", framework included" if apart else "")
    rows += against(title, memory.peak + apart, memory.low + apart, memory.high + apart, measured, format_units.size)
    causes = [
        (name, getattr(time, name))
        for name in ("forward", "backward", "bubble", "exchange", "optimizer", "input", "overhead")
    ]
    parts = [
        (name, getattr(memory, name))
        for name in ("parameters", "gradients", "optimizer", "activations", "temporary", "buckets")
    ]
    parts += [("framework", apart)]
    hidden = (
        [f"Another {format_units.seconds(time.hidden)} of exchange hide behind backward."] if time.hidden > 0 else []
    )
    at = [f"The peak is at {escape(forecast.peak_at)}."] if forecast.peak_at else []
    cards = card("Held against each other", against_key(), rows, wide=True)
    cards += card(
        "Forecast step by cause", "", stack([c for c in causes if c[1] > 0], format_units.seconds) + notes(hidden)
    )
    cards += card(
        "Forecast memory by component", "", stack([p for p in parts if p[1] > 0], format_units.size) + notes(at)
    )
    remarks = notes([escape(note) for note in forecast.notes])
    return section("Forecast against measured", f'<div class="cards">{cards}</div>{remarks}')


def _marks(record: Record) -> list[tuple[float, str]]:
    """Where the run was resumed: at the first step of each later part."""
    marks, waiting, seen = [], False, False
    for event in record.events:
        if event.kind == "start":
            waiting = seen
        elif event.kind == "step":
            if waiting:
                marks.append((float(event.step), "resumed"))
            waiting, seen = False, True
    return marks


def _metric_names(record: Record) -> list[str]:
    names: dict[str, None] = {}
    for event in record.of("evaluation"):
        metrics = event.data.get("metrics")
        names.update(dict.fromkeys(metrics) if isinstance(metrics, dict) else {})
    return list(names)


def _evaluated(name: str) -> str:
    return "evaluation loss" if name == "loss" else name


def _span(points: Sequence[tuple[float, float]]) -> str:
    values = [value for _, value in points]
    return f"{format_units.number(min(values))} to {format_units.number(max(values))}" if len(values) > 1 else ""


def _parts(starts: int) -> str:
    return f"in {starts} parts" if starts > 1 else ""
