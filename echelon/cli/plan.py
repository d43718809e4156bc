"""`echelon plan`: profile the job, search, and show the best plans with what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.common import (
    ClusterOption,
    Debug,
    File,
    Json,
    Picture,
    TraceOption,
    console,
    draw_plan,
    duration,
    print_json,
    read_cluster,
    read_subject,
    table,
    warn,
)
from echelon.plan.format_units import seconds, size

if TYPE_CHECKING:
    from rich.table import Table

    from echelon.planner import Candidate


def plan(
    file: File,
    cluster: ClusterOption = None,
    top: Annotated[int, typer.Option(min=1, help="How many plans to show.")] = 5,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Write the best plan to a file.")
    ] = None,
    goal: Annotated[
        str,
        typer.Option(
            help="fastest; memory: the smallest; cheapest: per step; devices: the fewest that are done in time."
        ),
    ] = "fastest",
    within: Annotated[str | None, typer.Option(metavar="TIME", help="Time for all steps: 90s, 12h, 3d.")] = None,
    steps: Annotated[int, typer.Option(help="Steps that must be done in that time.")] = 1,
    price: Annotated[
        float | None,
        typer.Option(help="What one device costs for an hour, for --goal cheapest; else as the cluster says."),
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Forecast every plan, also those that cannot be the best.")
    ] = False,
    beyond: Annotated[
        bool,
        typer.Option(
            "--beyond", help="Also what is forecast but not executed yet: cp, ep, and fp8 where it is asked for."
        ),
    ] = False,
    precisions: Annotated[
        list[str] | None,
        typer.Option(
            "--precision",
            metavar="NAME",
            help="Also plans in this precision (fp32, tf32, bf16, fp16, fp8); again for more.",
        ),
    ] = None,
    picture: Picture = None,
    trace: TraceOption = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the best plans for a job.

    Each comes with a forecast of time and memory on this machine, or on a described cluster. Exit 1 when no plan fits into the memory
    that there is.
    """
    from echelon.plan.check import check
    from echelon.plan.codec import to_plain
    from echelon.planner import Goal, explain, search
    from echelon.planner.goal import Costs

    limit = duration(within) if within is not None else None
    wanted = Goal(kind=goal, within=limit, steps=steps, price=price)  # type: ignore[arg-type]
    (subject, profile), machines = read_subject(file), read_cluster(cluster)
    said = len(subject.warnings)
    complete = subject.complete if cluster is None else lambda plan: subject.complete_here(plan, profile)
    candidates = search(
        profile, machines, top=top, complete=complete, goal=wanted, exhaustive=exhaustive, beyond=beyond,
        precisions=(None, *(precisions or ())),
    )  # fmt: skip
    warn(subject.warnings[said:])
    best, costs = candidates[0], Costs(wanted, machines)
    money = [costs.money(each.forecast.time.step, each.plan.ranks) for each in candidates] if goal == "cheapest" else []
    drawn = draw_plan(profile, machines, best.plan, picture, trace)
    if out is not None:
        best.plan.save(out)
    if json:
        rows = [
            {"plan": str(each.plan), "fits": each.forecast.fits, "forecast": to_plain(each.forecast)}
            for each in candidates
        ]
        for row, cost in zip(rows, money, strict=False):
            row["cost"] = cost
        print_json(
            {
                "plan": str(best.plan),
                "document": to_plain(best.plan),
                "why": explain(candidates).splitlines(),
                "files": drawn,
                "candidates": rows,
            }
        )
        return
    screen = console()
    screen.print(
        f"{profile.name}: {profile.elements:,} parameters, batch {profile.batch}, {profile.precision}; "
        f"{machines.name}: {machines.ranks} {'cores' if machines.kind == 'cpu' else 'devices'}, "
        f"{size(best.forecast.capacity)} for a rank of the best"
    )
    screen.print(_table(candidates, money))
    screen.print(f'best: "{best.plan}"' + (f", in {out}" if out else ""))
    typer.echo(explain(candidates))
    for each in drawn:
        screen.print(f"in {each}")
    warn(str(each) for each in check(best.plan, profile, machines) if each.severity == "warning")


def _table(candidates: tuple[Candidate, ...], money: list[float]) -> Table:
    """`money`: what a step of each costs, where that was the question."""
    rows = table(
        "plan", "step", "samples/s", "compute", "exchange", "memory", *(["cost of 1,000 steps"] if money else [])
    )
    for place, each in enumerate(candidates):
        time = each.forecast.time
        rows.add_row(
            str(each.plan), seconds(time.step), f"{each.forecast.rate:,.0f}", seconds(time.forward + time.backward),
            seconds(time.exchange), size(each.forecast.memory.total), *([f"{1000 * money[place]:,.2f}"] if money else []),
        )  # fmt: skip
    return rows
