"""`echelon pack`: a data set into shards."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from echelon.cli.common import DebugOption, JsonOption, make_progress, print_answer
from echelon.errors import DataError
from echelon.plan.format_units import format_bytes

if TYPE_CHECKING:
    from echelon.data.packed.packing_source import PackingSource

SOURCE_HELP = "A file or folder (NumPy, IDX, CSV, Parquet, Arrow, ORC, JSON lines, text, images by class), or FILE.py:name of a torch Dataset."


def pack(
    source: Annotated[str, Argument(metavar="SRC", help=SOURCE_HELP)],
    target: Annotated[Path, Argument(metavar="DST", help="The folder to write.")],
    split: Annotated[str | None, Option(help="For IDX files: train or t10k.")] = None,
    size: Annotated[str | None, Option(metavar="HxW", help="Decode and resize images [stored as they are].")] = None,
    tokens: Annotated[str | None, Option(metavar="byte|FILE", help="Tokenize text, by byte or tokenizer.json.")] = None,
    length: Annotated[int | None, Option(help="Tokens per row [one row per file].")] = None,
    dtype: Annotated[str, Option(help="Type of tokens: uint8, int16, int32 or int64.")] = "int64",
    shuffle: Annotated[str | None, Option(metavar="SEED|no", help="Shuffle [seed 0 for images, else no].")] = None,
    shards: Annotated[int | None, Option(help="Files [by size]; each packing process holds one in memory.")] = None,
    processes: Annotated[int | None, Option(help="Packing processes [one per core, as far as memory allows].")] = None,
    overwrite: Annotated[bool, Option(help="Replace a data set in DST that has another source.")] = False,
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Pack a data set into shards that every rank memory-maps.

    Run the same command again after an interruption: it continues.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from echelon.data.packed.pack import pack as write

    if re.match(r"[a-z0-9+]+:/", str(target)):
        raise DataError(f"{target}: DST must be a local folder; copy it to the store afterwards with the store's tool")
    processes = processes or _default_processes()
    absolute_target = Path(os.path.abspath(target))  # `.` and `..` have no name
    token_cache = absolute_target.with_name(f".{absolute_target.name or 'root'}.tokens")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with make_progress(*columns, hidden=json) as bar:
        token_task = bar.add_task("tokens", total=None, visible=False)
        packing_source = _open_source(
            source, split=split, size=size, tokens=tokens, length=length, dtype=dtype, work_folder=token_cache, processes=processes,
            progress=lambda done, total: bar.update(token_task, completed=done, total=total, visible=True),
        )  # fmt: skip
        pack_task = bar.add_task("packing", total=None)
        manifest = write(
            _shuffle_source(packing_source, shuffle), target, shards=shards, processes=processes, overwrite=overwrite,
            progress=lambda done, total: bar.update(pack_task, completed=done, total=total),
        )  # fmt: skip
    packing_source.finish()
    answer = {
        "folder": str(target), "samples": manifest.samples, "bytes": manifest.bytes, "shards": len(manifest.shards),
        "columns": {column.name: str(column) for column in manifest.columns},
    }  # fmt: skip
    files = f"{len(manifest.shards)} file{'s' * (len(manifest.shards) != 1)}"
    size_text = f"{manifest.samples:,} samples, {format_bytes(manifest.bytes)} in {files}"
    print_answer(json, answer, f"{target}: {size_text}; use it as data={str(target)!r}")


def _default_processes() -> int:
    """One per core, as far as memory allows: each holds a shard, twice while it writes it, and what it reads."""
    from echelon.data.packed.pack import SHARD_BYTES
    from echelon.world import usable_cores, usable_memory

    return max(1, min(usable_cores(), usable_memory() // (4 * SHARD_BYTES)))


def _shuffle_source(packing_source: PackingSource, shuffle: str | None) -> PackingSource:
    """The source, shuffled if requested, or by default if its rows are sorted by class."""
    from echelon.data.packed.from_images import ImagePackingSource
    from echelon.data.packed.packing_source import ShuffledPackingSource

    if shuffle not in (None, "no") and not shuffle.isdecimal():
        raise DataError(f"--shuffle {shuffle}: expected a seed, as 0, or no")
    if shuffle == "no" or (shuffle is None and not isinstance(packing_source, ImagePackingSource)):
        return packing_source
    return ShuffledPackingSource(packing_source, int(shuffle or 0))


def _open_source(source: str, **options: Any) -> PackingSource:
    from echelon.data.packed.detect_format import open_packing_source

    file = source.rpartition(":")[0] if ":" in source else source
    is_python = file.endswith(".py") and (options["tokens"] is None or ":" in source)
    if not is_python:
        return open_packing_source(Path(source), **options)
    from echelon.data.packed.fingerprint import fingerprint
    from echelon.data.packed.from_samples import SamplePackingSource, open_dataset
    from echelon.flow.job_file import load_data

    data = open_dataset(load_data(source))
    return SamplePackingSource(data, {"source": source, "kind": "data set in Python", "data": fingerprint(data)})
