"""Profiles, clusters and plans cached on disk.

An entry is found by its kind and key, and is valid while what it was made from is unchanged: versions, source files, and the files, folders,
environment variables and arguments that were read (plan/input_digests.py). Checking needs no torch. A damaged entry counts as absent.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from echelon.errors import DocumentError
from echelon.files import atomic_write
from echelon.plan.codec import Document
from echelon.plan.input_digests import current_digests

T = TypeVar("T", bound=Document)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One cached document, for display."""

    kind: str
    key: str
    path: Path
    bytes: int
    age: float  #: seconds
    is_valid: bool


@dataclass(frozen=True, slots=True)
class DocumentCache:
    """A folder of documents, created by the first `put`."""

    folder: Path

    def get(
        self,
        document_type: type[T],
        key: str,
        *,
        versions: Mapping[str, str],
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> T | None:
        """The document under `key`, or None where there is no valid one.

        `environment` and `arguments` are the current ones, for entries that depend on them (None: variables are not compared).
        """
        path = self._entry_path(document_type.KIND, key)
        entry = _read_entry(path)
        if entry is None or entry["key"] != key or not _is_valid(entry, versions, environment, arguments):
            return None
        try:
            return document_type.from_json(entry["document"], source=str(path))
        except DocumentError:
            return None

    def put(
        self,
        key: str,
        document: Document,
        *,
        versions: Mapping[str, str],
        sources: Mapping[str, str] | None = None,
        inputs: Mapping[str, str] | None = None,
    ) -> Path:
        """Save `document` under `key`. `sources`: file -> SHA-256 of what it was made from (see `hash_files`); `inputs`: name -> digest of
        what was read meanwhile. An OSError leaves nothing behind.
        """
        path = self._entry_path(document.KIND, key)
        entry = {
            "kind": document.KIND, "key": key, "versions": dict(versions), "sources": dict(sources or {}), "inputs": dict(inputs or {}),
            "document": document.to_json(indent=None),
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(entry))
        return path

    def list_entries(self, *, versions: Mapping[str, str]) -> tuple[CacheEntry, ...]:
        """Every entry, newest first, including damaged ones."""
        now, entries = time.time(), []
        for path in self._entry_files():
            record, stat = _read_entry(path), path.stat()
            kind, key = (record["kind"], record["key"]) if record else (path.name.partition("-")[0], "(damaged)")
            is_valid = record is not None and _is_valid(record, versions)
            age = max(now - stat.st_mtime, 0.0)
            entries.append(CacheEntry(kind=kind, key=key, path=path, bytes=stat.st_size, age=age, is_valid=is_valid))
        return tuple(sorted(entries, key=lambda entry: entry.age))

    def clear(self) -> int:
        """Delete every entry; returns how many there were."""
        files = self._entry_files()
        for path in files:
            path.unlink(missing_ok=True)
        return len(files)

    def _entry_files(self) -> list[Path]:
        return sorted(self.folder.glob("*-*.json")) if self.folder.is_dir() else []

    def _entry_path(self, kind: str, key: str) -> Path:
        return self.folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def installed_versions(packages: Iterable[str] = ("torch", "echelon")) -> dict[str, str]:
    """Versions of Python and of `packages` (default: those that documents depend on), read without importing them."""
    versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "checkout" if name == "echelon" else "missing"
    return versions


def hash_files(paths: Iterable[str | Path]) -> dict[str, str]:
    """Absolute path -> SHA-256; unreadable files are left out."""
    hashes = {str(Path(path).resolve()): _hash_file(Path(path)) for path in paths}
    return {path: digest for path, digest in sorted(hashes.items()) if digest is not None}


def user_source_files(modules: Mapping[str, Any]) -> list[Path]:
    """Source files among loaded `modules` (as sys.modules) that are the user's own: outside Python, site-packages and echelon."""
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots.append(str(Path(__file__).resolve().parents[1]))  # echelon
    libraries = tuple({form + os.sep for root in roots for form in (root, os.path.realpath(root))})

    def is_library(file: str) -> bool:
        return file.startswith(libraries) or "site-packages" in file

    files = set()
    for module in list(modules.values()):
        file = getattr(module, "__file__", None)
        # Thousands of modules are loaded: only those that remain are resolved.
        if isinstance(file, str) and file.endswith(".py") and not is_library(file):
            path = Path(file).resolve()
            if not is_library(str(path)):
                files.add(path)
    return sorted(files)


def _hash_file(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _read_entry(path: Path) -> dict[str, Any] | None:
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    field_types = {"kind": str, "key": str, "versions": dict, "sources": dict, "inputs": dict, "document": str}
    if not isinstance(entry, dict) or any(not isinstance(entry.get(name), kind) for name, kind in field_types.items()):
        return None
    return entry


def _is_valid(
    entry: Mapping[str, Any],
    versions: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> bool:
    """Whether an entry was made with these versions from what is unchanged."""
    if entry["versions"] != dict(versions):
        return False
    if any(_hash_file(Path(path)) != digest for path, digest in entry["sources"].items()):
        return False
    prefixes = ("file ", "folder ") if environment is None else ("file ", "folder ", "environment ", "argument ")
    inputs = {name: digest for name, digest in entry["inputs"].items() if name.startswith(prefixes)}
    return current_digests(inputs, environment or {}, arguments) == inputs
