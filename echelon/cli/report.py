"""`echelon report`: one self-contained page about a run."""

from __future__ import annotations

from typing import Annotated

import typer

from echelon.cli.common import DebugOption, JsonOption, print_json


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder that `echelon train` made: runs/NAME.")],
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the report of a run.

    One page, report.html in the run's folder: curves, plan, forecast against measured. It needs no network.
    """
    from echelon.observer import write_report

    path = write_report(run)
    if json:
        print_json({"report": str(path)})
    else:
        typer.echo(f"{path}: open it in a browser")
