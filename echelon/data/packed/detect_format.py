"""Recognizes what a path holds, and opens it for packing."""

from __future__ import annotations

import re
from pathlib import Path

from echelon.data.packed.from_arrays import find_idx_pairs, open_idx_folder, open_numpy_file
from echelon.data.packed.from_images import IMAGE_SUFFIXES, ImagePackingSource
from echelon.data.packed.from_samples import open_json_lines
from echelon.data.packed.from_tables import TABLE_FORMATS, TablePackingSource
from echelon.data.packed.from_text import TEXT_SUFFIXES, TokenPackingSource
from echelon.data.packed.packing_source import PackingSource, ProgressCallback
from echelon.errors import DataError

_JSON_LINES_SUFFIXES = {".jsonl", ".ndjson"}
_SUPPORTED_FORMATS = (
    "NumPy (.npy, .npz), IDX, CSV, Parquet, Arrow, ORC, JSON lines (.jsonl), text (with --tokens), and folders of tables, of text or "
    "of images by class"
)


def open_packing_source(
    path: Path, *, split: str | None = None, size: str | None = None, tokens: str | None = None, length: int | None = None,
    dtype: str = "int64", work_folder: Path, processes: int = 1, progress: ProgressCallback = lambda done, total: None,
) -> PackingSource:  # fmt: skip
    """Open a file or a folder. `split`: of IDX files; `size`: of images; `tokens`, `length`, `dtype`: of text.

    `processes` tokenize text into `work_folder` before packing begins; the folder that it is in has room for temporary files.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if tokens is None:
        temp_folder = work_folder.parent
        return _open_folder(path, split, size, temp_folder) if path.is_dir() else _open_file(path, temp_folder)
    if length is not None and length < 1:
        raise DataError(f"length={length}: expected at least one token per row")
    if dtype not in ("uint8", "int16", "int32", "int64"):
        raise DataError(f"dtype={dtype!r}: tokens are uint8, int16, int32 or int64")
    return TokenPackingSource(
        _find_text_files(path), tokens=tokens, length=length, dtype=dtype, work_folder=work_folder, processes=processes,
        progress=progress,
    )  # fmt: skip


def _open_file(path: Path, temp_folder: Path) -> PackingSource:
    suffix = path.suffix.lower()
    if suffix in (".npy", ".npz"):
        return open_numpy_file(path)
    if suffix in TABLE_FORMATS:
        return TablePackingSource([path], temp_folder)
    if suffix in _JSON_LINES_SUFFIXES:
        return open_json_lines(path)
    if suffix in TEXT_SUFFIXES:
        raise DataError(f"{path} is text: choose how it becomes tokens, --tokens byte or --tokens tokenizer.json")
    raise DataError(f"{path}: unknown format; `echelon pack` reads {_SUPPORTED_FORMATS}")


def _open_folder(path: Path, split: str | None, size: str | None, temp_folder: Path) -> PackingSource:
    if find_idx_pairs(path):
        return open_idx_folder(path, split)
    files = sorted(path.iterdir())
    tables = [file for file in files if file.suffix.lower() in TABLE_FORMATS]
    if tables:
        if len({TABLE_FORMATS[table.suffix.lower()] for table in tables}) > 1:
            raise DataError(f"{path} holds tables in several formats: give a folder of one format, or one file")
        other = next((file for file in files if file.suffix.lower() in {".npy", ".npz", *_JSON_LINES_SUFFIXES}), None)
        if other is not None:
            raise DataError(f"{path} holds tables, and {other.name} as well: give a folder of one format, or one file")
        return TablePackingSource(tables, temp_folder)
    if any(file.suffix.lower() in IMAGE_SUFFIXES for file in path.glob("*/**/*")):
        return ImagePackingSource(path, None if size is None else _parse_size(size))
    raise DataError(f"{path} holds nothing in a known format; `echelon pack` reads {_SUPPORTED_FORMATS}")


def _find_text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    text_files = sorted(file for file in path.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES and file.is_file())
    if not text_files:
        raise DataError(f"{path} holds no text ({', '.join(sorted(TEXT_SUFFIXES))})")
    return text_files


def _parse_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    if not match:
        raise DataError(f"size={text!r}: expected height and width, as 224x224")
    return int(match[1]), int(match[2])
