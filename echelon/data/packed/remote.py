"""Packed files on a remote store (anything that fsspec reads), through the cache. A read that stalls ends with a message."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from echelon.data.packed import blocks
from echelon.data.packed import manifest as documents
from echelon.data.packed.cache import Cache, CacheFullError, Held
from echelon.data.packed.manifest import Column, Manifest
from echelon.data.packed.rows import File, LocalRows, Rows, damage, files_of, wrong
from echelon.errors import DataError

_PIECE = 2**20
#: Where nobody says what is needed next: after so many batches without it a file is let go.
_STALE = 64
#: Files that are copied at the same time, and so many threads.
_COMING = 8

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
        self._connect = url_to_fs
        try:
            self._system()
        except (ImportError, ValueError) as error:
            raise DataError(f"{url} cannot be reached: {error}") from None

    def _system(self) -> tuple[Any, str]:
        """The store and the folder's path on it. fsspec remembers the connection, and makes a new one in a forked process."""
        system, folder = self._connect(self.url)
        return system, str(folder)

    def manifest(self) -> Manifest:
        """What the folder holds."""
        where = f"{self.url}/{documents.NAME}"

        def get(told: Callable[[int], None]) -> bytes:
            system, folder = self._system()
            content: bytes = system.cat_file(f"{folder}/{documents.NAME}")
            return content

        return documents.read(self._guarded(where, get), where)

    def copy(self, name: str, path: Path) -> None:
        """A file of the folder into `path`, which is there."""
        # Opened here and now: a read that is given up and comes to life later must find no other file under this name.
        target = path.open("r+b")

        def get(told: Callable[[int], None]) -> None:
            system, folder = self._system()
            with target, system.open(f"{folder}/{name}", "rb") as source:
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
    """Files on stores; each is copied to the cache, whole, before its rows are read.

    Copies are made by threads: those that a batch needs at the same time, those that `expect` names ahead of their batch. A copy is
    checked before it gets its name, and each block again when this process first touches it: one that was damaged since is made anew.
    """

    def __init__(
        self, files: Sequence[tuple[Store, File]], columns: Sequence[Column], cache: Cache, *, patience: float
    ) -> None:
        self._files, self._columns, self._cache, self._patience = list(files), list(columns), cache, patience
        self._ends = np.cumsum([file.shard.samples for _, file in files])
        self._open: dict[int, tuple[LocalRows, Held, int]] = {}
        self._coming: dict[int, Future[None]] = {}
        self._due: dict[int, int] = {}  # the last batch, of those that `expect` knows, that needs a file
        self._told = self._turn = 0
        self._process = os.getpid()

    def expect(self, ids: np.ndarray) -> None:
        """One batch more that is read later. Its files begin to come, as far as the cache has room, and are in nobody's way."""
        self._told += 1
        for number in np.unique(self._ends.searchsorted(ids, "right")).tolist():
            self._due[number] = self._told
            if number not in self._open:
                self._begin(number)

    def _begin(self, number: int) -> None:
        """Copy a file in a thread, unless it comes already or too many do."""
        if number in self._coming or sum(not copy.done() for copy in self._coming.copy().values()) >= _COMING:
            return
        self._coming[number] = _started(lambda: self._held(number).release())

    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        if self._process != os.getpid():  # the threads that copy did not come along
            self._coming, self._process = {}, os.getpid()
        shard = self._ends.searchsorted(ids, "right")
        needed = np.unique(shard).tolist()
        self._turn += 1
        self._let_go(needed)
        absent = [number for number in needed if number not in self._open]
        for number in absent if len(absent) > 1 else ():
            self._begin(number)
        parts = []
        for number in needed:
            places = np.flatnonzero(shard == number)
            first = int(self._ends[number]) - self._files[number][1].shard.samples
            parts.append((places, self._taken(number, ids[places] - first, needed)))
        return [
            _joined(len(ids), [(places, part[column]) for places, part in parts], pin)
            for column in range(len(self._columns))
        ]

    def lengths(self, column: int) -> np.ndarray:
        return np.concatenate([self._rows(number, [number]).lengths(column) for number in range(len(self._files))])

    def only(self, numbers: Sequence[int]) -> RemoteRows:
        """Some of the files, and no others."""
        return RemoteRows([self._files[n] for n in numbers], self._columns, self._cache, patience=self._patience)

    def problem(self, number: int) -> str | None:
        """Why a file cannot be had, if it cannot."""
        try:
            self._rows(number, [number])
        except DataError as error:
            return str(error)
        return None

    def _taken(self, number: int, ids: np.ndarray, needed: Sequence[int]) -> list[Any]:
        try:
            return self._rows(number, needed).take(ids)
        except DataError:
            if number not in self._open:
                raise
        self._discard(number)  # the copy was good once: another one will be
        return self._rows(number, needed).take(ids)

    def _rows(self, number: int, needed: Sequence[int]) -> LocalRows:
        known = self._open.get(number)
        if known is None:
            rows, held = self._opened(number, needed)
        else:
            rows, held, _ = known
        self._open[number] = rows, held, self._turn
        self._coming.pop(number, None)
        return rows

    def _opened(self, number: int, needed: Sequence[int]) -> tuple[LocalRows, Held]:
        file = self._files[number][1]
        held = self._arrived(number, needed)
        if wrong(replace(file, path=held.path)) is not None:  # cut off since it was copied
            held.release()
            held.path.unlink(missing_ok=True)
            held = self._arrived(number, needed)
        return LocalRows([replace(file, path=held.path)], self._columns), held

    def _arrived(self, number: int, needed: Sequence[int]) -> Held:
        coming = self._coming.pop(number, None)
        try:
            failed = None if coming is None else coming.exception()
            if failed is not None and number not in self._due:  # else it was tried long ago, and is tried again
                raise failed
            return self._held(number)
        except CacheFullError:
            for each in [each for each in self._open if each not in needed]:
                self._release(each)  # what this process keeps for later must not stand in its own way
            return self._held(number, self._patience)

    def _held(self, number: int, patience: float = 0) -> Held:
        store, file = self._files[number]

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

        return self._cache.hold(self._key(number), file.shard.bytes, fill, patience=patience)

    def _key(self, number: int) -> str:
        store, file = self._files[number]
        return f"{hashlib.blake2b(f'{store.url}/{file.shard}'.encode(), digest_size=12).hexdigest()}.arrow"

    def _let_go(self, needed: Sequence[int]) -> None:
        """Of files that no later batch is known to need: the ranks of a machine wait for each other, and for room in the cache."""
        for number in [
            number
            for number, (_, _, last) in self._open.items()
            if number not in needed and self._due.get(number, last + _STALE) < self._turn
        ]:
            self._release(number)

    def _release(self, number: int) -> None:
        self._open.pop(number)[1].release()

    def _discard(self, number: int) -> None:
        """Take a damaged copy away, also from under others, who can go on reading what they have mapped."""
        held = self._open.pop(number)[1]
        held.path.unlink(missing_ok=True)
        held.release()


def far_rows(stores: Sequence[Store], manifests: Sequence[Manifest], cache: Cache, patience: float) -> RemoteRows:
    """The rows of whole data sets on stores, one behind the other."""
    owners = [store for store, manifest in zip(stores, manifests, strict=True) for _ in manifest.shards]
    files = files_of([Path(store.url) for store in stores], manifests)
    return RemoteRows(list(zip(owners, files, strict=True)), manifests[0].columns, cache, patience=patience)


def _started(work: Callable[[], None]) -> Future[None]:
    """`work` in a thread that does not keep the process from ending."""
    made: Future[None] = Future()

    def run() -> None:
        try:
            work()
            made.set_result(None)
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, daemon=True, name="echelon-ahead").start()
    return made


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
