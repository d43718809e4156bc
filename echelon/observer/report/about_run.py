"""The parts of the report that tell what ran: plan, machine, checkpoints, warnings, how to repeat it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path

from echelon.errors import PlanError
from echelon.observer.report.html_parts import card, facts, fold, notes, section, table
from echelon.observer.run_reader import Record, figure
from echelon.plan import format_units
from echelon.plan.certificate import Certificate
from echelon.plan.cluster import Cluster, Node
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.text import explain

#: Warnings of the same words are counted, and no more than this many kinds are shown.
_MOST = 30


def header(record: Record) -> str:
    """What this is, how it ended, when."""
    start = record.start
    name = str(start.get("job") or record.folder.name)
    word, tone = outcome(record)
    ranks = start.get("ranks")
    bits = [f"<code>{escape(str(start['plan']))}</code>"] if start.get("plan") else []
    if isinstance(ranks, int):
        bits.append(
            f"{ranks} rank{'s' * (ranks != 1)}" + (f" on {escape(str(start['device']))}" if start.get("device") else "")
        )
    for field, word_of in (("parameters", "parameters"), ("samples", "samples")):
        value = start.get(field)
        if isinstance(value, int | float):
            bits.append(f"{format_units.count(value)} {word_of}")
    if isinstance(start.get("batch"), int):
        bits.append(f"batch {start['batch']:,}")
    if record.events:
        bits.append(moment(record.events[0].time))
    line = "".join(f"<span>{bit}</span>" for bit in bits)
    return (
        f'<header><p class="over">Training run</p><h1>{escape(name)}</h1>'
        f'<p class="facts"><span class="pill {tone}">{escape(word)}</span>{line}</p>{_ending(record)}</header>'
    )


def outcome(record: Record) -> tuple[str, str]:
    """How the run ended, as a word and its tone."""
    if not record.events:
        return "nothing happened", "care"
    if record.end is None:
        return "no end recorded", "care"
    reason = str(record.end.data.get("reason", "ended"))
    return reason, {"finished": "good", "failed": "bad"}.get(reason, "care")


def plan(record: Record) -> str:
    """The plan in words and as JSON."""
    if not isinstance(record.plan, Plan):
        return section("Plan", f"<p>{escape(record.plan)}</p>")
    proof = record.certificate
    if isinstance(proof, Certificate):
        worst = max((finding.worst for finding in proof.findings), default=0.0)
        said = (
            f"Proved in float64 against {proof.against} over {proof.steps} steps: largest relative difference {worst:.1e}."
            if proof.verified
            else f"The proof failed: {proof.divergent or 'a tensor'} differs from what {proof.against} computes."
        )
        said += f" Weaker than usual: {proof.weakness}." if proof.weakness else ""
    else:
        said = proof
    batch = record.start.get("batch")
    known = batch if isinstance(batch, int) and batch >= record.plan.mesh.dp else None
    words = "".join(f"<li>{escape(decision)}</li>" for decision in explain(record.plan, known).splitlines())
    body = f'<ul class="plain">{words}</ul>{notes([escape(said)])}{fold("plan.json", record.plan.to_json())}'
    return section("Plan", card(str(record.plan), "", body) + _picture(record))


def _picture(record: Record) -> str:
    """The step as it was forecast; nothing where too little was kept to draw it."""
    if not (
        isinstance(record.plan, Plan) and isinstance(record.profile, Profile) and isinstance(record.cluster, Cluster)
    ):
        return ""
    from echelon.observer.plan_figure import svg
    from echelon.simulator.timeline import timeline

    try:
        step = timeline(record.profile, record.cluster, record.plan)
    except PlanError as error:
        return notes([escape(f"No picture of the step: {error}")])
    return card("The step as forecast", "", f'<div class="picture">{svg(step)}</div>', wide=True)


def machine(record: Record) -> str:
    """The machine as it was measured."""
    cluster = record.cluster
    if not isinstance(cluster, Cluster):
        return section("Machine", f"<p>{escape(cluster)}</p>")
    cards = "".join(_node(node) for node in cluster.nodes[:8])
    more = [f"And {len(cluster.nodes) - 8} more nodes."] if len(cluster.nodes) > 8 else []
    more += [escape(note) for note in cluster.notes]
    return section("Machine", f'<div class="cards">{cards}</div>{notes(more)}')


def checkpoints(record: Record) -> str:
    """What was saved and whether it is still there."""
    events = record.of("checkpoint")
    if not events:
        return section("Checkpoints", "<p>None was saved.</p>")
    rows, gone = [], 0
    best = next((event for event in reversed(events) if event.data.get("best")), None)
    for event in events:
        path = str(event.data.get("path", ""))
        if not _exists(record.folder, path):
            gone += 1
            continue
        saved, spent = figure(event, "bytes"), figure(event, "seconds")
        rows.append(
            [
                f'<span class="n">{event.step:,}</span>',
                escape(path) + (' <b class="good">best</b>' if event is best else ""),
                f'<span class="n">{format_units.size(saved) if saved is not None else "–"}</span>',
                f'<span class="n">{format_units.seconds(spent) if spent is not None else "–"}</span>',
            ]
        )
    kept = table(("step", "path", "size", "took"), rows) if rows else ""
    remark = (
        f"{gone} more {'were' if gone > 1 else 'was'} saved and later removed to make room." if rows and gone else ""
    )
    remark = remark or (f"{gone} saved; none is there any more." if gone else "")
    return section("Checkpoints", card("", "", kept + notes([remark] if remark else [])))


def warnings(record: Record) -> str:
    """What any rank complained of, the same words counted once."""
    seen: dict[tuple[int, str], list[int]] = {}
    for event in record.of("warning"):
        seen.setdefault((event.rank, str(event.data.get("message", ""))), []).append(event.step)
    if not seen:
        return section("Warnings", "<p>None.</p>")
    rows = [
        [str(rank), escape(message), f'<span class="n">{_steps(steps)}</span>']
        for (rank, message), steps in list(seen.items())[:_MOST]
    ]
    more = [f"And {len(seen) - _MOST} more; they are in events.jsonl."] if len(seen) > _MOST else []
    return section("Warnings", card("", "", table(("rank", "warning", "at"), rows) + notes(more)))


def repeat(record: Record) -> str:
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
    return section("How to repeat it", card("", "", facts(pairs) + notes(missing)))


def moment(seconds: float) -> str:
    """A date and time of day, here."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _ending(record: Record) -> str:
    end = record.end
    if not record.events:
        return "<p class='note' style='margin-top:12px'>The event log is empty: the run stopped before it began.</p>"
    if end is None:
        last = record.events[-1]
        said = f"The log stops at step {last.step:,} ({moment(last.time)}): the run is still going, or it was killed."
        return f'<p class="note" style="margin-top:12px">{said}</p>'
    where = f"Rank {end.rank}: " if end.rank else ""
    message = str(end.data.get("message") or "")
    return f'<p style="margin-top:12px">{escape(where + message)}</p>' if message else ""


def _node(node: Node) -> str:
    device = node.devices[0]
    many = f"{len(node.devices)} × " if len(node.devices) > 1 else ""
    pairs = [
        ("device", escape(f"{many}{device.name}")),
        ("memory", format_units.size(device.memory) if device.kind == "cuda" else format_units.size(node.memory)),
        ("cores", f"{node.cores:,}"),
    ]
    if device.instructions:
        pairs.append(("instructions", escape(", ".join(device.instructions))))
    fastest: dict[str, float] = {}
    for curve in device.curves:
        if curve.operation.startswith("mm"):
            fastest[curve.dtype] = max(fastest.get(curve.dtype, 0.0), *(point.rate for point in curve.points))
    if fastest:
        words = ", ".join(f"{dtype} {format_units.digits(rate / 1e9)} GFLOP/s" for dtype, rate in fastest.items())
        pairs.append(("matrix products", escape(words)))
    for link in {(link.operation, link.backend): link for link in node.links}.values():
        words = f"{format_units.size(link.bandwidth)}/s, {format_units.seconds(link.latency)} at least ({link.backend}, {link.ranks} ranks)"
        pairs.append((link.operation.replace("_", "-"), escape(words)))
    return card(node.name, "", facts(pairs))


def _exists(folder: Path, path: str) -> bool:
    """Whether a checkpoint is there: as it was written, or, where the run folder has moved, beside its log."""
    return bool(path) and (Path(path).exists() or (folder / "checkpoints" / Path(path).name).exists())


def _steps(steps: list[int]) -> str:
    return f"step {steps[0]:,}" if len(steps) == 1 else f"{len(steps)} times, first at step {steps[0]:,}"
