"""Files that are there whole or not at all, whenever the power fails."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.errors import DocumentError


def fsync_folder(folder: Path) -> None:
    """Names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a JSON document."""
    write_bytes(path, json.dumps(document, separators=(",", ":")).encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file: written to a temporary, synced, renamed, the folder synced."""
    temporary_path = path.with_name(path.name + ".new")
    with open(temporary_path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary_path, path)
    fsync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """The document, or None where none was ever written."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DocumentError(f"{path}: {error}; it was not written by a controller, or the disk is damaged") from None
    if not isinstance(document, dict):
        raise DocumentError(f"{path}: not an object; it was not written by a controller")
    return document
