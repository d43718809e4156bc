"""`echelon plan`: profile the job, search, and show the best plans with what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.common import (
    ClusterOption,
    Debug,
    File,
    Json,
    bytes_text,
    console,
    print_json,
    read_cluster,
    seconds_text,
    table,
)

if TYPE_CHECKING:
    from echelon.planner import Candidate


def plan(
    file: File,
    cluster: ClusterOption = None,
    top: Annotated[int, typer.Option(min=1, help="How many plans to show.")] = 5,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Write the best plan to a file.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the best plans for a job.

    Each comes with a forecast of time and memory on this machine, or on a described cluster. Exit 1 when no plan fits into the memory that there is.
    """
    from echelon.flow.prepare import Subject
    from echelon.plan.codec import to_plain
    from echelon.planner import search

    profile, machines = Subject(file).profile(), read_cluster(cluster)
    candidates = search(profile, machines, top=top)
    best = candidates[0]
    if out is not None and best.forecast.fits:
        best.plan.save(out)
    if json:
        rows = [
            {"plan": str(each.plan), "fits": each.forecast.fits, "forecast": to_plain(each.forecast)}
            for each in candidates
        ]
        print_json({"plan": str(best.plan), "document": to_plain(best.plan), "candidates": rows})
    else:
        screen = console()
        screen.print(
            f"{profile.name}: {profile.elements:,} parameters, batch {profile.batch}, {profile.precision}; "
            f"{machines.name}: {machines.ranks} {'cores' if machines.kind == 'cpu' else 'devices'}"
        )
        screen.print(_table(candidates))
        if best.forecast.fits:
            screen.print(f'best: "{best.plan}"' + (f", in {out}" if out else ""))
    if not best.forecast.fits:
        typer.echo(
            "no plan fits: the best one needs more memory than a rank has; use more ranks or a smaller batch", err=True
        )
        raise typer.Exit(1)


def _table(candidates: tuple[Candidate, ...]) -> object:
    rows = table("plan", "step", "samples/s", "compute", "exchange", "optimizer", "memory", "of", "fits")
    for each in candidates:
        time, memory = each.forecast.time, each.forecast.memory
        rows.add_row(
            str(each.plan), seconds_text(time.step), f"{each.forecast.rate:,.0f}", seconds_text(time.forward + time.backward),
            seconds_text(time.exchange), seconds_text(time.optimizer), bytes_text(memory.total),
            bytes_text(each.forecast.capacity), "yes" if each.forecast.fits else "no",
        )  # fmt: skip
    return rows
