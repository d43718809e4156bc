"""`echelon simulate`: forecast the time and memory of a step under a given plan, without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from echelon.cli import common
from echelon.cli.common import ClusterOption, DebugOption, FigureOption, JobFile, JsonOption, TraceOption
from echelon.plan.format_units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from echelon.plan.forecast import Forecast


def simulate(
    file: JobFile,
    plan: Annotated[str, Option("--plan", metavar="P", help='A plan in short form ("dp=2 zero=1"), or a plan file.')],
    cluster: ClusterOption = None,
    picture: FigureOption = None, trace: TraceOption = None, json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Forecast the time and memory of a plan.

    Shows seconds per step by cause and bytes per rank by component. Nothing is run. Exit 1 if the plan does not fit.
    """
    from echelon.errors import PlanError
    from echelon.flow.resolve_plan import parse_plan
    from echelon.plan.check import check, require_executable
    from echelon.plan.codec import to_plain
    from echelon.plan.problem import raise_on_errors
    from echelon.simulator import simulate as make_forecast
    from echelon.simulator.device_kinds import uses_data_sheets

    requested = parse_plan(plan)
    if requested is None:
        raise PlanError("--plan auto: expected a plan; `echelon plan` searches and forecasts")
    (job_source, profile), target_cluster = common.read_job(file), common.read_cluster(cluster)
    problems = check(requested, profile, target_cluster)
    # A forecast from data sheets is for clusters elsewhere and covers more than the engine executes.
    not_implemented = [problem for problem in problems if uses_data_sheets(target_cluster) and problem.not_implemented]
    if not_implemented:
        other_problems = [problem for problem in problems if problem not in not_implemented]
        warnings = (*raise_on_errors(requested, other_problems), *not_implemented)
    else:
        requested, fallback = job_source.adapt_plan(requested, profile, target_cluster)
        common.print_warnings([fallback] if fallback else [])
        warnings = require_executable(requested, profile, target_cluster)
    forecast = make_forecast(profile, target_cluster, requested)
    figures = common.draw_plan(profile, target_cluster, requested, picture, trace)
    answer = {"plan": str(requested), "fits": forecast.fits, "forecast": to_plain(forecast), "files": figures}
    common.print_answer(json, answer, *_describe_forecast(forecast), *(f"in {path}" for path in figures))
    common.print_warnings(() if json else map(str, warnings))
    raise typer.Exit(0 if forecast.fits else 1)


def _describe_forecast(forecast: Forecast) -> list[str | Table]:
    time, memory = forecast.time, forecast.memory
    times = common.make_table("of a step", "seconds", "share")
    for name in ("forward", "backward", "bubble", "exchange", "optimizer", "input", "overhead"):
        value = getattr(time, name)
        times.add_row(name, format_seconds(value), f"{value / time.step:.0%}")
    sizes = common.make_table("of the largest rank", "memory")
    for name in ("parameters", "gradients", "optimizer", "activations", "temporary", "buckets", "framework"):
        sizes.add_row(name, format_bytes(getattr(memory, name)))
    return [
        f'"{forecast.plan}", batch {forecast.batch}',
        times,
        f"step {format_seconds(time.step)} ({format_seconds(time.low)} to {format_seconds(time.high)}), {forecast.samples_per_second:,.0f} samples/s; "
        f"{format_seconds(time.hidden)} of exchange hidden behind backward",
        sizes,
        f"peak {format_bytes(memory.total)} ({format_bytes(memory.low + memory.framework)} to "
        f"{format_bytes(memory.required)}) of {format_bytes(forecast.capacity)}: {'fits' if forecast.fits else 'DOES NOT FIT'}"
        + (f"; it peaks in {forecast.peak_at}" if forecast.peak_at else ""),
        *(f"note: {note}" for note in forecast.notes),
    ]
