"""`echelon data`: inspect or verify a packed data set."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from echelon.cli.common import DebugOption, JsonOption, make_progress, make_table, print_answer
from echelon.errors import CorruptDataError
from echelon.plan.format_units import format_bytes

app = typer.Typer(help="Show or verify a packed data set.", no_args_is_help=True, rich_markup_mode=None)
DataFolder = Annotated[str, Argument(metavar="DST", help="Folder or URL of a packed data set.")]


@app.command()
def show(
    folder: DataFolder,
    samples: Annotated[int, Option(help="Samples to show.")] = 3,
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Show columns, counts, sizes, a few samples, and how evenly the files are filled."""
    from rich.text import Text

    from echelon.data.packed.inspect import summarize

    summary = summarize(folder, samples)
    shards = summary["shards"]
    columns = make_table("column", "holds", text_columns=2)
    for name, kind in summary["columns"].items():
        columns.add_row(Text(name), Text(kind))  # both have square brackets, which are markup to rich
    files = make_table("files", "samples in each", "size of each", "lanes", "samples per checksum", text_columns=0)
    files.add_row(
        str(shards["count"]), _format_range(f"{shards['fewest']:,}", f"{shards['most']:,}"),
        _format_range(format_bytes(shards["smallest"]), format_bytes(shards["largest"])), str(shards["lanes"]), f"{summary['block']:,}",
    )  # fmt: skip
    lines = [f"samples cannot be shown: {summary['problem']}"] if summary["problem"] else []
    lines += [f"sample {number}: {sample}" for number, sample in enumerate(summary["first"])]
    provenance = summary["provenance"].items()
    lines += [f"{key}: {text if len(text) < 200 else text[:200] + '...'}" for key, text in provenance]
    title = f"{folder}: {summary['samples']:,} samples, {format_bytes(summary['bytes'])}"
    print_answer(json, summary, title, columns, files, *lines)


def _format_range(smallest: str, largest: str) -> str:
    return smallest if smallest == largest else f"{smallest} to {largest}"


@app.command()
def verify(folder: DataFolder, json: JsonOption = False, debug: DebugOption = False) -> None:
    """Read every byte and compare all checksums. Exit 1 on damage."""
    from echelon.data.packed.inspect import find_damage, read_manifest

    blocks = total_bytes = file_count = 0
    try:
        manifest = read_manifest(folder)
        blocks, total_bytes = sum(len(shard.checksums) for shard in manifest.shards), manifest.bytes
        file_count = len(manifest.shards)
        with make_progress(hidden=json) as bar:
            task = bar.add_task("reading", total=total_bytes)
            damages = list(find_damage(folder, lambda done, total: bar.update(task, completed=done)))
    except CorruptDataError as error:
        damages = [str(error)]
    answer = {"folder": folder, "good": not damages, "blocks": blocks, "bytes": total_bytes, "damages": damages}
    good = f"{folder}: good; {blocks:,} blocks in {file_count} files, {format_bytes(total_bytes)}"
    print_answer(json, answer, *(damages or [good]))
    raise typer.Exit(1 if damages else 0)
