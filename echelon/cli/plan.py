"""`echelon plan`: profile the job, search, and show the best plans with what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.common import (
    ClusterOption,
    DebugOption,
    JobFile,
    JsonOption,
    PictureOption,
    TraceOption,
    draw_plan,
    make_console,
    make_table,
    parse_duration,
    print_json,
    print_warnings,
    read_cluster,
    read_job,
)
from echelon.plan.format_units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from echelon.planner import Candidate


def plan(
    file: JobFile,
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
    picture: PictureOption = None,
    trace: TraceOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the best plans for a job.

    Each comes with a forecast of time and memory on this machine, or on a described cluster. Exit 1 when no plan fits into the memory
    that there is.
    """
    from echelon.plan.check import check
    from echelon.plan.codec import to_plain
    from echelon.planner import Goal, explain, search
    from echelon.planner.goal import Objective

    time_limit = parse_duration(within) if within is not None else None
    goal_options = Goal(kind=goal, within=time_limit, steps=steps, price=price)  # type: ignore[arg-type]
    (job_source, profile), target_cluster = read_job(file), read_cluster(cluster)
    warnings_before = len(job_source.warnings)
    complete = job_source.complete_plan if cluster is None else lambda plan: job_source.complete_if_cheap(plan, profile)
    candidates = search(
        profile, target_cluster, top=top, complete=complete, goal=goal_options, exhaustive=exhaustive, beyond=beyond,
        precisions=(None, *(precisions or ())),
    )  # fmt: skip
    print_warnings(job_source.warnings[warnings_before:])
    best, costs = candidates[0], Objective(goal_options, target_cluster)
    step_costs = (
        [costs.price(each.forecast.time.step, each.plan.ranks) for each in candidates] if goal == "cheapest" else []
    )
    figure_paths = draw_plan(profile, target_cluster, best.plan, picture, trace)
    if out is not None:
        best.plan.save(out)
    if json:
        rows = [
            {"plan": str(each.plan), "fits": each.forecast.fits, "forecast": to_plain(each.forecast)}
            for each in candidates
        ]
        for row, cost in zip(rows, step_costs, strict=False):
            row["cost"] = cost
        print_json(
            {
                "plan": str(best.plan),
                "document": to_plain(best.plan),
                "why": explain(candidates).splitlines(),
                "files": figure_paths,
                "candidates": rows,
            }
        )
        return
    terminal = make_console()
    terminal.print(
        f"{profile.name}: {profile.elements:,} parameters, batch {profile.batch}, {profile.precision}; "
        f"{target_cluster.name}: {target_cluster.max_ranks} {'cores' if target_cluster.device_kind == 'cpu' else 'devices'}, "
        f"{format_bytes(best.forecast.capacity)} for a rank of the best"
    )
    terminal.print(_candidate_table(candidates, step_costs))
    terminal.print(f'best: "{best.plan}"' + (f", in {out}" if out else ""))
    typer.echo(explain(candidates))
    for each in figure_paths:
        terminal.print(f"in {each}")
    print_warnings(str(each) for each in check(best.plan, profile, target_cluster) if each.severity == "warning")


def _candidate_table(candidates: tuple[Candidate, ...], step_costs: list[float]) -> Table:
    """`step_costs`: what a step of each costs, where that was the question."""
    result = make_table(
        "plan", "step", "samples/s", "compute", "exchange", "memory", *(["cost of 1,000 steps"] if step_costs else [])
    )
    for index, candidate in enumerate(candidates):
        time = candidate.forecast.time
        result.add_row(
            str(candidate.plan), format_seconds(time.step), f"{candidate.forecast.samples_per_second:,.0f}", format_seconds(time.forward + time.backward),
            format_seconds(time.exchange), format_bytes(candidate.forecast.memory.total), *([f"{1000 * step_costs[index]:,.2f}"] if step_costs else []),
        )  # fmt: skip
    return result
