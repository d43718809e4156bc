"""`echelon cache`: results that later commands reuse: profiles, clusters, plans, certificates, and copies of remote data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from echelon.cli.common import DebugOption, JsonOption, make_table, print_answer
from echelon.plan.format_units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from echelon.data.packed.remote_cache import FileCache

app = typer.Typer(help="Show or clear cached results and data.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(json: JsonOption = False, debug: DebugOption = False) -> None:
    """List cached documents, newest first, and which of them are stale."""
    from echelon.plan.document_cache import DocumentCache, installed_versions
    from echelon.world import cache_folder

    folder, remote_cache = cache_folder(), _open_remote_cache()
    files, total_bytes = remote_cache.usage() if remote_cache else (0, 0)
    entries = DocumentCache(folder).list_entries(versions=installed_versions())
    rows = [
        {"kind": e.kind, "key": e.key, "path": str(e.path), "bytes": e.bytes, "age": e.age, "good": e.is_valid}
        for e in entries
    ]
    copies = {"folder": str(remote_cache.folder) if remote_cache else None, "files": files, "bytes": total_bytes}
    table = make_table("kind", "of", "state", "size", "age", text_columns=3)
    for entry in entries:
        state = "good" if entry.is_valid else "stale"
        table.add_row(entry.kind, entry.key, state, format_bytes(entry.bytes), format_seconds(entry.age))
    parts: list[str | Table] = [table, f"in {folder}"] if entries else []
    if remote_cache and files:
        parts.append(f"{_count_copies(files)} of remote data, {format_bytes(total_bytes)}, in {remote_cache.folder}")
    answer = {"folder": str(folder), "entries": rows, "copies": copies}
    print_answer(json, answer, *(parts or [f"{folder}: empty"]))


@app.command()
def clear(json: JsonOption = False, debug: DebugOption = False) -> None:
    """Delete everything that is not in use; later commands recreate it."""
    from echelon.plan.document_cache import DocumentCache
    from echelon.world import cache_folder

    folder, remote_cache = cache_folder(), _open_remote_cache()
    count = DocumentCache(folder).clear()
    deleted, in_use = remote_cache.clear() if remote_cache else (0, 0)
    lines = [f"{count} document{'s' * (count != 1)} deleted from {folder}"]
    if remote_cache and deleted + in_use:
        remainder = f"; {in_use} in use left there" if in_use else ""
        lines.append(f"{_count_copies(deleted)} of remote data deleted from {remote_cache.folder}{remainder}")
    answer = {"folder": str(folder), "cleared": count, "copies": {"cleared": deleted, "in_use": in_use}}
    print_answer(json, answer, *lines)


def _open_remote_cache() -> FileCache | None:
    from echelon.data.packed.remote_cache import FileCache, default_cache_folder

    folder = default_cache_folder()
    return FileCache(folder, 0) if folder.is_dir() else None


def _count_copies(count: int) -> str:
    return f"{count} cop{'y' if count == 1 else 'ies'}"
