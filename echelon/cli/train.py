"""`echelon train`: plan, start the ranks, train; a run that was interrupted goes on by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from echelon.flow.job_source import JobSource
    from echelon.flow.resolve_plan import ResolvedPlan
    from echelon.flow.settings import Setting, Settings
    from echelon.plan.plan import Plan


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
    from echelon.flow.settings import SETTINGS_FILE, default_values, merge_settings
    from echelon.world import read_settings

    given_options = {
        "plan": plan, "out": out, "keep": keep, "every": every, "resume": resume,
        "override": override or None, "verify": verify, "fallback": fallback, "require_certificate": require_certificate, "quiet": True if json else quiet, "workers": workers,
        "servers": servers, "secret_file": secret_file,
    }  # fmt: skip
    settings = merge_settings(given_options, read_settings(), Path(SETTINGS_FILE), default_values())
    if show_settings:
        _print_settings(settings, json)
        return
    raise typer.Exit(_train_and_report(file, {name: setting.value for name, setting in settings.items()}, json, debug))


def _train_and_report(file: str, values: dict[str, Any], json: bool, debug: bool) -> int:
    """Train, and tell machines how it ended whatever the end was; the exit code."""
    from echelon.flow.settings import Settings
    from echelon.launchers.local import EARLY_INTERRUPT_MESSAGE, INTERRUPTED_EXIT_CODE
    from echelon.world import read_world

    options = {
        "folder": values["out"], "keep": values["keep"], "every": values["every"], "resume": values["resume"],
        "override": list(values["override"]), "verify": values["verify"], "fallback": values["fallback"], "certificate": values["require_certificate"], "quiet": values["quiet"], "workers": values["workers"],
        "servers": values["servers"], "secret_file": values["secret_file"],
    }  # fmt: skip
    prints_json = json and read_world().is_main
    try:
        Settings(**options)  # a wrong value is told before anything is measured
        code = _train_or_launch(file, values["plan"], options, prints_json, debug)
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
        print_json(_summarize_run(Path(options["folder"])))
    return code


def _train_or_launch(file: str, requested: Plan | str, options: dict[str, Any], needs_folder: bool, debug: bool) -> int:
    """Train in this process, or in ranks that it starts; the exit code. `needs_folder`: the folder is settled beforehand, to be read after."""
    from echelon.flow.gate import candidate_plans, run_first_proved, verification_limit
    from echelon.flow.job_source import JobSource
    from echelon.flow.run_folder import require_writable
    from echelon.flow.settings import Settings
    from echelon.flow.spawn import run_ranks
    from echelon.flow.train import PlanAttempt
    from echelon.flow.train import train as train_here
    from echelon.world import read_world

    world, job_source = read_world(), JobSource(file)
    if world.is_main:
        require_writable(Path(options["folder"] or "runs"))
    # The ranks of a second attempt have to find the folder of the first.
    if needs_folder or (not options["resume"] and not world.launched):
        options["folder"] = str(_choose_folder(options, job_source))

    def start(prepared: ResolvedPlan, settings: Settings) -> int:
        print_warnings(job_source.warnings)  # the ranks find out everything else again
        return run_ranks("train", file, prepared, options | {"resume": settings.resume}, debug=debug)

    try:
        if world.launched:
            train_here(file, requested, **options)
            return 0
        if requested == "auto":
            measure_machine()  # planning needs it; here it is done in sight
        result = run_first_proved(
            candidate_plans(job_source, requested, fallback=options["fallback"]),
            PlanAttempt(job_source, world, Settings(**options), start_ranks=start),
            lambda plan: verification_limit(job_source.job, plan),
        )
    except SystemExit as interrupt:  # interrupted, and saved
        return int(interrupt.code or 0)
    return result if isinstance(result, int) else 0


def _choose_folder(options: dict[str, Any], job_source: JobSource) -> Path:
    """The folder that the ranks will take, known beforehand so that their events can be read afterwards."""
    from echelon.flow.run_folder import choose_run_folder
    from echelon.flow.run_settings import run_inputs

    if options["folder"] is not None:
        return choose_run_folder(options["folder"], "", fresh=not options["resume"])[0]
    return choose_run_folder(None, job_source.name, fresh=not options["resume"], inputs=run_inputs(job_source))[0]


def _summarize_run(folder: Path) -> dict[str, Any]:
    """What a run came to, from its own events."""
    from echelon.observer import read_events

    last_events = {event.kind: event for event in read_events(folder)}
    start, step, end = (last_events.get(kind) for kind in ("start", "step", "end"))
    return {
        "folder": str(folder),
        "plan": start.data.get("plan") if start else None,
        "reason": end.data.get("reason") if end else None,
        "step": end.step if end else step.step if step else 0,
        "loss": step.data.get("loss") if step else None,
        "metrics": last_events["evaluation"].data.get("metrics") if "evaluation" in last_events else {},
        "seconds": end.data.get("seconds") if end else None,
    }


def _print_settings(settings: dict[str, Setting], json: bool) -> None:
    if json:
        print_json({name: {"value": setting.value, "source": setting.source} for name, setting in settings.items()})
        return
    setting_table = make_table("setting", "value", "from", text_columns=3)
    for setting in settings.values():
        setting_table.add_row(setting.name, "-" if setting.value is None else str(setting.value), setting.source)
    make_console().print(setting_table)
