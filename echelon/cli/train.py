"""`echelon train`: plan, start the ranks, train; a run that was interrupted goes on by itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.common import (
    DebugOption,
    JobFile,
    JsonOption,
    make_console,
    make_table,
    measure_machine,
    print_json,
    print_warnings,
)
from echelon.launchers.rank_ipc import format_error

if TYPE_CHECKING:
    from echelon.flow.resolve_plan import ResolvedPlan
    from echelon.flow.settings import Setting, Settings
    from echelon.flow.train_result import TrainResult


def train(
    file: JobFile,
    plan: Annotated[
        str | None, typer.Option(metavar="P", help='auto (default), a short form ("dp=2 zero=1") or a plan file.')
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help="The run's folder [default: runs/NAME].")] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints to keep, besides the best [default: 3].")] = None,
    every: Annotated[
        int | None,
        typer.Option(help="Steps between checkpoints [default: an epoch; of a stream a tenth, 1000 at most]."),
    ] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume/--fresh", help="Go on from the last checkpoint (default), or start anew.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Apply this changed setting when resuming, as optimizer.lr; repeatable."),
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option("--verify/--no-verify", help="Prove a new job and plan before the first step (default), or not."),
    ] = None,
    fallback: Annotated[
        bool | None,
        typer.Option(
            "--fallback/--no-fallback",
            help="If the given plan is disproved, train the nearest proved one (default), or exit with the error.",
        ),
    ] = None,
    require_certificate: Annotated[
        str | None, typer.Option(metavar="FILE", help="Train only if this certificate covers the run.")
    ] = None,
    quiet: Annotated[bool | None, typer.Option("--quiet/--no-quiet", help="No progress, only warnings.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that read data ahead, per rank [default: 0].")] = None,
    servers: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Parameter servers that run already, by their controller's host:port."),
    ] = None,
    secret_file: Annotated[str | None, typer.Option(metavar="FILE", help="Their secret (mode 600).")] = None,
    show_settings: Annotated[
        bool, typer.Option("--show-settings", help="Print every setting and where it came from, then end.")
    ] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a job, or go on with its training.

    Plans it, starts the ranks, shows progress and keeps checkpoints; an interrupted run goes on where it stopped.

    Settings come from the command line, else from ECHELON_* variables (ECHELON_KEEP=5), else from [train] in echelon.toml.
    """
    options = locals() | {"override": override or None, "quiet": True if json else quiet}
    from echelon.flow.settings import Settings, merge_settings

    merged = merge_settings(options)
    if show_settings:
        _print_settings(merged, json)
        return
    values = {name: setting.value for name, setting in merged.items()}
    raise typer.Exit(_train_and_report(file, values.pop("plan"), Settings(**values), json, debug))


def _train_and_report(file: str, requested: str, settings: Settings, json: bool, debug: bool) -> int:
    """Train; print the outcome as JSON, whatever it is. The exit code."""
    from echelon.launchers.local import EARLY_INTERRUPT_MESSAGE, INTERRUPTED_EXIT_CODE
    from echelon.world import read_world

    prints_json = json and read_world().is_main
    try:
        result = _train_or_launch(file, requested, settings, debug)
    except KeyboardInterrupt as interrupt:
        message = str(interrupt) or EARLY_INTERRUPT_MESSAGE
        typer.echo(message, err=True)
        if prints_json:
            print_json({"error": message})
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        if prints_json:
            print_json({"error": format_error(error)})
        raise
    if prints_json:
        print_json({
            "folder": str(result.folder), "plan": str(result.plan), "reason": "interrupted" if result.interrupted else "finished",
            "step": result.steps, "loss": result.loss, "metrics": dict(result.metrics), "seconds": result.seconds,
        })  # fmt: skip
    return INTERRUPTED_EXIT_CODE if result.interrupted else 0


def _train_or_launch(file: str, requested: str, settings: Settings, debug: bool) -> TrainResult:
    """Train in this process, or in ranks that it starts."""
    from echelon.flow.job_source import JobSource
    from echelon.flow.spawn import run_ranks
    from echelon.flow.train import train_job
    from echelon.flow.train_result import TrainResult
    from echelon.world import read_world

    world, job_source = read_world(), JobSource(file)

    def start_ranks(resolved: ResolvedPlan, settings: Settings) -> TrainResult:
        print_warnings(job_source.warnings)  # the ranks find out everything else again
        return TrainResult.from_json(run_ranks("train", file, resolved, asdict(settings), debug=debug))

    if requested == "auto" and not world.launched:
        measure_machine()  # needed to plan; done here to show its progress
    return train_job(job_source, requested, settings, world, start_ranks=start_ranks)


def _print_settings(settings: dict[str, Setting], json: bool) -> None:
    if json:
        print_json({name: {"value": setting.value, "source": setting.source} for name, setting in settings.items()})
        return
    setting_table = make_table("setting", "value", "from", text_columns=3)
    for setting in settings.values():
        setting_table.add_row(setting.name, "-" if setting.value is None else str(setting.value), setting.source)
    make_console().print(setting_table)
