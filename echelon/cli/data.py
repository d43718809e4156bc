"""`echelon data`: what a packed data set holds, and whether it is whole."""

from __future__ import annotations

from typing import Annotated

import typer

from echelon.cli.common import Debug, Json, console, print_json, table
from echelon.errors import DamagedError
from echelon.plan.format_units import size

app = typer.Typer(help="Show or check a packed data set.", no_args_is_help=True, rich_markup_mode=None)
Folder = Annotated[str, typer.Argument(metavar="DST", help="The folder or URL of a packed data set.")]


@app.command()
def show(
    folder: Folder,
    samples: Annotated[int, typer.Option(help="How many samples to show.")] = 3,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Columns, counts, sizes, a few samples, and how evenly the files are filled."""
    from rich.text import Text

    from echelon.data.packed.inspect import summary

    found = summary(folder, samples)
    if json:
        print_json(found)
        return
    screen = console()
    shards = found["shards"]
    screen.print(f"{folder}: {found['samples']:,} samples, {size(found['bytes'])}", markup=False, soft_wrap=True)
    files = table("files", "samples in each", "size of each", "lanes", "samples per checksum", left=0)
    counts = _range(f"{shards['fewest']:,}", f"{shards['most']:,}")
    sizes = _range(size(shards["smallest"]), size(shards["largest"]))
    files.add_row(str(shards["count"]), counts, sizes, str(shards["lanes"]), f"{found['block']:,}")
    columns = table("column", "holds", left=2)
    for name, kind in found["columns"].items():
        columns.add_row(Text(name), Text(kind))  # both have square brackets, which are markup to rich
    screen.print(columns)
    screen.print(files)
    if found["problem"]:
        screen.print(f"samples cannot be shown: {found['problem']}", markup=False, soft_wrap=True)
    for number, sample in enumerate(found["first"]):
        screen.print(f"sample {number}: {sample}", markup=False, soft_wrap=True)
    for key, value in found["provenance"].items():
        screen.print(f"{key}: {value if len(value) < 200 else value[:200] + '...'}", markup=False, soft_wrap=True)


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


@app.command()
def verify(folder: Folder, json: Json = False, debug: Debug = False) -> None:
    """Read every byte and compare all checksums. Exit 1 if something is damaged."""
    from rich.console import Console
    from rich.progress import Progress

    from echelon.data.packed.inspect import damages, manifest_of

    try:
        manifest = manifest_of(folder)
    except DamagedError as error:
        if json:
            print_json({"folder": folder, "good": False, "blocks": 0, "bytes": 0, "damages": [str(error)]})
        else:
            typer.echo(str(error))
        raise typer.Exit(1) from None
    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal or json) as bar:
        task = bar.add_task("reading", total=manifest.bytes)
        found = list(damages(folder, lambda done, total: bar.update(task, completed=done)))
    blocks = sum(len(shard.checksums) for shard in manifest.shards)
    if json:
        print_json({"folder": folder, "good": not found, "blocks": blocks, "bytes": manifest.bytes, "damages": found})
    elif not found:
        typer.echo(f"{folder}: whole; {blocks:,} blocks in {len(manifest.shards)} files, {size(manifest.bytes)}")
    for problem in [] if json else found:
        typer.echo(problem)
    if found:
        raise typer.Exit(1)
