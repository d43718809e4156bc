"""What every verb shares: its options --json and --debug, and how an answer is printed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from echelon.flow.job_source import JobSource
    from echelon.plan.cluster import Cluster
    from echelon.plan.plan import Plan
    from echelon.plan.profile import Profile

DEBUG_KEY = "echelon.debug"


def _store_debug(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.find_root().meta[DEBUG_KEY] = True
    return value


def wants_traceback(ctx: typer.Context) -> bool:
    """Whether --debug was given."""
    return bool(ctx.find_root().meta.get(DEBUG_KEY))


JobFile = Annotated[
    str, typer.Argument(metavar="FILE[:name]", help="A job file; `name` is the function in it, else `job`.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
DebugOption = Annotated[bool, typer.Option("--debug", callback=_store_debug, help="Show the traceback of an error.")]
PlanOption = Annotated[
    str, typer.Option("--plan", metavar="P", help='A plan in short form ("dp=2 zero=1"), a plan file, or auto.')
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="C",
        help='Machines by name ("8xH100-80GB", "4x8xA100-80GB"), a .toml file of them, or what `echelon doctor -o` described; else this machine.',
    ),
]


PictureOption = Annotated[
    str | None,
    typer.Option("--picture", metavar="FILE", help="Draw the step, the memory and the mesh: a .svg or a .png file."),
]
TraceOption = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Write the step as a trace for Perfetto (.json).")
]


def draw_plan(profile: Profile, cluster: Cluster, plan: Plan, picture: str | None, trace: str | None) -> list[str]:
    """Write what was asked for; the files' names."""
    if picture is None and trace is None:
        return []
    from echelon.observer import plan_figure as drawing
    from echelon.simulator.timeline import build_timeline

    step_timeline = build_timeline(profile, cluster, plan)
    paths = [drawing.write_figure(step_timeline, picture)] if picture is not None else []
    paths += [drawing.write_trace(step_timeline, trace)] if trace is not None else []
    return [str(path) for path in paths]


def parse_duration(text: str) -> float:
    """Seconds of `90`, `45s`, `90m`, `12h` or `3d`."""
    scale = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in scale else (text, "s")
    try:
        return float(number) * scale[unit]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: a duration is a number of seconds, or one with s, m, h or d: 12h"
        ) from None


def print_json(answer: Any) -> None:
    """An answer for machines."""
    typer.echo(json.dumps(answer, indent=2))


def make_console() -> Console:
    """Where tables go."""
    from rich.console import Console

    return Console(highlight=False)


def make_table(*columns: str, text_columns: int = 1) -> Table:
    """A table of plain lines whose first `text_columns` columns hold words and whose others hold figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    result = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        result.add_column(
            name, justify="left" if index < text_columns else "right", overflow="fold", no_wrap=index >= text_columns
        )
    return result


def read_job(file: str) -> tuple[JobSource, Profile]:
    """A job file and its profile."""
    from echelon.flow.job_source import JobSource

    job_source = JobSource(file)
    profile = job_source.profile()
    print_warnings(job_source.warnings)
    return job_source, profile


def print_warnings(messages: Iterable[str]) -> None:
    """What a person should know, beside the answer."""
    for message in messages:
        typer.echo(f"warning: {message}", err=True)


def read_cluster(file: str | None) -> Cluster:
    """The cluster that was asked for: one of the catalogue, a file's, or this machine, measured."""
    if file is None:
        return measure_machine()
    from pathlib import Path

    from echelon.plan import catalogue
    from echelon.plan.cluster import Cluster

    if file.endswith(".json") or (Path(file).is_file() and not file.endswith(".toml")):
        return Cluster.load(file)
    return catalogue.parse_cluster(file)


def measure_machine(*, refresh: bool = False) -> Cluster:
    """This machine; where it has to be measured first, with a bar on a terminal and a line elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    from echelon.hardware import measure

    stderr = Console(stderr=True)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("measuring this machine", total=1.0, visible=False)

        def progress(description: str, share: float) -> None:
            if not stderr.is_terminal and not bar.tasks[task].visible:
                typer.echo("measuring this machine, once (about half a minute, with a GPU one)", err=True)
            bar.update(task, description=description, completed=share, visible=True)

        return measure(refresh=refresh, progress=progress)
