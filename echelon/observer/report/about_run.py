"""The parts of the report that tell what ran: plan, machine, checkpoints, warnings, how to repeat it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path

from echelon.errors import PlanError
from echelon.observer.report.html_parts import card, collapsible, definition_list, notes, section, table
from echelon.observer.run_reader import RunRecord, read_number
from echelon.plan import format_units
from echelon.plan.certificate import Certificate
from echelon.plan.cluster import Cluster, Node
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.text import describe_plan

#: Warnings of the same words are counted, and no more than this many kinds are shown.
_MAX_WARNINGS = 30


def header(record: RunRecord) -> str:
    """What this is, how it ended, when."""
    start = record.start
    name = str(start.get("job") or record.folder.name)
    outcome_text, tone = describe_outcome(record)
    ranks = start.get("ranks")
    facts_html = [f"<code>{escape(str(start['plan']))}</code>"] if start.get("plan") else []
    if isinstance(ranks, int):
        facts_html.append(
            f"{ranks} rank{'s' * (ranks != 1)}" + (f" on {escape(str(start['device']))}" if start.get("device") else "")
        )
    for field, unit in (("parameters", "parameters"), ("samples", "samples")):
        value = start.get(field)
        if isinstance(value, int | float):
            facts_html.append(f"{format_units.format_count(value)} {unit}")
    if isinstance(start.get("batch"), int):
        facts_html.append(f"batch {start['batch']:,}")
    if record.events:
        facts_html.append(format_time(record.events[0].time))
    line = "".join(f"<span>{bit}</span>" for bit in facts_html)
    return (
        f'<header><p class="over">Training run</p><h1>{escape(name)}</h1>'
        f'<p class="facts"><span class="pill {tone}">{escape(outcome_text)}</span>{line}</p>{_describe_ending(record)}</header>'
    )


def describe_outcome(record: RunRecord) -> tuple[str, str]:
    """How the run ended, as a word and its tone."""
    if not record.events:
        return "nothing happened", "care"
    if record.end is None:
        return "no end recorded", "care"
    reason = str(record.end.data.get("reason", "ended"))
    return reason, {"finished": "good", "failed": "bad"}.get(reason, "care")


def plan_section(record: RunRecord) -> str:
    """The plan in words and as JSON."""
    if not isinstance(record.plan, Plan):
        return section("Plan", f"<p>{escape(record.plan)}</p>")
    proof = record.certificate
    if isinstance(proof, Certificate):
        worst = max((finding.max_difference for finding in proof.findings), default=0.0)
        proof_text = (
            f"Proved in float64 against {proof.reference_description} over {proof.steps} steps: largest relative difference {worst:.1e}."
            if proof.verified
            else f"The proof failed: {proof.divergent or 'a tensor'} differs from what {proof.reference_description} computes."
        )
        proof_text += f" Weaker than usual: {proof.limitation}." if proof.limitation else ""
    else:
        proof_text = proof
    batch = record.start.get("batch")
    batch_size = batch if isinstance(batch, int) and batch >= record.plan.mesh.dp else None
    words = "".join(f"<li>{escape(decision)}</li>" for decision in describe_plan(record.plan, batch_size).splitlines())
    body = (
        f'<ul class="plain">{words}</ul>{notes([escape(proof_text)])}{collapsible("plan.json", record.plan.to_json())}'
    )
    return section("Plan", card(str(record.plan), "", body) + _timeline_card(record))


def _timeline_card(record: RunRecord) -> str:
    """The step as it was forecast; nothing where too little was kept to draw it."""
    if not (
        isinstance(record.plan, Plan) and isinstance(record.profile, Profile) and isinstance(record.cluster, Cluster)
    ):
        return ""
    from echelon.observer.plan_figure import to_svg
    from echelon.simulator.timeline import build_timeline

    try:
        step = build_timeline(record.profile, record.cluster, record.plan)
    except PlanError as error:
        return notes([escape(f"No picture of the step: {error}")])
    return card("The step as forecast", "", f'<div class="picture">{to_svg(step)}</div>', wide=True)


def machine_section(record: RunRecord) -> str:
    """The machine as it was measured."""
    cluster = record.cluster
    if not isinstance(cluster, Cluster):
        return section("Machine", f"<p>{escape(cluster)}</p>")
    cards = "".join(_node_card(node) for node in cluster.nodes[:8])
    more = [f"And {len(cluster.nodes) - 8} more nodes."] if len(cluster.nodes) > 8 else []
    more += [escape(note) for note in cluster.notes]
    return section("Machine", f'<div class="cards">{cards}</div>{notes(more)}')


def checkpoints_section(record: RunRecord) -> str:
    """What was saved and whether it is still there."""
    events = record.events_of("checkpoint")
    if not events:
        return section("Checkpoints", "<p>None was saved.</p>")
    rows, removed = [], 0
    best = next((event for event in reversed(events) if event.data.get("best")), None)
    for event in events:
        path = str(event.data.get("path", ""))
        if not _checkpoint_exists(record.folder, path):
            removed += 1
            continue
        saved, spent = read_number(event, "bytes"), read_number(event, "seconds")
        rows.append(
            [
                f'<span class="n">{event.step:,}</span>',
                escape(path) + (' <b class="good">best</b>' if event is best else ""),
                f'<span class="n">{format_units.format_bytes(saved) if saved is not None else "–"}</span>',
                f'<span class="n">{format_units.format_seconds(spent) if spent is not None else "–"}</span>',
            ]
        )
    checkpoint_table = table(("step", "path", "size", "took"), rows) if rows else ""
    remark = (
        f"{removed} more {'were' if removed > 1 else 'was'} saved and later removed to make room."
        if rows and removed
        else ""
    )
    remark = remark or (f"{removed} saved; none is there any more." if removed else "")
    return section("Checkpoints", card("", "", checkpoint_table + notes([remark] if remark else [])))


def warnings_section(record: RunRecord) -> str:
    """What any rank complained of, the same words counted once."""
    steps_by_warning: dict[tuple[int, str], list[int]] = {}
    for event in record.events_of("warning"):
        steps_by_warning.setdefault((event.rank, str(event.data.get("message", ""))), []).append(event.step)
    if not steps_by_warning:
        return section("Warnings", "<p>None.</p>")
    rows = [
        [str(rank), escape(message), f'<span class="n">{_format_steps(steps)}</span>']
        for (rank, message), steps in list(steps_by_warning.items())[:_MAX_WARNINGS]
    ]
    more = (
        [f"And {len(steps_by_warning) - _MAX_WARNINGS} more; they are in events.jsonl."]
        if len(steps_by_warning) > _MAX_WARNINGS
        else []
    )
    return section("Warnings", card("", "", table(("rank", "warning", "at"), rows) + notes(more)))


def repeat_section(record: RunRecord) -> str:
    """What another person needs to get the same run."""
    start = record.start
    pairs = []
    plan = start.get("plan")
    if start.get("file"):
        words = ["echelon", "train", str(start["file"]), *(["--plan", str(plan)] if plan else [])]
        pairs.append(("command", f"<code>{escape(shlex.join(words))}</code>"))
    elif plan:
        pairs.append(("plan", f"<code>{escape(str(plan))}</code>"))
    for name in ("seed", "batch", "epochs", "steps"):
        if start.get(name) is not None:
            pairs.append((name, escape(str(start[name]))))
    versions = start.get("versions") or (record.cluster.versions if isinstance(record.cluster, Cluster) else {})
    if isinstance(versions, Mapping) and versions:
        pairs.append(("versions", escape(", ".join(f"{name} {value}" for name, value in versions.items()))))
    pairs.append(("folder", f"<code>{escape(str(record.folder))}</code>"))
    missing = [] if start.get("file") else ["The job came from a script of its own: run that script again."]
    return section("How to repeat it", card("", "", definition_list(pairs) + notes(missing)))


def format_time(seconds: float) -> str:
    """A date and time of day, here."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _describe_ending(record: RunRecord) -> str:
    end = record.end
    if not record.events:
        return "<p class='note' style='margin-top:12px'>The event log is empty: the run stopped before it began.</p>"
    if end is None:
        last = record.events[-1]
        explanation = (
            f"The log stops at step {last.step:,} ({format_time(last.time)}): the run is still going, or it was killed."
        )
        return f'<p class="note" style="margin-top:12px">{explanation}</p>'
    where = f"Rank {end.rank}: " if end.rank else ""
    message = str(end.data.get("message") or "")
    return f'<p style="margin-top:12px">{escape(where + message)}</p>' if message else ""


def _node_card(node: Node) -> str:
    device = node.devices[0]
    device_count = f"{len(node.devices)} × " if len(node.devices) > 1 else ""
    pairs = [
        ("device", escape(f"{device_count}{device.name}")),
        (
            "memory",
            format_units.format_bytes(device.memory)
            if device.kind == "cuda"
            else format_units.format_bytes(node.memory),
        ),
        ("cores", f"{node.cores:,}"),
    ]
    if device.instructions:
        pairs.append(("instructions", escape(", ".join(device.instructions))))
    fastest: dict[str, float] = {}
    for curve in device.curves:
        if curve.operation.startswith("mm"):
            fastest[curve.dtype] = max(fastest.get(curve.dtype, 0.0), *(point.rate for point in curve.points))
    if fastest:
        words = ", ".join(
            f"{dtype} {format_units.format_digits(rate / 1e9)} GFLOP/s" for dtype, rate in fastest.items()
        )
        pairs.append(("matrix products", escape(words)))
    for link in {(link.operation, link.backend): link for link in node.links}.values():
        words = f"{format_units.format_bytes(link.bandwidth)}/s, {format_units.format_seconds(link.latency)} at least ({link.backend}, {link.ranks} ranks)"
        pairs.append((link.operation.replace("_", "-"), escape(words)))
    return card(node.name, "", definition_list(pairs))


def _checkpoint_exists(folder: Path, path: str) -> bool:
    """Whether a checkpoint is there: as it was written, or, where the run folder has moved, beside its log."""
    return bool(path) and (Path(path).exists() or (folder / "checkpoints" / Path(path).name).exists())


def _format_steps(steps: list[int]) -> str:
    return f"step {steps[0]:,}" if len(steps) == 1 else f"{len(steps)} times, first at step {steps[0]:,}"
