"""`echelon cache`: what is kept so that it is not made again: profiles, clusters, plans, and copies of remote data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from echelon.cli.common import Debug, Json, console, print_json, table
from echelon.plan.format_units import seconds, size

if TYPE_CHECKING:
    from echelon.data.packed.remote_cache import Cache

app = typer.Typer(help="Show or clear what is kept between runs.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(json: Json = False, debug: Debug = False) -> None:
    """What is kept, newest first, and whether it would still be used."""
    from echelon.plan.document_cache import Store, installed_versions
    from echelon.world import cache_folder

    folder, copies = cache_folder(), _copies()
    files, total = copies.kept() if copies else (0, 0)
    entries = Store(folder).show(versions=installed_versions())
    if json:
        kept = [
            {
                "kind": entry.kind, "key": entry.key, "path": str(entry.path), "bytes": entry.bytes, "age": entry.age,
                "good": entry.good,
            }
            for entry in entries
        ]  # fmt: skip
        where = str(copies.folder) if copies else None
        print_json(
            {"folder": str(folder), "entries": kept, "copies": {"folder": where, "files": files, "bytes": total}}
        )
        return
    if not entries and not files:
        typer.echo(f"{folder}: nothing is kept")
        return
    rows = table("kind", "of", "state", "size", "age", left=3)
    for entry in entries:
        rows.add_row(entry.kind, entry.key, "good" if entry.good else "stale", size(entry.bytes), seconds(entry.age))
    screen = console()
    if entries:
        screen.print(rows)
        screen.print(f"in {folder}")
    if copies and files:
        screen.print(f"{_counted(files)} of remote data, {size(total)}, in {copies.folder}", soft_wrap=True)


@app.command()
def clear(json: Json = False, debug: Debug = False) -> None:
    """Delete all of it that is not in use; it is made again when it is needed."""
    from echelon.plan.document_cache import Store
    from echelon.world import cache_folder

    folder, copies = cache_folder(), _copies()
    count = Store(folder).clear()
    gone, used = copies.clear() if copies else (0, 0)
    if json:
        print_json({"folder": str(folder), "cleared": count, "copies": {"cleared": gone, "in_use": used}})
        return
    typer.echo(f"{count} document{'s' * (count != 1)} deleted from {folder}")
    if copies and gone + used:
        stay = f"; {used} in use left there" if used else ""
        typer.echo(f"{_counted(gone)} of remote data deleted from {copies.folder}{stay}")


def _copies() -> Cache | None:
    """The copies of remote data that named no folder for them, if there are any."""
    from echelon.data.packed.remote_cache import Cache, default_folder

    folder = default_folder()
    return Cache(folder, 0) if folder.is_dir() else None


def _counted(copies: int) -> str:
    return f"{copies} cop{'y' if copies == 1 else 'ies'}"
