"""`echelon train`: plan, start the ranks, train; a run that was interrupted goes on by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.common import Debug, File, Json, console, measured, print_json, table, warn
from echelon.launchers.rank_ipc import in_words

if TYPE_CHECKING:
    from echelon.flow.resolve_plan import Subject
    from echelon.flow.settings import Setting
    from echelon.plan.plan import Plan


def train(
    file: File,
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
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a job, or go on with its training.

    Plans it, starts the ranks, shows progress and keeps checkpoints; an interrupted run goes on where it stopped.

    Settings come from the command line, else from ECHELON_* variables (ECHELON_KEEP=5), else from [train] in echelon.toml.
    """
    from echelon.flow.settings import FILE, defaults, resolve
    from echelon.world import read_settings

    given = {
        "plan": plan, "out": out, "keep": keep, "every": every, "resume": resume,
        "override": override or None, "verify": verify, "fallback": fallback, "require_certificate": require_certificate, "quiet": True if json else quiet, "workers": workers,
        "servers": servers, "secret_file": secret_file,
    }  # fmt: skip
    settings = resolve(given, read_settings(), Path(FILE), defaults())
    if show_settings:
        _show(settings, json)
        return
    raise typer.Exit(_run(file, {name: setting.value for name, setting in settings.items()}, json, debug))


def _run(file: str, values: dict[str, Any], json: bool, debug: bool) -> int:
    """Train, and tell machines how it ended whatever the end was; the exit code."""
    from echelon.flow.settings import Settings
    from echelon.launchers.local import EARLY, INTERRUPTED
    from echelon.world import read_world

    options = {
        "folder": values["out"], "keep": values["keep"], "every": values["every"], "resume": values["resume"],
        "override": list(values["override"]), "verify": values["verify"], "fallback": values["fallback"], "certificate": values["require_certificate"], "quiet": values["quiet"], "workers": values["workers"],
        "servers": values["servers"], "secret_file": values["secret_file"],
    }  # fmt: skip
    tell = json and read_world().main
    try:
        Settings(**options)  # a wrong value is told before anything is measured
        code = _train(file, values["plan"], options, tell, debug)
    except KeyboardInterrupt as interrupt:
        message = str(interrupt) or EARLY
        typer.echo(message, err=True)
        if tell:
            print_json({"error": message})
        return INTERRUPTED
    except Exception as error:
        if tell:
            print_json({"error": in_words(error)})
        raise
    if tell:
        print_json(_summary(Path(options["folder"])))
    return code


def _train(file: str, wanted: Plan | str, options: dict[str, Any], tell: bool, debug: bool) -> int:
    """Train in this process, or in ranks that it starts; the exit code. `tell`: the folder is settled beforehand, to be read after."""
    from echelon.flow.gate import attempts, bound, first_proved
    from echelon.flow.resolve_plan import Prepared, Subject
    from echelon.flow.run_folder import require_writable
    from echelon.flow.settings import Settings
    from echelon.flow.spawn import run_ranks
    from echelon.flow.train import Attempt
    from echelon.flow.train import train as train_here
    from echelon.world import read_world

    world, subject = read_world(), Subject(file)
    if world.main:
        require_writable(Path(options["folder"] or "runs"))
    # The ranks of a second attempt have to find the folder of the first.
    if tell or (not options["resume"] and not world.launched):
        options["folder"] = str(_folder(options, subject))

    def start(prepared: Prepared, settings: Settings) -> int:
        warn(subject.warnings)  # the ranks find out everything else again
        return run_ranks("train", file, prepared, options | {"resume": settings.resume}, debug=debug)

    try:
        if world.launched:
            train_here(file, wanted, **options)
            return 0
        if wanted == "auto":
            measured()  # planning needs it; here it is done in sight
        ended = first_proved(
            attempts(subject, wanted, fallback=options["fallback"]),
            Attempt(subject, world, Settings(**options), start=start),
            lambda each: bound(subject.job, each),
        )
    except SystemExit as stopped:  # interrupted, and saved
        return int(stopped.code or 0)
    return ended if isinstance(ended, int) else 0


def _folder(options: dict[str, Any], subject: Subject) -> Path:
    """The folder that the ranks will take, known beforehand so that their events can be read afterwards."""
    from echelon.flow.run_folder import choose
    from echelon.flow.run_settings import run_inputs

    if options["folder"] is not None:
        return choose(options["folder"], "", fresh=not options["resume"])[0]
    return choose(None, subject.name, fresh=not options["resume"], inputs=run_inputs(subject))[0]


def _summary(folder: Path) -> dict[str, Any]:
    """What a run came to, from its own events."""
    from echelon.observer import read_events

    last = {event.kind: event for event in read_events(folder)}
    start, step, end = (last.get(kind) for kind in ("start", "step", "end"))
    return {
        "folder": str(folder),
        "plan": start.data.get("plan") if start else None,
        "reason": end.data.get("reason") if end else None,
        "step": end.step if end else step.step if step else 0,
        "loss": step.data.get("loss") if step else None,
        "metrics": last["evaluation"].data.get("metrics") if "evaluation" in last else {},
        "seconds": end.data.get("seconds") if end else None,
    }


def _show(settings: dict[str, Setting], json: bool) -> None:
    if json:
        print_json({name: {"value": setting.value, "source": setting.source} for name, setting in settings.items()})
        return
    rows = table("setting", "value", "from", left=3)
    for setting in settings.values():
        rows.add_row(setting.name, "-" if setting.value is None else str(setting.value), setting.source)
    console().print(rows)
