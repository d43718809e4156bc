"""Packed files on remote stores: each is copied to the cache before its rows are read."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from echelon.data.packed import block_layout
from echelon.data.packed.manifest import RESTORE, Column, Manifest
from echelon.data.packed.remote_cache import Cache, Held
from echelon.data.packed.remote_store import Store
from echelon.data.packed.row_reader import File, LocalRows, Rows, damage, files_of, lengths_of, wrong
from echelon.errors import CacheFullError, DamagedError, LostError

#: A file that no batch to come is known to need stays mapped for so many batches: to open it again costs as much as thirty gathers.
_STALE = 64
#: Files that are copied at the same time, and so many threads.
_COMING = 8


class RemoteRows(Rows):
    """Files on stores; each is copied to the cache, whole, before its rows are read.

    Copies are made by threads: those that a batch needs at the same time, those that `expect` names ahead of their batch. A copy is
    checked before it gets its name, and each block again when this process first touches it: one that was damaged since is made anew.

    Between two batches only copies that a later batch is known to need are held, and only by the rows that the process read last: a
    process that does something else, as evaluating or waiting for its workers, must not keep room from those who read.
    """

    #: The rows that this process read last; in a forked process, those of its parent until it reads.
    _last: ClassVar[weakref.ref[RemoteRows] | None] = None

    def __init__(
        self, files: Sequence[tuple[Store, File]], columns: Sequence[Column], cache: Cache, *, patience: float
    ) -> None:
        self._files, self._columns, self._cache, self._patience = list(files), list(columns), cache, patience
        self._ends = np.cumsum([file.shard.samples for _, file in files])
        self._begin_anew()

    def _begin_anew(self) -> None:
        """As it is before anything is read, and in a process that was just forked: threads and locks did not come along."""
        self._process, self._lock = os.getpid(), threading.Lock()
        self._open: dict[int, tuple[LocalRows, Held, int]] = {}  # with the batch that used it last
        self._coming: dict[int, Future[None]] = {}
        self._told: deque[tuple[int, np.ndarray]] = deque()  # batches to come, counted
        self._due: dict[int, int] = {}  # the last batch of those that `expect` was told of that needs a file
        self._count = self._now = self._turn = 0

    def expect(self, ids: np.ndarray) -> None:
        """One batch more that is read later. Its files begin to come, as far as the cache has room, and are in nobody's way."""
        self._count += 1
        self._told.append((self._count, ids))
        for number in np.unique(self._ends.searchsorted(ids, "right")).tolist():
            self._due[number] = self._count
            if number not in self._open:
                self._begin(number)

    def _begin(self, number: int) -> None:
        """Copy a file in a thread, unless it comes already or too many do."""
        if number in self._coming or sum(not copy.done() for copy in self._coming.copy().values()) >= _COMING:
            return
        self._coming[number] = _started(lambda: self._held(number).release())

    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        shard = self._ends.searchsorted(ids, "right")
        needed = np.unique(shard).tolist()
        with self._reading():
            self._find(ids)
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
        def one(place: tuple[Store, File]) -> np.ndarray:
            store, file = place
            read = store.parts(file.shard.file, block_layout.offset_spans(self._columns, file.shard))
            parts = [np.frombuffer(part, np.uint8) for part in read]
            whole = [len(part) for part in read] == [8 * (file.shard.samples + 1)] * len(read)
            found = lengths_of(parts, self._columns, column, file) if whole else None
            if found is None:
                raise LostError(f"{store.shown}/{file.shard.file}: its offsets are damaged; {RESTORE}")
            return found

        with ThreadPoolExecutor(_COMING, thread_name_prefix="echelon-lengths") as threads:
            return np.concatenate(list(threads.map(one, self._files)))

    def only(self, numbers: Sequence[int]) -> RemoteRows:
        """Some of the files, and no others."""
        return RemoteRows([self._files[n] for n in numbers], self._columns, self._cache, patience=self._patience)

    def problem(self, number: int) -> str | None:
        """Why a file is lost, if it is. One that cannot be had just now, for want of room or time, is an error."""
        try:
            with self._reading():
                self._rows(number, [number])
        except LostError as error:
            return str(error)
        return None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """One thread reads at a time; at the end only what is due stays held."""
        if self._process != os.getpid():
            self._begin_anew()
        last = None if RemoteRows._last is None else RemoteRows._last()
        if last is not None and last is not self:
            last._rest()
        RemoteRows._last = weakref.ref(self)
        with self._lock:
            self._turn += 1
            try:
                yield
            finally:
                for number, (_, held, used) in list(self._open.items()):
                    if self._due.get(number, 0) <= self._now:
                        if held.deleted or used + _STALE < self._turn:
                            self._open.pop(number)[1].release()
                        else:
                            held.rest()

    def _rest(self) -> None:
        """Hold nothing until the next batch, unless one is being read just now.

        Not in a forked process that has not read them itself: the locks are its parent's too, which may be reading.
        """
        if self._process == os.getpid() and self._lock.acquire(blocking=False):
            for _, held, _ in self._open.values():
                held.rest()
            self._lock.release()

    def _find(self, ids: np.ndarray) -> None:
        """Which of the batches that were told of this one is; those before it were given up."""
        for place, (count, told) in enumerate(tuple(self._told)):
            if np.array_equal(told, ids):
                self._now = count
                for _ in range(place + 1):
                    self._told.popleft()
                return

    def _taken(self, number: int, ids: np.ndarray, needed: Sequence[int]) -> list[Any]:
        try:
            return self._rows(number, needed).take(ids)
        except DamagedError:
            pass
        # The copy was good once: another one will be. It goes from under others too, who can go on reading what they have mapped.
        held = self._open.pop(number)[1]
        held.path.unlink(missing_ok=True)
        held.release()
        return self._rows(number, needed).take(ids)

    def _rows(self, number: int, needed: Sequence[int]) -> LocalRows:
        known = self._open.pop(number, None)
        if known is not None and known[1].again():
            rows, held, _ = known
        else:
            rows, held = self._opened(number, needed)
        self._open[number] = rows, held, self._turn
        self._coming.pop(number, None)
        return rows

    def _opened(self, number: int, needed: Sequence[int]) -> tuple[LocalRows, Held]:
        file = self._files[number][1]
        held = self._arrived(number, needed)
        if wrong(replace(file, path=held.path)) is not None:  # cut off since it was copied
            held.path.unlink(missing_ok=True)
            held.release()
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
                self._open.pop(each)[1].release()  # what this process keeps for later must not stand in its own way
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
                if problem is None and block_layout.frame(content, self._columns, file.shard) != file.shard.frame:
                    problem = f"{path}: Arrow's own part of it is damaged"
            if problem:
                raise LostError(problem.replace(str(path), f"{store.shown}/{file.shard.file}"))

        key = f"{store.url}/{file.shard}"
        return self._cache.hold(key, file.shard.bytes, fill, patience=patience, timeout=2 * self._patience)


def far_rows(stores: Sequence[Store], manifests: Sequence[Manifest], cache: Cache, patience: float) -> RemoteRows:
    """The rows of whole data sets on stores, one behind the other."""
    owners = [store for store, manifest in zip(stores, manifests, strict=True) for _ in manifest.shards]
    files = files_of([Path(store.shown) for store in stores], manifests)
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
