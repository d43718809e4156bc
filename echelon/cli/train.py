"""`echelon train`: plan, verify, start the ranks, train; an interrupted run is resumed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from echelon.cli import common
from echelon.cli.common import DebugOption, JobFile, JsonOption, print_answer
from echelon.launchers.rank_ipc import format_error

if TYPE_CHECKING:
    from echelon.flow.resolve_plan import ResolvedPlan
    from echelon.flow.settings import Setting, Settings
    from echelon.flow.train_result import TrainResult


def train(
    file: JobFile,
    plan: Annotated[str | None, Option(metavar="P", help='As "dp=2 zero=1", a plan file, or auto [auto].')] = None,
    out: Annotated[str | None, Option(metavar="FOLDER", help="The run folder [runs/NAME].")] = None,
    keep: Annotated[int | None, Option(help="Checkpoints to keep, besides the best [3].")] = None,
    every: Annotated[
        int | None, Option(help="Steps between checkpoints [an epoch; of a stream a tenth of the steps, at most 1000].")
    ] = None,
    resume: Annotated[bool | None, Option("--resume/--fresh", help="Resume the run [yes], or start over.")] = None,
    override: Annotated[list[str] | None, Option(metavar="NAME", help="Apply this changed setting on resume.")] = None,
    verify: Annotated[bool | None, Option("--verify/--no-verify", help="Prove a new job and plan [yes].")] = None,
    fallback: Annotated[
        bool | None,
        Option("--fallback/--no-fallback", help="If --plan is disproved, train the nearest proved one [yes]."),
    ] = None,
    require_certificate: Annotated[
        str | None, Option(metavar="FILE", help="Train only if this certificate covers the run.")
    ] = None,
    quiet: Annotated[bool | None, Option("--quiet/--no-quiet", help="Print warnings only [no].")] = None,
    workers: Annotated[int | None, Option(help="Processes per rank that read data ahead [0].")] = None,
    servers: Annotated[str | None, Option(metavar="HOST:PORT", help="Controller of running parameter servers.")] = None,
    secret_file: Annotated[str | None, Option(metavar="FILE", help="Their secret (mode 600).")] = None,
    show_settings: Annotated[bool, Option("--show-settings", help="Print the settings and their sources.")] = False,
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Train a job, or resume its training.

    Plans, verifies, starts the ranks, shows progress and keeps checkpoints. An interrupted run resumes where it stopped.

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
    from echelon.launchers.local import EARLY_INTERRUPT_MESSAGE, INTERRUPTED_EXIT_CODE
    from echelon.world import read_world

    prints_json = json and read_world().is_main
    try:
        result = _train_or_launch(file, requested, settings, debug)
    except KeyboardInterrupt as interrupt:
        message = str(interrupt) or EARLY_INTERRUPT_MESSAGE
        typer.echo(message, err=True)
        print_answer(prints_json, {"error": message})
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        print_answer(prints_json, {"error": format_error(error)})
        raise
    answer = {
        "folder": str(result.folder), "plan": str(result.plan), "reason": "interrupted" if result.interrupted else "finished",
        "step": result.steps, "loss": result.loss, "metrics": dict(result.metrics), "seconds": result.seconds,
    }  # fmt: skip
    print_answer(prints_json, answer)
    return INTERRUPTED_EXIT_CODE if result.interrupted else 0


def _train_or_launch(file: str, requested: str, settings: Settings, debug: bool) -> TrainResult:
    from echelon.flow.job_source import JobSource
    from echelon.flow.spawn import run_ranks
    from echelon.flow.train import train_job
    from echelon.flow.train_result import TrainResult
    from echelon.world import read_world

    world, job_source = read_world(), JobSource(file)

    def start_ranks(resolved: ResolvedPlan, settings: Settings) -> TrainResult:
        common.print_warnings(job_source.warnings)  # the ranks emit all others
        return TrainResult.from_json(run_ranks("train", file, resolved, asdict(settings), debug=debug))

    if requested == "auto" and not world.launched:
        common.measure_machine()  # planning needs it; measured here, it shows its progress
    return train_job(job_source, requested, settings, world, start_ranks=start_ranks)


def _print_settings(settings: dict[str, Setting], json: bool) -> None:
    table = common.make_table("setting", "value", "from", text_columns=3)
    for setting in settings.values():
        table.add_row(setting.name, "-" if setting.value is None else str(setting.value), setting.source)
    print_answer(json, {name: {"value": s.value, "source": s.source} for name, s in settings.items()}, table)
