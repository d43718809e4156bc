"""`echelon plan`: profile the job, search, and compare the best plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from echelon.cli import common
from echelon.cli.common import ClusterOption, DebugOption, FigureOption, JobFile, JsonOption, TraceOption
from echelon.plan.format_units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from echelon.planner import Candidate


def plan(
    file: JobFile,
    cluster: ClusterOption = None,
    top: Annotated[int, Option(min=1, help="Plans to show.")] = 5,
    out: Annotated[str | None, Option("--out", "-o", metavar="FILE", help="Save the best plan.")] = None,
    goal: Annotated[str, Option(help="fastest, memory, cheapest or devices (fewest that meet --within).")] = "fastest",
    within: Annotated[str | None, Option(metavar="TIME", help="Time limit for --steps: 90s, 12h, 3d.")] = None,
    steps: Annotated[int, Option(help="Steps to finish within that time.")] = 1,
    price: Annotated[float | None, Option(help="Price of a device hour, for cheapest [the cluster's].")] = None,
    exhaustive: Annotated[bool, Option("--exhaustive", help="Forecast even plans that cannot be best.")] = False,
    beyond: Annotated[bool, Option("--beyond", help="Include what cannot be executed yet: cp, ep, fp8.")] = False,
    precisions: Annotated[
        list[str] | None,
        Option("--precision", metavar="NAME", help="Also try fp32, tf32, bf16, fp16 or fp8; repeatable."),
    ] = None,
    picture: FigureOption = None, trace: TraceOption = None, json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Find the best plans for a job.

    Forecasts their time and memory on this machine or another cluster. Exit 1 if no plan fits into memory.
    """
    from echelon.plan.check import check
    from echelon.plan.codec import to_plain
    from echelon.planner import Goal, explain, search
    from echelon.planner.goal import Objective

    time_limit = common.parse_duration(within) if within is not None else None
    search_goal = Goal(kind=goal, within=time_limit, steps=steps, price=price)  # type: ignore[arg-type]
    (job_source, profile), target_cluster = common.read_job(file), common.read_cluster(cluster)
    warnings_before = len(job_source.warnings)
    complete = job_source.complete_plan if cluster is None else lambda plan: job_source.complete_if_cheap(plan, profile)
    candidates = search(
        profile, target_cluster, top=top, complete=complete, goal=search_goal, exhaustive=exhaustive, beyond=beyond,
        precisions=(None, *(precisions or ())),
    )  # fmt: skip
    common.print_warnings(job_source.warnings[warnings_before:])
    best, objective = candidates[0], Objective(search_goal, target_cluster)
    costs = [objective.price(c.forecast.time.step, c.plan.ranks) for c in candidates] if goal == "cheapest" else []
    figures = common.draw_plan(profile, target_cluster, best.plan, picture, trace)
    if out is not None:
        best.plan.save(out)
    rows = [{"plan": str(c.plan), "fits": c.forecast.fits, "forecast": to_plain(c.forecast)} for c in candidates]
    for row, cost in zip(rows, costs, strict=False):
        row["cost"] = cost
    explanation = explain(candidates)
    why, document = explanation.splitlines(), to_plain(best.plan)
    device_name = "cores" if target_cluster.device_kind == "cpu" else "devices"
    common.print_answer(
        json,
        {"plan": str(best.plan), "document": document, "why": why, "files": figures, "candidates": rows},
        f"{profile.name}: {profile.elements:,} parameters, batch {profile.batch}, {profile.precision}; "
        f"{target_cluster.name}: {target_cluster.max_ranks} {device_name}, "
        f"{format_bytes(best.forecast.capacity)} per rank of the best plan",
        _candidate_table(candidates, costs),
        f'best: "{best.plan}"' + (f", in {out}" if out else ""),
        explanation,
        *(f"in {path}" for path in figures),
    )
    if not json:
        problems = check(best.plan, profile, target_cluster)
        common.print_warnings(str(problem) for problem in problems if problem.severity == "warning")


def _candidate_table(candidates: tuple[Candidate, ...], costs: list[float]) -> Table:
    cost_column = ["cost of 1,000 steps"] if costs else []
    table = common.make_table("plan", "step", "samples/s", "compute", "exchange", "memory", *cost_column)
    for index, candidate in enumerate(candidates):
        forecast, time = candidate.forecast, candidate.forecast.time
        step, compute, exchange = map(format_seconds, (time.step, time.forward + time.backward, time.exchange))
        rate, memory = f"{forecast.samples_per_second:,.0f}", format_bytes(forecast.memory.total)
        cost = [f"{1000 * cost:,.2f}" for cost in costs[index : index + 1]]
        table.add_row(str(candidate.plan), step, rate, compute, exchange, memory, *cost)
    return table
