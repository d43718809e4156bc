"""What a path holds, and how it is packed."""

from __future__ import annotations

import re
from pathlib import Path

from echelon.data.packed.from_arrays import idx_folder, idx_pairs, numpy_file
from echelon.data.packed.from_images import ENDINGS as PICTURES
from echelon.data.packed.from_images import Pictures
from echelon.data.packed.from_samples import json_lines
from echelon.data.packed.from_tables import ENDINGS as TABLES
from echelon.data.packed.from_tables import Tables
from echelon.data.packed.from_text import ENDINGS as TEXTS
from echelon.data.packed.from_text import Tokens
from echelon.data.packed.packing_source import Origin, Progress
from echelon.errors import DataError

_LINES = {".jsonl", ".ndjson"}
KINDS = "NumPy (.npy, .npz), IDX, CSV, Parquet, Arrow, JSON lines (.jsonl), text (with --tokens), a folder of these or of pictures by class"


def open_origin(
    path: Path, *, split: str | None = None, size: str | None = None, tokens: str | None = None, length: int | None = None,
    dtype: str = "int64", kept: Path, processes: int = 1, progress: Progress = lambda done, total: None,
) -> Origin:  # fmt: skip
    """The data in a file or a folder. `split`: of IDX files; `size`: of pictures; `tokens`, `length`, `dtype`: of text.

    `kept`: a folder for what has to be worked out before packing begins, by `processes`; beside it is room for more.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if tokens is not None:
        if length is not None and length < 1:
            raise DataError(f"length={length}: a row of tokens has at least one")
        if dtype not in ("uint8", "int16", "int32", "int64"):
            raise DataError(f"dtype={dtype!r}: tokens are uint8, int16, int32 or int64")
        return Tokens(
            _texts(path), tokens=tokens, length=length, dtype=dtype, kept=kept, processes=processes, progress=progress
        )
    return _folder(path, split, size, kept.parent) if path.is_dir() else _file(path, kept.parent)


def _file(path: Path, near: Path) -> Origin:
    ending = path.suffix.lower()
    if ending in (".npy", ".npz"):
        return numpy_file(path)
    if ending in TABLES:
        return Tables([path], near)
    if ending in _LINES:
        return json_lines(path)
    if ending in TEXTS:
        raise DataError(f"{path} is text: say how it becomes tokens, --tokens byte or --tokens tokenizer.json")
    raise DataError(f"{path}: it does not show what it is; packed can be {KINDS}")


def _folder(path: Path, split: str | None, size: str | None, near: Path) -> Origin:
    if idx_pairs(path):
        return idx_folder(path, split)
    tables = sorted(each for each in path.iterdir() if each.suffix.lower() in TABLES)
    if tables:
        if len({TABLES[each.suffix.lower()] for each in tables}) > 1:
            raise DataError(f"{path} holds tables of several kinds: give one kind, or one file")
        other = next(
            (each for each in sorted(path.iterdir()) if each.suffix.lower() in {".npy", ".npz", *_LINES}), None
        )
        if other is not None:
            raise DataError(f"{path} holds tables, and {other.name} as well: give a folder of one kind, or one file")
        return Tables(tables, near)
    if any(each.suffix.lower() in PICTURES for each in path.glob("*/**/*")):
        return Pictures(path, None if size is None else _size(size))
    raise DataError(f"{path} holds nothing that is known; packed can be {KINDS}")


def _texts(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(each for each in path.rglob("*") if each.suffix.lower() in TEXTS and each.is_file())
    if not found:
        raise DataError(f"{path} holds no text ({', '.join(sorted(TEXTS))})")
    return found


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    if not match:
        raise DataError(f"size={text!r}: height and width, as 224x224")
    return int(match[1]), int(match[2])
