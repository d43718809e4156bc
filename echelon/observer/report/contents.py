"""Collect what the report shows: figures, curves and sentences of a run, as plain values for the templates."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import PlanError
from echelon.observer.eta import ideal_rate
from echelon.observer.report.charts import Chart, Curve, histogram, line_chart, smooth
from echelon.observer.run_reader import RunRecord, read_number
from echelon.plan import format_units as units
from echelon.plan.certificate import Certificate
from echelon.plan.cluster import Cluster, Node
from echelon.plan.describe import describe_plan
from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile

#: Different warnings and nodes that are shown.
_MAX_WARNINGS, _MAX_NODES = 30, 8
_TIME_CAUSES = ("forward", "backward", "bubble", "exchange", "optimizer", "input", "overhead")
_MEMORY_COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "temporary", "buckets")


def collect_contents(record: RunRecord) -> dict[str, Any]:
    """Everything that `templates/report.html.j2` shows of a run."""
    outcome = "no end recorded" if record.events else "nothing happened"
    if record.end is not None:
        outcome = str(record.end.data.get("reason", "ended"))
    nodes = record.cluster.nodes[:_MAX_NODES] if isinstance(record.cluster, Cluster) else ()
    return {
        "record": record,
        "name": str(record.start.get("job") or record.folder.name),
        "outcome": outcome,
        "tone": {"finished": "good", "failed": "bad"}.get(outcome, "care"),
        "tiles": _tiles(record), "curves": _curves(record), "curve_notes": _curve_notes(record),
        **_forecast_parts(record), **_time_parts(record), **_plan_parts(record), **_checkpoints(record),
        "nodes": [_describe_node(node) for node in nodes], "repeat": _repeat_facts(record),
        "warnings": _warnings(record), "max_warnings": _MAX_WARNINGS,
    }  # fmt: skip


def _tiles(record: RunRecord) -> list[tuple[str, str, str]]:
    """(name, value, detail) of the figures that a reader asks for first; none before the first step."""
    steps, start = record.events_of("step"), record.start
    if not steps:
        return []
    tiles = []
    losses = record.series("step", "loss")
    if losses:
        tail = [value for _, value in losses[-max(min(50, len(losses) // 10), 1) :]]
        detail = f"mean of the last {len(tail)} steps" if len(tail) > 1 else "of the last step"
        tiles.append(("training loss", units.format_number(statistics.fmean(tail)), detail))
    for name, points in _metrics(record).items():
        values = [value for _, value in points]
        span = f"{units.format_number(min(values))} to {units.format_number(max(values))}"
        title = "evaluation loss" if name == "loss" else name
        tiles.append((title, units.format_number(values[-1]), span if len(values) > 1 else ""))
    total, parts = start.get("steps"), len(record.events_of("start"))
    tiles.append(("steps", f"{steps[-1].step:,}", f"of {total:,}" if isinstance(total, int) else ""))
    tiles.append(("duration", units.format_seconds(record.duration), f"in {parts} parts" if parts > 1 else ""))
    if record.rate is not None:
        tiles.append(("throughput", units.format_rate(record.rate), ""))
        ideal = ideal_rate(record.forecast) if isinstance(record.forecast, Forecast) else None
        if ideal:
            detail = f"of {start.get('ranks')} × one rank alone, as forecast"
            tiles.append(("parallel efficiency", units.format_percent(record.rate / ideal), detail))
    peak = _peak_memory(record)
    if peak is not None:
        tiles.append(("peak memory", units.format_bytes(peak), "of the largest rank"))
    return tiles


def _curves(record: RunRecord) -> list[Chart]:
    charts, metrics = [], _metrics(record)
    if losses := record.series("step", "loss"):
        curves = _raw_and_smooth(losses, "training")
        if "loss" in metrics:
            curves.append(_evaluated("evaluation", metrics["loss"]))
        charts.append(line_chart("Loss", curves, units.format_number, log=True, marks=_resumed_steps(record)))
    for name, points in metrics.items():
        if name != "loss":
            charts.append(line_chart(name.capitalize(), [_evaluated(name, points)], units.format_number))
    if rates := record.series("step", "rate"):
        curves = [Curve(label="rate", points=rates)]
        charts.append(line_chart("Learning rate", curves, units.format_number, zero=True))
    if norms := record.series("step", "norm"):
        curves = _raw_and_smooth(norms, "norm")
        charts.append(line_chart("Gradient norm, before clipping", curves, units.format_number, log=True))
    if record.warm_steps:
        samples = [(event, read_number(event, "samples") or 0) for event in record.warm_steps]
        curves = _raw_and_smooth([(float(e.step), n / e.data["seconds"]) for e, n in samples], "samples/s")
        charts.append(line_chart("Samples per second", curves, units.format_count, zero=True))
    return charts


def _raw_and_smooth(points: Sequence[tuple[float, float]], label: str) -> list[Curve]:
    return [Curve(label="each step", points=points, role="raw"), Curve(label=label, points=smooth(points))]


def _evaluated(label: str, points: Sequence[tuple[float, float]]) -> Curve:
    return Curve(label=label, points=points, role="second", dots=len(points) <= 60)


def _curve_notes(record: RunRecord) -> list[str]:
    notes = []
    nan_steps = [event.step for event in record.events_of("step") if read_number(event, "loss") is None]
    if nan_steps:
        notes.append(f"The loss was not a number at {len(nan_steps):,} steps, first at step {nan_steps[0]:,}.")
    if record.series("step", "loss") and not record.series("step", "norm"):
        notes.append("Gradient norms were not recorded: they are measured where the job clips gradients.")
    return notes


def _resumed_steps(record: RunRecord) -> list[tuple[float, str]]:
    """The first step of each later part of the run, with the label of its mark."""
    marks, is_resumed, has_stepped = [], False, False
    for event in record.events:
        if event.kind == "start":
            is_resumed = has_stepped
        elif event.kind == "step":
            if is_resumed:
                marks.append((float(event.step), "resumed"))
            is_resumed, has_stepped = False, True
    return marks


def _metrics(record: RunRecord) -> dict[str, list[tuple[float, float]]]:
    evaluations = [event.data.get("metrics") for event in record.events_of("evaluation")]
    names = dict.fromkeys(name for metrics in evaluations if isinstance(metrics, dict) for name in metrics)
    series = {name: record.series("evaluation", "metrics", name) for name in names}
    return {name: points for name, points in series.items() if points}


def _peak_memory(record: RunRecord) -> float | None:
    peak = record.memory.get("peak")
    return float(peak) if isinstance(peak, int | float) else None


def _forecast_parts(record: RunRecord) -> dict[str, Any]:
    if not isinstance(record.forecast, Forecast):
        return {}
    time, memory = record.forecast.time, record.forecast.memory
    # On a CPU the whole process is measured, on a GPU only what the allocator gave to the training.
    framework = 0.0 if str(record.start.get("device", "")).startswith("cuda") else memory.framework
    components = [(name, getattr(memory, name)) for name in _MEMORY_COMPONENTS]
    return {
        "framework": framework,
        "peak": _peak_memory(record),
        "forecast_causes": [(name, getattr(time, name)) for name in _TIME_CAUSES],
        "forecast_components": [*components, ("framework", framework)],
    }


def _time_parts(record: RunRecord) -> dict[str, Any]:
    """Where the time went, and how even the steps were."""
    steps = record.events_of("step")

    def total(kind: str, field: str = "seconds") -> float:
        return sum(read_number(event, field) or 0 for event in record.events_of(kind))

    step_seconds, evaluation_seconds, checkpoint_seconds = total("step"), total("evaluation"), total("checkpoint")
    data_seconds = total("step", "waited")
    shares = [
        ("training steps", step_seconds - data_seconds), ("waiting for data", data_seconds), ("evaluation", evaluation_seconds),
        ("checkpoints", checkpoint_seconds),
        ("everything else", record.duration - step_seconds - evaluation_seconds - checkpoint_seconds),
    ]  # fmt: skip
    waits = f"Data waits are {units.format_percent(data_seconds / (step_seconds or 1))} of step time."
    seconds = sorted(event.data["seconds"] for event in record.warm_steps)
    step_times: dict[str, Any] = {}
    if seconds:
        quantiles = (("median", 0.5), ("95 % within", 0.95), ("99 % within", 0.99), ("slowest", 1.0))
        step_times = {
            "chart": histogram(seconds, units.format_seconds),
            "quantiles": [(name, seconds[min(int(q * len(seconds)), len(seconds) - 1)]) for name, q in quantiles],
            "first": read_number(steps[0], "seconds"),
        }
    notes = [waits] if step_seconds else []
    return {"time_shares": shares if steps else [], "time_notes": notes, "step_times": step_times}


def _plan_parts(record: RunRecord) -> dict[str, Any]:
    plan, proof = record.plan, record.certificate
    if not isinstance(plan, Plan):
        return {}
    if isinstance(proof, Certificate):
        largest = max((finding.max_difference for finding in proof.findings), default=0.0)
        limitation = f" Weaker than usual: {proof.limitation}." if proof.limitation else ""
        reference, result = proof.reference_description, f"largest relative difference {largest:.1e}"
        verdict = f"The proof failed: {proof.divergent or 'a tensor'} differs from what {reference} computes."
        if proof.verified:
            verdict = f"Proved in float64 against {reference} over {proof.steps} steps: {result}."
        proof = verdict + limitation
    batch = record.start.get("batch")
    decisions = describe_plan(plan, batch if isinstance(batch, int) and batch >= plan.mesh.dp else None).splitlines()
    timeline, error = _draw_timeline(record)
    return {"decisions": decisions, "proof": proof, "timeline": timeline, "timeline_error": error}


def _draw_timeline(record: RunRecord) -> tuple[str, str]:
    """The forecast step as SVG, and why it cannot be drawn; both empty where the run folder lacks a document for it."""
    plan, profile, cluster = record.plan, record.profile, record.cluster
    if not (isinstance(plan, Plan) and isinstance(profile, Profile) and isinstance(cluster, Cluster)):
        return "", ""
    from echelon.observer.plan_figure import to_svg
    from echelon.simulator.timeline import build_timeline

    try:
        return to_svg(build_timeline(profile, cluster, plan)), ""
    except PlanError as error:
        return "", str(error)


def _describe_node(node: Node) -> dict[str, Any]:
    device = node.devices[0]
    count = f"{len(node.devices)} × " if len(node.devices) > 1 else ""
    memory = device.memory if device.kind == "cuda" else node.memory
    facts = [("device", f"{count}{device.name}"), ("memory", units.format_bytes(memory)), ("cores", f"{node.cores:,}")]
    if device.instructions:
        facts.append(("instructions", ", ".join(device.instructions)))
    fastest: dict[str, float] = {}
    for curve in device.curves:
        if curve.operation.startswith("mm"):
            fastest[curve.dtype] = max(fastest.get(curve.dtype, 0.0), *(point.rate for point in curve.points))
    rates = [f"{dtype} {units.format_digits(rate / 1e9)} GFLOP/s" for dtype, rate in fastest.items()]
    if rates:
        facts.append(("matrix products", ", ".join(rates)))
    for link in {(link.operation, link.backend): link for link in node.links}.values():
        bandwidth, latency = units.format_bytes(link.bandwidth), units.format_seconds(link.latency)
        text = f"{bandwidth}/s, {latency} at least ({link.backend}, {link.ranks} ranks)"
        facts.append((link.operation.replace("_", "-"), text))
    return {"name": node.name, "facts": facts}


def _checkpoints(record: RunRecord) -> dict[str, Any]:
    """(step, path, whether it is the best, size, seconds) of the checkpoints that still exist, and how many were removed."""
    events = record.events_of("checkpoint")
    best = next((event for event in reversed(events) if event.data.get("best")), None)
    rows = []
    for event in events:
        path = str(event.data.get("path", ""))
        size, seconds = read_number(event, "bytes"), read_number(event, "seconds")
        # Where the run folder has moved, checkpoints are next to its log.
        if path and (Path(path).exists() or (record.folder / "checkpoints" / Path(path).name).exists()):
            size_text = "–" if size is None else units.format_bytes(size)
            seconds_text = "–" if seconds is None else units.format_seconds(seconds)
            rows.append((event.step, path, event is best, size_text, seconds_text))
    return {"checkpoints": rows, "removed": len(events) - len(rows)}


def _warnings(record: RunRecord) -> list[tuple[int, str, list[int]]]:
    """(rank, message, steps) of every warning, equal ones counted once."""
    steps: dict[tuple[int, str], list[int]] = {}
    for event in record.events_of("warning"):
        steps.setdefault((event.rank, str(event.data.get("message", ""))), []).append(event.step)
    return [(rank, message, numbers) for (rank, message), numbers in steps.items()]


def _repeat_facts(record: RunRecord) -> list[tuple[str, str]]:
    start, facts = record.start, []
    file, plan = start.get("file"), start.get("plan")
    if file:
        facts.append(("command", shlex.join(["echelon", "train", str(file), *(["--plan", str(plan)] if plan else [])])))
    elif plan:
        facts.append(("plan", str(plan)))
    facts += [(name, str(start[name])) for name in ("seed", "batch", "epochs", "steps") if start.get(name) is not None]
    versions = start.get("versions") or (record.cluster.versions if isinstance(record.cluster, Cluster) else {})
    if isinstance(versions, Mapping) and versions:
        facts.append(("versions", ", ".join(f"{name} {value}" for name, value in versions.items())))
    return [*facts, ("folder", str(record.folder))]
