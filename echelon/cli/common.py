"""What every verb shares: its options --json and --debug, and how an answer is printed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from echelon.flow.prepare import Subject
    from echelon.plan.cluster import Cluster
    from echelon.plan.profile import Profile

DEBUG = "echelon.debug"


def _remember(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.find_root().meta[DEBUG] = True
    return value


def wants_traceback(ctx: typer.Context) -> bool:
    """Whether --debug was given."""
    return bool(ctx.find_root().meta.get(DEBUG))


File = Annotated[
    str, typer.Argument(metavar="FILE[:name]", help="A job file; `name` is the function in it, else `job`.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", callback=_remember, help="Show the traceback of an error.")]
PlanOption = Annotated[
    str, typer.Option("--plan", metavar="P", help='A plan in short form ("dp=2 zero=1"), a plan file, or auto.')
]
ClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", metavar="FILE", help="A cluster that `echelon doctor -o` described; else this machine."),
]


def print_json(answer: Any) -> None:
    """An answer for machines."""
    typer.echo(json.dumps(answer, indent=2))


def console() -> Console:
    """Where tables go."""
    from rich.console import Console

    return Console(highlight=False)


def table(*columns: str, left: int = 1) -> Table:
    """A table of plain lines whose first `left` columns hold words and whose others hold figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number < left else "right", overflow="fold", no_wrap=number >= left)
    return made


def read_subject(file: str) -> tuple[Subject, Profile]:
    """A job file and its profile."""
    from echelon.flow.prepare import Subject

    subject = Subject(file)
    profile = subject.profile()
    warn(subject.warnings)
    return subject, profile


def warn(messages: Iterable[str]) -> None:
    """What a person should know, beside the answer."""
    for message in messages:
        typer.echo(f"warning: {message}", err=True)


def read_cluster(file: str | None) -> Cluster:
    """The cluster that was asked for: a file's, or this machine, measured."""
    if file is None:
        return measured()
    from echelon.plan.cluster import Cluster

    return Cluster.load(file)


def measured(*, refresh: bool = False) -> Cluster:
    """This machine; where it has to be measured first, with a bar on a terminal and a line elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    from echelon.profiler import measure

    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("measuring this machine", total=1.0, visible=False)

        def progress(what: str, share: float) -> None:
            if not screen.is_terminal and not bar.tasks[task].visible:
                typer.echo("measuring this machine, once (about half a minute)", err=True)
            bar.update(task, description=what, completed=share, visible=True)

        return measure(refresh=refresh, progress=progress)
