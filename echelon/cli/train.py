"""`echelon train`: plan, start the ranks, train; a run that was interrupted goes on by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.common import Debug, File, Json, console, measured, print_json, table, warn
from echelon.cli.settings import FILE, Setting, resolve

if TYPE_CHECKING:
    from echelon.flow.prepare import Subject
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
    require_certificate: Annotated[
        str | None, typer.Option(metavar="FILE", help="Train only if this certificate covers the run.")
    ] = None,
    quiet: Annotated[bool | None, typer.Option("--quiet/--no-quiet", help="No progress, only warnings.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that read data ahead, per rank [default: 0].")] = None,
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
    from echelon.world import read_settings

    given = {
        "plan": plan, "out": out, "keep": keep, "every": every, "resume": resume,
        "require_certificate": require_certificate, "quiet": True if json else quiet, "workers": workers,
    }  # fmt: skip
    settings = resolve(given, read_settings(), Path(FILE), _defaults())
    if show_settings:
        _show(settings, json)
        return
    raise typer.Exit(_run(file, {name: setting.value for name, setting in settings.items()}, json, debug))


def _defaults() -> dict[str, Any]:
    """What `echelon.train` does when nothing is said, under the command line's names."""
    from echelon.flow.train import Settings

    plain = Settings()
    return {
        "plan": "auto", "out": plain.folder, "keep": plain.keep, "every": plain.every, "resume": plain.resume,
        "require_certificate": plain.certificate, "quiet": plain.quiet, "workers": plain.workers,
    }  # fmt: skip


def _run(file: str, values: dict[str, Any], json: bool, debug: bool) -> int:
    """Train in this process, or in ranks that it starts; the exit code."""
    from echelon.flow.prepare import Subject, prepare
    from echelon.flow.start import run_ranks
    from echelon.flow.train import Settings
    from echelon.flow.train import train as train_here
    from echelon.world import read_world

    options = {
        "folder": values["out"], "keep": values["keep"], "every": values["every"], "resume": values["resume"],
        "certificate": values["require_certificate"], "quiet": values["quiet"], "workers": values["workers"],
    }  # fmt: skip
    Settings(**options)  # a wrong value is told before anything is measured
    world, subject = read_world(), Subject(file)
    wanted: Plan | str = values["plan"]
    if not world.launched:
        if wanted == "auto":
            measured()  # planning needs it; here it is done in sight
        prepared = prepare(subject, wanted)
        if prepared.plan.ranks > 1:
            if json:
                options["folder"] = str(_folder(options, subject))
            warn(subject.warnings)  # the ranks find out everything else again
            code = run_ranks("train", file, prepared, options, debug=debug)
            if json:
                print_json(_summary(Path(options["folder"])))
            return code
        wanted = prepared.plan
    trained = train_here(file, wanted, **options)
    if json and world.main:
        print_json(_summary(trained.folder))
    return 0


def _folder(options: dict[str, Any], subject: Subject) -> Path:
    """The folder that the ranks will take, known beforehand so that their events can be read afterwards."""
    from echelon.flow.folder import choose

    name = subject.name if options["folder"] is None else ""
    return choose(options["folder"], name, fresh=not options["resume"])


def _summary(folder: Path) -> dict[str, Any]:
    """What a run came to, from its own events."""
    from echelon.observer import read_events

    last = {event.kind: event for event in read_events(folder)}
    step, end = last.get("step"), last["end"].data
    return {
        "folder": str(folder),
        "plan": last["start"].data.get("plan"),
        "reason": end.get("reason"),
        "step": last["end"].step,
        "loss": step.data.get("loss") if step else None,
        "metrics": last["evaluation"].data.get("metrics") if "evaluation" in last else {},
        "seconds": end.get("seconds"),
    }


def _show(settings: dict[str, Setting], json: bool) -> None:
    if json:
        print_json({name: {"value": setting.value, "source": setting.source} for name, setting in settings.items()})
        return
    rows = table("setting", "value", "from", left=3)
    for setting in settings.values():
        rows.add_row(setting.name, "-" if setting.value is None else str(setting.value), setting.source)
    console().print(rows)
