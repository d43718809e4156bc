"""Draw a plan: its pipeline over time, its memory by stage, its ranks on the nodes. Also writes traces for Perfetto."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, BinaryIO

from echelon.errors import PlanError
from echelon.plan.format_units import format_bytes
from echelon.simulator.timeline import Timeline

_PHASE_COLOURS = {
    "forward": "#4c78a8", "backward": "#f58518", "weights": "#eeca3b", "exchange": "#b279a2", "optimizer": "#54a24b",
}  # fmt: skip
_COMPONENT_COLOURS = {
    "parameters": "#4c78a8", "gradients": "#f58518", "optimizer": "#54a24b", "activations": "#e45756", "temporary": "#eeca3b", "buckets": "#b279a2",
    "framework": "#9d9d9d",
}  # fmt: skip
#: Most nodes drawn.
_MAX_NODES = 8
#: Most labels along an axis.
_MAX_LABELS = 16


def write_figure(timeline: Timeline, path: str | Path) -> Path:
    """Write the figure as SVG or PNG, by the suffix of `path`."""
    target = Path(path)
    if target.suffix not in (".svg", ".png"):
        raise PlanError(f"{path}: a figure is a .svg or .png file")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        _save_figure(timeline, file, target.suffix[1:])
    return target


def to_svg(timeline: Timeline) -> str:
    file = io.BytesIO()
    _save_figure(timeline, file, "svg")
    text = file.getvalue().decode()
    return text[text.index("<svg") :]


def _save_figure(timeline: Timeline, file: BinaryIO, file_format: str) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text, and equal figures have equal bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "echelon", "font.size": 9}):
        pp = timeline.plan.mesh.pp
        height = min(max(pp, 3), 24) * 0.28
        figure = Figure(figsize=(11, 2 * height + 4), layout="constrained")
        time, memory, mesh = figure.subplots(3, 1, height_ratios=[height, height, 1.6])
        _draw_timeline(time, timeline)
        _draw_memory(memory, timeline)
        _draw_mesh(mesh, timeline)
        figure.suptitle(str(timeline.plan), fontsize=10)
        figure.savefig(file, format=file_format, metadata={"Date": None} if file_format == "svg" else None)


def _draw_timeline(axes: Any, timeline: Timeline) -> None:
    labelled = set()
    for event in timeline.events:
        label = None if event.kind in labelled else event.kind
        labelled.add(event.kind)
        axes.barh(
            event.rank, event.end - event.begin, left=event.begin, height=0.8, color=_PHASE_COLOURS[event.kind], edgecolor="white", linewidth=0.3,
            label=label, alpha=0.75 + 0.25 * (event.stage // timeline.plan.mesh.pp % 2 == 0),
        )  # fmt: skip
    shown, total = timeline.shown_micro_batches, timeline.micro_batch_count
    note = f" ({shown} of {total} micro-batches)" if shown < total else ""
    _finish_rank_axes(axes, timeline, f"a step{note}", "seconds", 5)


def _draw_memory(axes: Any, timeline: Timeline) -> None:
    for rank, rank_memory in enumerate(timeline.memory):
        left = 0.0
        for component, colour in _COMPONENT_COLOURS.items():
            size = getattr(rank_memory, component) / 1e9
            axes.barh(rank, size, left=left, height=0.8, color=colour, label=component if not rank else None)
            left += size
    axes.axvline(timeline.capacity / 1e9, color="black", linestyle="--", linewidth=1)
    title = f"memory of a rank; the line is the device: {format_bytes(timeline.capacity)}"
    _finish_rank_axes(axes, timeline, title, "GB", 7)


def _finish_rank_axes(axes: Any, timeline: Timeline, title: str, unit: str, legend_columns: int) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(unit)
    axes.legend(ncols=legend_columns, fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    pp = timeline.plan.mesh.pp
    stride = -(-pp // _MAX_LABELS)
    axes.set_yticks(range(0, pp, stride), [f"stage {rank}" if pp > 1 else "rank" for rank in range(0, pp, stride)])
    axes.set_ylim(pp - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_mesh(axes: Any, timeline: Timeline) -> None:
    mesh, per_node = timeline.plan.mesh, timeline.ranks_per_node
    ranks = min(mesh.ranks, _MAX_NODES * per_node)
    for rank in range(ranks):
        node, slot = divmod(rank, per_node)
        coordinate = mesh.coordinate(rank)
        shade = coordinate["pp"] / max(mesh.pp - 1, 1)
        colour = (0.85 - 0.55 * shade, 0.9 - 0.35 * shade, 1.0 - 0.2 * shade)
        axes.barh(0, 0.9 / per_node, left=node + slot / per_node, height=0.8, color=colour)
        if ranks <= 64:
            cut_axes = (axis for axis in ("pp", "dp", "cp", "tp") if getattr(mesh, axis) > 1)
            label = "\n".join(f"{axis}{coordinate[axis]}" for axis in cut_axes)
            axes.text(node + (slot + 0.45) / per_node, 0, label or "0", ha="center", va="center", fontsize=6)
    shown = -(-ranks // per_node)
    axes.set_xticks([node + 0.45 for node in range(shown)], [f"node {node}" for node in range(shown)])
    axes.set_yticks([])
    axes.set_xlim(-0.05, max(shown, 1))
    more = f" ({shown} of {timeline.nodes} nodes)" if timeline.nodes > shown else ""
    axes.set_title(f"ranks on the nodes{more}", loc="left", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


def write_trace(timeline: Timeline, path: str | Path) -> Path:
    """Write the step as a trace for Perfetto or chrome://tracing."""
    events: list[dict[str, Any]] = []
    for rank in range(timeline.plan.mesh.pp):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"stage {rank}"}})
    for event in timeline.events:
        name = event.kind if event.kind in ("exchange", "optimizer") else f"{event.kind} {event.micro_batch}"
        events.append(
            {
                "ph": "X", "name": name, "cat": event.kind, "pid": 0, "tid": event.rank, "ts": event.begin * 1e6,
                "dur": (event.end - event.begin) * 1e6, "args": {"stage": event.stage, "micro": event.micro_batch},
            }
        )  # fmt: skip
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"plan": str(timeline.plan)}}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(trace))
    return target
