"""JSON files with their own SHA-256, for what people do not edit: checkpoint manifests and indices.

    {"format": 3, "step": 120, ..., "sha256": "9f86d0..."}

The hash is the last member and covers every byte before it, so that any change is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.errors import DocumentError

#: Larger than any index (about 200 bytes per shard of a tensor), small enough for a host's memory.
MAX_FILE_BYTES = 1 << 30
_HASH_LINE = re.compile(rb',\n"sha256": "([0-9a-f]{64})"}\n\Z')
_HASH_LINE_LENGTH = len(b',\n"sha256": ""}\n') + 64


def seal(document: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """The JSON file of a non-empty object without a "sha256" of its own."""
    assert document
    assert "sha256" not in document
    body = json.dumps(document, indent=indent, allow_nan=False)[:-1].rstrip().encode()
    return body + f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def unseal(data: bytes, source: str) -> dict[str, Any]:
    """The object that `seal` wrote; `source` names the file in errors."""
    hash_line = _HASH_LINE.search(data[-_HASH_LINE_LENGTH:])
    if hash_line is None:
        raise DocumentError(f"{source}: does not end in its SHA-256: cut short, edited, or not written by this echelon")
    body = data[:-_HASH_LINE_LENGTH]
    digest = hashlib.sha256(body).hexdigest()
    expected = hash_line[1].decode()
    if digest != expected:
        hashes = f"its content hashes to {digest[:12]} and its last line says {expected[:12]}"
        raise DocumentError(f"{source}: {hashes}: damaged or edited")
    return parse_object(body + b"}", source)


def read_unsealed_format(data: bytes) -> Any:
    """The "format" of a JSON object that carries no hash, as earlier versions wrote them; None for anything else."""
    if _HASH_LINE.search(data[-_HASH_LINE_LENGTH:]):
        return None
    try:
        return parse_object(data, "").get("format")
    except DocumentError:
        return None


def parse_object(data: bytes, source: str) -> dict[str, Any]:
    """A JSON object, parsed strictly: duplicate keys, NaN and nesting that exhausts the stack are errors."""
    hooks: dict[str, Any] = {"object_pairs_hook": _reject_duplicate_keys, "parse_constant": _reject_constant}
    try:
        plain = json.loads(data.decode("utf-8"), **hooks)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{source}: not valid JSON ({error})") from error
    if not isinstance(plain, dict):
        raise DocumentError(f"{source}: expected a JSON object, found {type(plain).__name__}")
    return plain


def read_regular(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a regular file; symbolic links, pipes and devices are refused."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise DocumentError(f"{path}: {size:,} bytes, above the limit of {limit:,}")
        return bytes(file.read(limit + 1))


def open_regular(path: Path) -> Any:
    """Open a regular file for reading; DocumentError for a symbolic link, a pipe or a device."""
    # O_NOFOLLOW keeps a checkpoint from reading outside its folder; O_NONBLOCK keeps a named pipe from hanging the run.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise DocumentError(f"{path}: a symbolic link; only regular files are read") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DocumentError(f"{path}: not a regular file")
    return os.fdopen(descriptor, "rb")


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return members


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
