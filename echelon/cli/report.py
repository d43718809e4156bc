"""`echelon report`: one self-contained page about a run."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from echelon.cli.common import DebugOption, JsonOption, print_answer


def report(
    run: Annotated[str, Argument(metavar="RUN", help="A run folder: runs/NAME.")],
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Write the report of a run.

    The page is report.html in the run folder: curves, plan, forecast against measurement. It needs no network.
    """
    from echelon.observer import write_report

    path = write_report(run)
    print_answer(json, {"report": str(path)}, f"{path}: open it in a browser")
