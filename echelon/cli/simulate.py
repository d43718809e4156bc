"""`echelon simulate`: what a step of a given plan takes and holds, by cause, without running it."""

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
    print_json,
    read_cluster,
    read_subject,
    table,
    warn,
)
from echelon.plan.format_units import seconds, size

if TYPE_CHECKING:
    from echelon.plan.forecast import Forecast


def simulate(
    file: File,
    plan: Annotated[
        str, typer.Option("--plan", metavar="P", help='A plan in short form ("dp=2 zero=1"), or a plan file.')
    ],
    cluster: ClusterOption = None,
    picture: Picture = None,
    trace: TraceOption = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Forecast the time and memory of one plan.

    Seconds per step by cause, and bytes per rank by component, without running anything. Exit 1 when it does not fit.
    """
    from echelon.errors import PlanError
    from echelon.flow.resolve_plan import read_plan
    from echelon.plan.check import check, refuse, require
    from echelon.plan.codec import to_plain
    from echelon.simulator import simulate as forecast_of
    from echelon.simulator.step import by_sheet

    wanted = read_plan(plan)
    if wanted is None:
        raise PlanError("--plan auto: there is nothing to simulate yet; `echelon plan` searches and forecasts")
    (subject, profile), machines = read_subject(file), read_cluster(cluster)
    problems = check(wanted, profile, machines)
    # A forecast by data sheets is for clusters elsewhere, and knows more than the engine here executes.
    ahead = [each for each in problems if by_sheet(machines) and each.ahead]
    if ahead:
        warnings = (*refuse(wanted, [each for each in problems if each not in ahead]), *ahead)
    else:
        wanted, fallback = subject.settle(wanted, profile, machines)
        warn([fallback] if fallback else [])
        warnings = require(wanted, profile, machines)
    forecast = forecast_of(profile, machines, wanted)
    drawn = draw_plan(profile, machines, wanted, picture, trace)
    if json:
        print_json({"plan": str(wanted), "fits": forecast.fits, "forecast": to_plain(forecast), "files": drawn})
    else:
        _show(forecast)
        for each in drawn:
            console().print(f"in {each}")
        warn(map(str, warnings))
    raise typer.Exit(0 if forecast.fits else 1)


def _show(forecast: Forecast) -> None:
    screen, time, memory = console(), forecast.time, forecast.memory
    screen.print(f'"{forecast.plan}", batch {forecast.batch}')
    rows = table("of a step", "seconds", "share")
    for name in ("forward", "backward", "bubble", "exchange", "optimizer", "input", "overhead"):
        value = getattr(time, name)
        rows.add_row(name, seconds(value), f"{value / time.step:.0%}")
    screen.print(rows)
    screen.print(
        f"step {seconds(time.step)} ({seconds(time.low)} to {seconds(time.high)}), {forecast.rate:,.0f} samples/s; "
        f"{seconds(time.hidden)} of exchange hidden behind backward"
    )
    rows = table("of the largest rank", "memory")
    for name in ("parameters", "gradients", "optimizer", "activations", "temporary", "buckets", "framework"):
        rows.add_row(name, size(getattr(memory, name)))
    screen.print(rows)
    verdict = "fits" if forecast.fits else "DOES NOT FIT"
    screen.print(
        f"peak {size(memory.total)} ({size(memory.low + memory.framework)} to "
        f"{size(memory.needed)}) of {size(forecast.capacity)}: {verdict}"
        + (f"; it peaks in {forecast.peak_at}" if forecast.peak_at else "")
    )
    for note in forecast.notes:
        screen.print(f"note: {note}")
