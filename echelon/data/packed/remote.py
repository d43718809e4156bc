"""Packed files on a remote store (anything that fsspec reads), through the cache. A read that stalls ends with a message."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from echelon.data.packed import blocks
from echelon.data.packed import manifest as documents
from echelon.data.packed.cache import Cache, Held
from echelon.data.packed.manifest import Column, Manifest
from echelon.data.packed.rows import File, LocalRows, Rows, damage, wrong
from echelon.errors import DataError

_PIECE = 2**20
#: After so many batches without it, a file is let go: its place in the cache may be needed.
_STALE = 64

_T = TypeVar("_T")


def is_url(folder: Any) -> bool:
    """Whether it is an address of a store, as s3://bucket/folder."""
    return isinstance(folder, str) and "://" in folder


class Store:
    """A folder on a remote store. `timeout`: seconds without a byte after which a read is given up."""

    def __init__(self, url: str, timeout: float) -> None:
        try:
            from fsspec.core import url_to_fs
        except ModuleNotFoundError:
            raise DataError(f"{url}: remote data needs fsspec: pip install 'echelon[remote]'") from None
        self.url, self._timeout = url.rstrip("/"), timeout
        try:
            self._system, self._folder = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise DataError(f"{url} cannot be reached: {error}") from None

    def manifest(self) -> Manifest:
        """What the folder holds."""
        where = f"{self.url}/{documents.NAME}"

        def get(told: Callable[[int], None]) -> bytes:
            content: bytes = self._system.cat_file(f"{self._folder}/{documents.NAME}")
            return content

        return documents.read(self._guarded(where, get), where)

    def copy(self, name: str, path: Path) -> None:
        """A file of the folder into `path`."""

        def get(told: Callable[[int], None]) -> None:
            with self._system.open(f"{self._folder}/{name}", "rb") as source, path.open("r+b") as target:
                target.truncate(0)
                while piece := source.read(_PIECE):
                    target.write(piece)
                    told(len(piece))

        self._guarded(f"{self.url}/{name}", get)

    def _guarded(self, where: str, get: Callable[[Callable[[int], None]], _T]) -> _T:
        """`get` in a thread of its own: one that never comes back is left behind."""
        moved, done = threading.Event(), threading.Event()
        answer: list[Any] = []
        count = 0

        def told(size: int) -> None:
            nonlocal count
            count += size
            moved.set()

        def run() -> None:
            try:
                answer.append((get(told), None))
            except BaseException as error:
                answer.append((None, error))
            done.set()
            moved.set()

        threading.Thread(target=run, daemon=True, name="echelon-remote").start()
        while not done.is_set():
            moved.clear()
            if not done.is_set() and not moved.wait(self._timeout):
                raise DataError(
                    f"{where}: no byte came for {self._timeout:g} s (after {count:,}); try again, or give timeout= more"
                )
        value, error = answer[0]
        if error is not None:
            raise DataError(f"{where} cannot be read: {type(error).__name__}: {error}") from None
        found: _T = value
        return found


class RemoteRows(Rows):
    """Files on stores; each is copied to the cache when it is first needed, whole, and checked there once."""

    def __init__(
        self, files: Sequence[tuple[Store, File]], columns: Sequence[Column], cache: Cache, *, patience: float
    ) -> None:
        self._files, self._columns, self._cache, self._patience = list(files), list(columns), cache, patience
        self._ends = np.cumsum([file.shard.samples for _, file in files])
        self._open: OrderedDict[int, tuple[LocalRows, Held, int]] = OrderedDict()
        self._turn = 0

    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        shard = self._ends.searchsorted(ids, "right")
        needed = np.unique(shard).tolist()
        self._turn += 1
        for number in [number for number, (_, _, last) in self._open.items() if self._turn - last > _STALE]:
            self._release(number)
        parts = []
        for number in needed:
            places = np.flatnonzero(shard == number)
            rows = self._rows(number, needed)
            first = int(self._ends[number]) - self._files[number][1].shard.samples
            parts.append((places, rows.take(ids[places] - first)))
        return [
            _joined(len(ids), [(places, part[column]) for places, part in parts], pin)
            for column in range(len(self._columns))
        ]

    def lengths(self, column: int) -> np.ndarray:
        return np.concatenate([self._rows(number, [number]).lengths(column) for number in range(len(self._files))])

    def _rows(self, number: int, needed: Sequence[int]) -> LocalRows:
        known = self._open.pop(number, None)
        if known is None:
            rows, held = self._fetched(number, needed)
        else:
            rows, held, _ = known
        self._open[number] = rows, held, self._turn
        return rows

    def _fetched(self, number: int, needed: Sequence[int]) -> tuple[LocalRows, Held]:
        store, file = self._files[number]
        key = f"{hashlib.blake2b(f'{store.url}/{file.shard}'.encode(), digest_size=12).hexdigest()}.arrow"

        def fill(path: Path) -> None:
            store.copy(file.shard.file, path)
            here = replace(file, path=path)
            problem = wrong(here)
            if problem is None:
                content = np.memmap(path, np.uint8, "r")
                every = (damage(content, self._columns, here, block) for block in range(len(file.shard.checksums)))
                problem = next((each for each in every if each), None)
                if problem is None and blocks.frame(content, self._columns, file.shard) != file.shard.frame:
                    problem = f"{path}: Arrow's own part of it is damaged"
            if problem:
                raise DataError(problem.replace(str(path), f"{store.url}/{file.shard.file}"))

        try:
            held = self._cache.hold(key, file.shard.bytes, fill)
        except DataError:
            idle = [each for each in self._open if each not in needed]
            if not idle:
                held = self._cache.hold(key, file.shard.bytes, fill, patience=self._patience)
            else:  # what this process keeps for later must not stand in its own way
                for each in idle:
                    self._release(each)
                held = self._cache.hold(key, file.shard.bytes, fill, patience=self._patience)
        return LocalRows([replace(file, path=held.path)], self._columns, check=False), held

    def _release(self, number: int) -> None:
        self._open.pop(number)[1].release()


def _joined(count: int, parts: Sequence[tuple[np.ndarray, Any]], pin: bool) -> Any:
    """One column of rows that came from several files."""
    first = parts[0][1]
    if isinstance(first, Tensor):
        made = torch.empty((count, *first.shape[1:]), dtype=first.dtype, pin_memory=pin)
        for places, part in parts:
            made[torch.from_numpy(places)] = part
        return made
    rows: list[Any] = [None] * count
    for places, part in parts:
        for place, row in zip(places.tolist(), part, strict=True):
            rows[place] = row
    return rows
