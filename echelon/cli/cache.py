"""`echelon cache`: what is kept so that it is not made again: profiles, clusters, plans, and copies of remote data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from echelon.cli.common import DebugOption, JsonOption, make_console, make_table, print_json
from echelon.plan.format_units import format_bytes, format_seconds

if TYPE_CHECKING:
    from echelon.data.packed.remote_cache import FileCache

app = typer.Typer(help="Show or clear what is kept between runs.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(json: JsonOption = False, debug: DebugOption = False) -> None:
    """What is kept, newest first, and whether it would still be used."""
    from echelon.plan.document_cache import DocumentCache, installed_versions
    from echelon.world import cache_folder

    folder, remote_cache = cache_folder(), _open_remote_cache()
    files, total = remote_cache.usage() if remote_cache else (0, 0)
    entries = DocumentCache(folder).list_entries(versions=installed_versions())
    if json:
        entry_documents = [
            {
                "kind": entry.kind, "key": entry.key, "path": str(entry.path), "bytes": entry.bytes, "age": entry.age,
                "good": entry.is_valid,
            }
            for entry in entries
        ]  # fmt: skip
        cache_folder_path = str(remote_cache.folder) if remote_cache else None
        print_json(
            {
                "folder": str(folder),
                "entries": entry_documents,
                "copies": {"folder": cache_folder_path, "files": files, "bytes": total},
            }
        )
        return
    if not entries and not files:
        typer.echo(f"{folder}: nothing is kept")
        return
    entry_table = make_table("kind", "of", "state", "size", "age", text_columns=3)
    for entry in entries:
        entry_table.add_row(
            entry.kind,
            entry.key,
            "good" if entry.is_valid else "stale",
            format_bytes(entry.bytes),
            format_seconds(entry.age),
        )
    terminal = make_console()
    if entries:
        terminal.print(entry_table)
        terminal.print(f"in {folder}")
    if remote_cache and files:
        terminal.print(
            f"{_format_copies(files)} of remote data, {format_bytes(total)}, in {remote_cache.folder}", soft_wrap=True
        )


@app.command()
def clear(json: JsonOption = False, debug: DebugOption = False) -> None:
    """Delete all of it that is not in use; it is made again when it is needed."""
    from echelon.plan.document_cache import DocumentCache
    from echelon.world import cache_folder

    folder, remote_cache = cache_folder(), _open_remote_cache()
    count = DocumentCache(folder).clear()
    deleted, in_use = remote_cache.clear() if remote_cache else (0, 0)
    if json:
        print_json({"folder": str(folder), "cleared": count, "copies": {"cleared": deleted, "in_use": in_use}})
        return
    typer.echo(f"{count} document{'s' * (count != 1)} deleted from {folder}")
    if remote_cache and deleted + in_use:
        remainder = f"; {in_use} in use left there" if in_use else ""
        typer.echo(f"{_format_copies(deleted)} of remote data deleted from {remote_cache.folder}{remainder}")


def _open_remote_cache() -> FileCache | None:
    """The copies of remote data that named no folder for them, if there are any."""
    from echelon.data.packed.remote_cache import FileCache, default_cache_folder

    folder = default_cache_folder()
    return FileCache(folder, 0) if folder.is_dir() else None


def _format_copies(count: int) -> str:
    return f"{count} cop{'y' if count == 1 else 'ies'}"
