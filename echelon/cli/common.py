"""What the verbs share: options, reading jobs and clusters, and how an answer is printed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

    from echelon.flow.job_source import JobSource
    from echelon.plan.cluster import Cluster
    from echelon.plan.plan import Plan
    from echelon.plan.profile import Profile

DEBUG_KEY = "echelon.debug"


def _store_debug(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[DEBUG_KEY] = value  # shared with the contexts that it is nested in
    return value


def wants_traceback(ctx: typer.Context) -> bool:
    return bool(ctx.meta.get(DEBUG_KEY))


JobFile = Annotated[str, Argument(metavar="FILE[:name]", help="A job file, and its function that makes the job [job].")]
JsonOption = Annotated[bool, Option("--json", help="Print the answer as JSON.")]
DebugOption = Annotated[bool, Option("--debug", callback=_store_debug, help="Show tracebacks.")]
_CLUSTER_HELP = 'A catalogue name ("4x8xA100-80GB"), a .toml file, or the output of `echelon doctor -o` [this machine].'
ClusterOption = Annotated[str | None, Option("--cluster", metavar="C", help=_CLUSTER_HELP)]
FigureOption = Annotated[str | None, Option("--picture", metavar="FILE", help="Draw step, memory, mesh (.svg, .png).")]
TraceOption = Annotated[str | None, Option("--trace", metavar="FILE", help="Write the step as Perfetto trace (.json).")]


def draw_plan(profile: Profile, cluster: Cluster, plan: Plan, picture: str | None, trace: str | None) -> list[str]:
    """Write the figure and the trace that were requested; their paths."""
    if picture is None and trace is None:
        return []
    from echelon.observer import plan_figure
    from echelon.simulator.timeline import build_timeline

    timeline = build_timeline(profile, cluster, plan)
    paths = [plan_figure.write_figure(timeline, picture)] if picture is not None else []
    paths += [plan_figure.write_trace(timeline, trace)] if trace is not None else []
    return [str(path) for path in paths]


def parse_duration(text: str) -> float:
    """Seconds of `90`, `45s`, `90m`, `12h` or `3d`."""
    scale = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in scale else (text, "s")
    try:
        return float(number) * scale[unit]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected a duration in seconds, or with s, m, h or d: 12h") from None


def print_answer(as_json: bool, answer: Any, *parts: str | Table) -> None:
    """Print `answer` as JSON, or else `parts` for people."""
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    for part in parts:
        if isinstance(part, str):
            typer.echo(part)
        else:
            from rich.console import Console

            Console(highlight=False).print(part)


def print_warnings(messages: Iterable[str]) -> None:
    for message in messages:
        typer.echo(f"warning: {message}", err=True)


def make_table(*columns: str, text_columns: int = 1) -> Table:
    """A plain table; the first `text_columns` columns hold text, the others figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        is_text = index < text_columns
        table.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    return table


def make_progress(*columns: ProgressColumn, hidden: bool = False) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    stderr = Console(stderr=True)
    return Progress(*columns, console=stderr, transient=True, disable=hidden or not stderr.is_terminal)


def read_job(file: str) -> tuple[JobSource, Profile]:
    from echelon.flow.job_source import JobSource

    job_source = JobSource(file)
    profile = job_source.profile()
    print_warnings(job_source.warnings)
    return job_source, profile


def read_cluster(name: str | None) -> Cluster:
    """The cluster of a catalogue name or a file; None: this machine, measured."""
    if name is None:
        return measure_machine()
    from echelon.plan import catalogue
    from echelon.plan.cluster import Cluster

    if name.endswith(".json") or (Path(name).is_file() and not name.endswith(".toml")):
        return Cluster.load(name)
    return catalogue.parse_cluster(name)


def measure_machine(*, refresh: bool = False) -> Cluster:
    """This machine; a first measurement shows a progress bar, or one line where there is no terminal."""
    from echelon.hardware import measure

    with make_progress() as bar:
        task = bar.add_task("measuring this machine", total=1.0, visible=False)

        def report(description: str, share: float) -> None:
            if bar.disable and not bar.tasks[task].visible:
                typer.echo("measuring this machine, once (about 30 s, a minute with a GPU)", err=True)
            bar.update(task, description=description, completed=share, visible=True)

        return measure(refresh=refresh, progress=report)
