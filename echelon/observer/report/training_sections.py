"""The parts of the report that tell how the training went: summary, curves, time, forecast against measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from echelon.observer.eta import ideal_rate
from echelon.observer.report.charts import Curve, histogram, line_chart, smooth
from echelon.observer.report.html_parts import (
    card,
    interval_chart,
    interval_legend,
    legend,
    notes,
    section,
    stacked_bar,
    tile,
)
from echelon.observer.run_reader import RunRecord, read_number
from echelon.plan import format_units
from echelon.plan.forecast import Forecast


def summary_tiles(record: RunRecord) -> str:
    """The figures that a person asks for first."""
    steps, start = record.events_of("step"), record.start
    if not steps:
        return "<p>No step was finished, so there is nothing to draw: the log ends before the first one.</p>"
    total = start.get("steps")
    tiles = []
    losses = record.series("step", "loss")
    if losses:
        tail = [value for _, value in losses[-max(min(50, len(losses) // 10), 1) :]]
        averaged_over = f"mean of the last {len(tail)} steps" if len(tail) > 1 else "of the last step"
        tiles.append(("training loss", format_units.format_number(statistics.fmean(tail)), averaged_over))
    for name in _metric_names(record):
        points = record.series("evaluation", "metrics", name)
        if points:
            tiles.append((_metric_title(name), format_units.format_number(points[-1][1]), _format_span(points)))
    last_step = f"{steps[-1].step:,}"
    tiles.append(("steps", last_step, f"of {total:,}" if isinstance(total, int) else ""))
    tiles.append(
        ("duration", format_units.format_seconds(record.duration), _format_parts(len(record.events_of("start"))))
    )
    if record.rate is not None:
        tiles.append(("throughput", format_units.format_rate(record.rate), ""))
    ideal = ideal_rate(record.forecast) if isinstance(record.forecast, Forecast) else None
    if record.rate is not None and ideal:
        tiles.append(
            (
                "parallel efficiency",
                format_units.format_percent(record.rate / ideal),
                f"of {record.start.get('ranks')} × one rank alone, as forecast",
            )
        )
    peak = record.memory.get("peak")
    if isinstance(peak, int | float):
        tiles.append(("peak memory", format_units.format_bytes(peak), "of the largest rank"))
    return '<div class="tiles">' + "".join(tile(*tile_texts) for tile_texts in tiles) + "</div>"


def curves_section(record: RunRecord) -> str:
    """Loss, evaluation, learning rate, gradient norm and throughput over steps."""
    marks = _resume_marks(record)
    losses = record.series("step", "loss")
    cards: list[tuple[str, str, str]] = []
    if losses:
        series_curves = [
            Curve(label="each step", points=losses, role="raw"),
            Curve(label="training", points=smooth(losses)),
        ]
        evaluated = record.series("evaluation", "metrics", "loss")
        if evaluated:
            series_curves.append(Curve(label="evaluation", points=evaluated, role="second", dots=len(evaluated) <= 60))
        cards.append(
            (
                "Loss",
                legend(series_curves),
                line_chart(series_curves, format_units.format_number, log=True, marks=marks),
            )
        )
    for name in _metric_names(record):
        points = record.series("evaluation", "metrics", name)
        if name != "loss" and points:
            curve = Curve(label=name, points=points, role="second", dots=len(points) <= 60)
            cards.append((_metric_title(name).capitalize(), "", line_chart([curve], format_units.format_number)))
    rates = record.series("step", "rate")
    if rates:
        cards.append(
            (
                "Learning rate",
                "",
                line_chart([Curve(label="rate", points=rates)], format_units.format_number, zero=True),
            )
        )
    norms = record.series("step", "norm")
    if norms:
        series_curves = [Curve(label="each step", points=norms, role="raw"), Curve(label="norm", points=smooth(norms))]
        cards.append(
            (
                "Gradient norm, before clipping",
                legend(series_curves),
                line_chart(series_curves, format_units.format_number, log=True),
            )
        )
    throughputs = [
        (float(event.step), (read_number(event, "samples") or 0) / event.data["seconds"]) for event in record.warm_steps
    ]
    if throughputs:
        series_curves = [
            Curve(label="each step", points=throughputs, role="raw"),
            Curve(label="samples/s", points=smooth(throughputs)),
        ]
        cards.append(
            (
                "Samples per second",
                legend(series_curves),
                line_chart(series_curves, format_units.format_count, zero=True),
            )
        )
    if not cards:
        return ""
    remarks = (
        []
        if record.events_of("evaluation")
        else ["No evaluation was made: the job has no <code>eval_data=</code> data."]
    )
    non_finite_steps = [event.step for event in record.events_of("step") if read_number(event, "loss") is None]
    if non_finite_steps:
        remarks.append(
            f"The loss was not a number at {len(non_finite_steps):,} steps, first at step {non_finite_steps[0]:,}."
        )
    if not norms and losses:
        remarks.append("Gradient norms were not recorded: they are measured where the job clips gradients.")
    # The first is wide, the others stand in pairs; one without a partner is wide too.
    full_width = {0, len(cards) - 1} if len(cards) % 2 == 0 else {0}
    cards_html = "".join(card(*card_parts, wide=index in full_width) for index, card_parts in enumerate(cards))
    return section("Curves", f'<div class="cards">{cards_html}</div>' + notes(remarks))


def time_section(record: RunRecord) -> str:
    """Where the time went, and how even the steps were."""
    steps = record.events_of("step")
    if not steps:
        return ""
    step_seconds = sum(read_number(event, "seconds") or 0 for event in steps)
    data_seconds = sum(read_number(event, "waited") or 0 for event in steps)
    evaluation_seconds = sum(read_number(event, "seconds") or 0 for event in record.events_of("evaluation"))
    checkpoint_seconds = sum(read_number(event, "seconds") or 0 for event in record.events_of("checkpoint"))
    other_seconds = max(record.duration - step_seconds - evaluation_seconds - checkpoint_seconds, 0.0)
    causes = [
        ("training steps", max(step_seconds - data_seconds, 0.0)), ("waiting for data", data_seconds), ("evaluation", evaluation_seconds),
        ("checkpoints", checkpoint_seconds), ("everything else", other_seconds),
    ]  # fmt: skip
    bar = stacked_bar([cause for cause in causes if cause[1] > 0], format_units.format_seconds)
    share = (
        f"Data waits are {format_units.format_percent(data_seconds / step_seconds)} of step time."
        if step_seconds
        else ""
    )
    cards = card("All of the run", "", bar + notes([share] if share else []))
    step_times = sorted(event.data["seconds"] for event in record.warm_steps)
    if step_times:
        quantiles = [("median", 0.5), ("95 % within", 0.95), ("99 % within", 0.99), ("slowest", 1.0)]
        rows = "".join(
            f"<dt>{name}</dt><dd class='n'>{format_units.format_seconds(step_times[min(int(quantile * len(step_times)), len(step_times) - 1)])}</dd>"
            for name, quantile in quantiles
        )
        first_seconds = read_number(steps[0], "seconds")
        first = (
            f"The first step took {format_units.format_seconds(first_seconds)}; it is not counted here."
            if first_seconds
            else ""
        )
        body = histogram(step_times, format_units.format_seconds) + f"<dl>{rows}</dl>" + notes([first] if first else [])
        cards += card("Time of a step", "", body)
    return section("Where the time went", f'<div class="cards">{cards}</div>')


def forecast_section(record: RunRecord) -> str:
    """What was foretold and what came."""
    forecast = record.forecast
    if not isinstance(forecast, Forecast):
        return section("Forecast against measured", f"<p>{escape(forecast)}</p>")
    time, memory = forecast.time, forecast.memory
    rows = interval_chart(
        "Step time", time.step, time.low, time.high, record.median_step_time, format_units.format_seconds
    )
    peak = record.memory.get("peak")
    measured = float(peak) if isinstance(peak, int | float) else None
    # On a CPU the whole process is measured, on a GPU what the allocator gave to the training.
    framework_bytes = 0.0 if str(record.start.get("device", "")).startswith("cuda") else memory.framework
    title = "Peak memory of the largest rank" + (", framework included" if framework_bytes else "")
    rows += interval_chart(
        title,
        memory.peak + framework_bytes,
        memory.low + framework_bytes,
        memory.high + framework_bytes,
        measured,
        format_units.format_bytes,
    )
    causes = [
        (name, getattr(time, name))
        for name in ("forward", "backward", "bubble", "exchange", "optimizer", "input", "overhead")
    ]
    parts = [
        (name, getattr(memory, name))
        for name in ("parameters", "gradients", "optimizer", "activations", "temporary", "buckets")
    ]
    parts += [("framework", framework_bytes)]
    hidden_note = (
        [f"Another {format_units.format_seconds(time.hidden)} of exchange hide behind backward."]
        if time.hidden > 0
        else []
    )
    peak_note = [f"The peak is at {escape(forecast.peak_at)}."] if forecast.peak_at else []
    cards = card("Held against each other", interval_legend(), rows, wide=True)
    cards += card(
        "Forecast step by cause",
        "",
        stacked_bar([cause for cause in causes if cause[1] > 0], format_units.format_seconds) + notes(hidden_note),
    )
    cards += card(
        "Forecast memory by component",
        "",
        stacked_bar([component for component in parts if component[1] > 0], format_units.format_bytes)
        + notes(peak_note),
    )
    remarks = notes([escape(note) for note in forecast.notes])
    return section("Forecast against measured", f'<div class="cards">{cards}</div>{remarks}')


def _resume_marks(record: RunRecord) -> list[tuple[float, str]]:
    """Where the run was resumed: at the first step of each later part."""
    marks, is_resumed, has_stepped = [], False, False
    for event in record.events:
        if event.kind == "start":
            is_resumed = has_stepped
        elif event.kind == "step":
            if is_resumed:
                marks.append((float(event.step), "resumed"))
            is_resumed, has_stepped = False, True
    return marks


def _metric_names(record: RunRecord) -> list[str]:
    names: dict[str, None] = {}
    for event in record.events_of("evaluation"):
        metrics = event.data.get("metrics")
        names.update(dict.fromkeys(metrics) if isinstance(metrics, dict) else {})
    return list(names)


def _metric_title(name: str) -> str:
    return "evaluation loss" if name == "loss" else name


def _format_span(points: Sequence[tuple[float, float]]) -> str:
    values = [value for _, value in points]
    return (
        f"{format_units.format_number(min(values))} to {format_units.format_number(max(values))}"
        if len(values) > 1
        else ""
    )


def _format_parts(starts: int) -> str:
    return f"in {starts} parts" if starts > 1 else ""
