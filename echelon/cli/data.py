"""`echelon data`: what a packed data set holds, and whether it is whole."""

from __future__ import annotations

from typing import Annotated

import typer

from echelon.cli.common import DebugOption, JsonOption, make_console, make_table, print_json
from echelon.errors import CorruptDataError
from echelon.plan.format_units import format_bytes

app = typer.Typer(help="Show or check a packed data set.", no_args_is_help=True, rich_markup_mode=None)
DataFolder = Annotated[str, typer.Argument(metavar="DST", help="The folder or URL of a packed data set.")]


@app.command()
def show(
    folder: DataFolder,
    samples: Annotated[int, typer.Option(help="How many samples to show.")] = 3,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Columns, counts, sizes, a few samples, and how evenly the files are filled."""
    from rich.text import Text

    from echelon.data.packed.inspect import summarize

    description = summarize(folder, samples)
    if json:
        print_json(description)
        return
    terminal = make_console()
    shards = description["shards"]
    terminal.print(
        f"{folder}: {description['samples']:,} samples, {format_bytes(description['bytes'])}",
        markup=False,
        soft_wrap=True,
    )
    file_table = make_table("files", "samples in each", "size of each", "lanes", "samples per checksum", text_columns=0)
    counts = _format_range(f"{shards['fewest']:,}", f"{shards['most']:,}")
    sizes = _format_range(format_bytes(shards["smallest"]), format_bytes(shards["largest"]))
    file_table.add_row(str(shards["count"]), counts, sizes, str(shards["lanes"]), f"{description['block']:,}")
    column_table = make_table("column", "holds", text_columns=2)
    for name, kind in description["columns"].items():
        column_table.add_row(Text(name), Text(kind))  # both have square brackets, which are markup to rich
    terminal.print(column_table)
    terminal.print(file_table)
    if description["problem"]:
        terminal.print(f"samples cannot be shown: {description['problem']}", markup=False, soft_wrap=True)
    for number, sample in enumerate(description["first"]):
        terminal.print(f"sample {number}: {sample}", markup=False, soft_wrap=True)
    for key, value in description["provenance"].items():
        terminal.print(f"{key}: {value if len(value) < 200 else value[:200] + '...'}", markup=False, soft_wrap=True)


def _format_range(smallest: str, largest: str) -> str:
    return smallest if smallest == largest else f"{smallest} to {largest}"


@app.command()
def verify(folder: DataFolder, json: JsonOption = False, debug: DebugOption = False) -> None:
    """Read every byte and compare all checksums. Exit 1 if something is damaged."""
    from rich.console import Console
    from rich.progress import Progress

    from echelon.data.packed.inspect import find_damage, read_manifest

    try:
        manifest = read_manifest(folder)
    except CorruptDataError as error:
        if json:
            print_json({"folder": folder, "good": False, "blocks": 0, "bytes": 0, "damages": [str(error)]})
        else:
            typer.echo(str(error))
        raise typer.Exit(1) from None
    stderr = Console(stderr=True)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal or json) as bar:
        task = bar.add_task("reading", total=manifest.bytes)
        damaged_blocks = list(find_damage(folder, lambda done, total: bar.update(task, completed=done)))
    blocks = sum(len(shard.checksums) for shard in manifest.shards)
    if json:
        print_json(
            {
                "folder": folder,
                "good": not damaged_blocks,
                "blocks": blocks,
                "bytes": manifest.bytes,
                "damages": damaged_blocks,
            }
        )
    elif not damaged_blocks:
        typer.echo(
            f"{folder}: whole; {blocks:,} blocks in {len(manifest.shards)} files, {format_bytes(manifest.bytes)}"
        )
    for problem in [] if json else damaged_blocks:
        typer.echo(problem)
    if damaged_blocks:
        raise typer.Exit(1)
