"""`echelon cache`: profiles and clusters that are kept so that they are not made again."""

from __future__ import annotations

import typer

from echelon.cli.common import Debug, Json, console, print_json, table
from echelon.plan.figures import seconds, size

app = typer.Typer(help="Show or clear what is kept between runs.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(json: Json = False, debug: Debug = False) -> None:
    """What is kept, newest first, and whether it would still be used."""
    from echelon.plan.store import Store, installed_versions
    from echelon.world import cache_folder

    folder = cache_folder()
    entries = Store(folder).show(versions=installed_versions())
    if json:
        kept = [
            {
                "kind": entry.kind, "key": entry.key, "path": str(entry.path), "bytes": entry.bytes, "age": entry.age,
                "good": entry.good,
            }
            for entry in entries
        ]  # fmt: skip
        print_json({"folder": str(folder), "entries": kept})
        return
    if not entries:
        typer.echo(f"{folder}: nothing is kept")
        return
    rows = table("kind", "of", "state", "size", "age", left=3)
    for entry in entries:
        rows.add_row(entry.kind, entry.key, "good" if entry.good else "stale", size(entry.bytes), seconds(entry.age))
    screen = console()
    screen.print(rows)
    screen.print(f"in {folder}")


@app.command()
def clear(json: Json = False, debug: Debug = False) -> None:
    """Delete all of it; it is made again when it is needed."""
    from echelon.plan.store import Store
    from echelon.world import cache_folder

    folder = cache_folder()
    count = Store(folder).clear()
    if json:
        print_json({"folder": str(folder), "cleared": count})
    else:
        typer.echo(f"{count} document{'s' * (count != 1)} deleted from {folder}")
