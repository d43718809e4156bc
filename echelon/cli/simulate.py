"""`echelon simulate`: what a step of a given plan takes and holds, by cause, without running it."""

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
    print_json,
    print_warnings,
    read_cluster,
    read_job,
)
from echelon.plan.format_units import format_bytes, format_seconds

if TYPE_CHECKING:
    from echelon.plan.forecast import Forecast


def simulate(
    file: JobFile,
    plan: Annotated[
        str, typer.Option("--plan", metavar="P", help='A plan in short form ("dp=2 zero=1"), or a plan file.')
    ],
    cluster: ClusterOption = None,
    picture: PictureOption = None,
    trace: TraceOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Forecast the time and memory of one plan.

    Seconds per step by cause, and bytes per rank by component, without running anything. Exit 1 when it does not fit.
    """
    from echelon.errors import PlanError
    from echelon.flow.resolve_plan import parse_plan
    from echelon.plan.check import check, require_executable
    from echelon.plan.codec import to_plain
    from echelon.plan.problem import raise_on_errors
    from echelon.simulator import simulate as forecast_of
    from echelon.simulator.step import uses_data_sheets

    requested = parse_plan(plan)
    if requested is None:
        raise PlanError("--plan auto: there is nothing to simulate yet; `echelon plan` searches and forecasts")
    (job_source, profile), target_cluster = read_job(file), read_cluster(cluster)
    problems = check(requested, profile, target_cluster)
    # A forecast by data sheets is for clusters elsewhere, and knows more than the engine here executes.
    not_yet_executed = [each for each in problems if uses_data_sheets(target_cluster) and each.not_implemented]
    if not_yet_executed:
        warnings = (
            *raise_on_errors(requested, [each for each in problems if each not in not_yet_executed]),
            *not_yet_executed,
        )
    else:
        requested, fallback = job_source.adapt_plan(requested, profile, target_cluster)
        print_warnings([fallback] if fallback else [])
        warnings = require_executable(requested, profile, target_cluster)
    forecast = forecast_of(profile, target_cluster, requested)
    figure_paths = draw_plan(profile, target_cluster, requested, picture, trace)
    if json:
        print_json(
            {"plan": str(requested), "fits": forecast.fits, "forecast": to_plain(forecast), "files": figure_paths}
        )
    else:
        _print_forecast(forecast)
        for each in figure_paths:
            make_console().print(f"in {each}")
        print_warnings(map(str, warnings))
    raise typer.Exit(0 if forecast.fits else 1)


def _print_forecast(forecast: Forecast) -> None:
    terminal, time, memory = make_console(), forecast.time, forecast.memory
    terminal.print(f'"{forecast.plan}", batch {forecast.batch}')
    breakdown = make_table("of a step", "seconds", "share")
    for name in ("forward", "backward", "bubble", "exchange", "optimizer", "input", "overhead"):
        value = getattr(time, name)
        breakdown.add_row(name, format_seconds(value), f"{value / time.step:.0%}")
    terminal.print(breakdown)
    terminal.print(
        f"step {format_seconds(time.step)} ({format_seconds(time.low)} to {format_seconds(time.high)}), {forecast.samples_per_second:,.0f} samples/s; "
        f"{format_seconds(time.hidden)} of exchange hidden behind backward"
    )
    breakdown = make_table("of the largest rank", "memory")
    for name in ("parameters", "gradients", "optimizer", "activations", "temporary", "buckets", "framework"):
        breakdown.add_row(name, format_bytes(getattr(memory, name)))
    terminal.print(breakdown)
    verdict = "fits" if forecast.fits else "DOES NOT FIT"
    terminal.print(
        f"peak {format_bytes(memory.total)} ({format_bytes(memory.low + memory.framework)} to "
        f"{format_bytes(memory.required)}) of {format_bytes(forecast.capacity)}: {verdict}"
        + (f"; it peaks in {forecast.peak_at}" if forecast.peak_at else "")
    )
    for note in forecast.notes:
        terminal.print(f"note: {note}")
