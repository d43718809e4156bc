"""Rows of packed files on remote stores: each file is copied to the cache before its rows are read."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from echelon.data.packed.manifest import RESTORE_SHARD, Manifest
from echelon.data.packed.remote_cache import CachedFile, FileCache
from echelon.data.packed.remote_store import RemoteStore, run_in_thread
from echelon.data.packed.row_reader import LocalRowReader, RowReader
from echelon.data.packed.shard_file import ShardFile, list_shard_files
from echelon.errors import CacheFullError, CorruptDataError, MissingDataError

#: A file that no known batch needs stays mapped for this many batches: opening it again costs as much as thirty gathers.
_UNUSED_BATCHES = 64
#: Files that are copied at the same time, each by a thread.
_MAX_COPIES = 8


class RemoteRowReader(RowReader):
    """Files on stores, each copied to the cache as a whole before its rows are read.

    Threads make the copies: those that a batch needs at the same time, those that `prefetch` announces ahead of their batch. A copy is
    checked before it is renamed to its final name, and each block again when this process first reads it: a damaged copy is replaced.

    Between two batches only copies that an announced batch needs are pinned, and only by the reader that the process used last: a process
    that evaluates, or waits for its workers, must not keep space from processes that read.
    """

    #: The reader that this process used last; in a forked process its parent's, until it reads.
    _last_reader: ClassVar[weakref.ref[RemoteRowReader] | None] = None

    def __init__(self, files: Sequence[tuple[RemoteStore, ShardFile]], cache: FileCache, timeout: float) -> None:
        self._files, self._cache, self._timeout = list(files), cache, timeout
        self._ends = np.cumsum([file.shard.samples for _, file in files])
        self._reset()

    def _reset(self) -> None:
        """Start with nothing read: at first, and in a forked process, which has no threads and must not use its parent's locks."""
        self._owner_pid, self._lock = os.getpid(), threading.Lock()
        self._open_files: dict[int, tuple[LocalRowReader, CachedFile, int]] = {}  # with the read that used it last
        self._pending_copies: dict[int, Future[None]] = {}
        self._expected_batches: deque[tuple[int, np.ndarray]] = deque()  # announced batches, numbered
        self._needed_until: dict[int, int] = {}  # the last announced batch that needs a file
        self._expected_count = self._current_batch = self._read_count = 0

    def prefetch(self, ids: np.ndarray) -> None:
        """Announce one more batch. Copying its files starts as far as the cache has space."""
        self._expected_count += 1
        self._expected_batches.append((self._expected_count, ids))
        for file_index in np.unique(self._ends.searchsorted(ids, "right")).tolist():
            self._needed_until[file_index] = self._expected_count
            if file_index not in self._open_files:
                self._start_copy(file_index)

    def _start_copy(self, file_index: int) -> None:
        """Copy a file in a thread, unless it is being copied or too many are."""
        unfinished = sum(not copy.done() for copy in self._pending_copies.copy().values())
        if file_index not in self._pending_copies and unfinished < _MAX_COPIES:
            self._pending_copies[file_index] = run_in_thread(lambda: self._copy_to_cache(file_index).close())

    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        file_indices = self._ends.searchsorted(ids, "right")
        needed = np.unique(file_indices).tolist()
        with self._exclusive_read():
            self._advance_to(ids)
            absent = [index for index in needed if index not in self._open_files]
            for index in absent if len(absent) > 1 else ():
                self._start_copy(index)
            parts = []
            for file_index in needed:
                positions = np.flatnonzero(file_indices == file_index)
                first_row = int(self._ends[file_index]) - self._files[file_index][1].shard.samples
                parts.append((positions, self._take_rows(file_index, ids[positions] - first_row, needed)))
        all_positions, columns = [part[0] for part in parts], zip(*(part[1] for part in parts), strict=True)
        return [_join_rows(len(ids), all_positions, column_parts, pin) for column_parts in columns]

    def lengths(self, column: int) -> np.ndarray:
        def read_file_lengths(store_and_file: tuple[RemoteStore, ShardFile]) -> np.ndarray:
            store, file = store_and_file
            parts = [np.frombuffer(part, np.uint8) for part in store.read_spans(file.shard.file, file.offset_spans())]
            is_complete = all(len(part) == 8 * (file.shard.samples + 1) for part in parts)
            file_lengths = file.parse_lengths(parts, column) if is_complete else None
            if file_lengths is None:
                raise MissingDataError(f"{store.display_url}/{file.shard.file}: damaged offsets; {RESTORE_SHARD}")
            return file_lengths

        with ThreadPoolExecutor(_MAX_COPIES, thread_name_prefix="echelon-lengths") as threads:
            return np.concatenate(list(threads.map(read_file_lengths, self._files)))

    def select(self, file_indices: Sequence[int]) -> RemoteRowReader:
        return RemoteRowReader([self._files[file_index] for file_index in file_indices], self._cache, self._timeout)

    def find_damage(self) -> Iterator[tuple[int, int, str] | None]:
        """Copy each file to the cache; yield its first sample, the end, and why it is lost, or None if it is not.

        A file that cannot be copied now, for lack of space or time, is an error.
        """
        for file_index, (_, file) in enumerate(self._files):
            try:
                with self._exclusive_read():
                    self._open_rows(file_index, [file_index])
                yield None
            except MissingDataError as error:
                yield file.first_sample, file.end_sample, str(error)

    @contextmanager
    def _exclusive_read(self) -> Iterator[None]:
        """Let one thread read at a time; at the end only what announced batches need stays pinned."""
        if self._owner_pid != os.getpid():
            self._reset()
        last_reader = None if RemoteRowReader._last_reader is None else RemoteRowReader._last_reader()
        if last_reader is not None and last_reader is not self:
            last_reader._unpin_all()
        RemoteRowReader._last_reader = weakref.ref(self)
        with self._lock:
            self._read_count += 1
            try:
                yield
            finally:
                for file_index, (_, cached_file, last_used) in list(self._open_files.items()):
                    if self._needed_until.get(file_index, 0) > self._current_batch:
                        continue
                    if cached_file.is_deleted or last_used + _UNUSED_BATCHES < self._read_count:
                        self._open_files.pop(file_index)[1].close()
                    else:
                        cached_file.unpin()

    def _unpin_all(self) -> None:
        """Pin nothing until the next batch, unless one is being read now.

        Not in a forked process that has not read anything itself: its parent, which shares the locks, may be reading.
        """
        if self._owner_pid == os.getpid() and self._lock.acquire(blocking=False):
            for _, cached_file, _ in self._open_files.values():
                cached_file.unpin()
            self._lock.release()

    def _advance_to(self, ids: np.ndarray) -> None:
        """Find this batch among the announced ones; those before it were abandoned."""
        for position, (count, expected_ids) in enumerate(tuple(self._expected_batches)):
            if np.array_equal(expected_ids, ids):
                self._current_batch = count
                for _ in range(position + 1):
                    self._expected_batches.popleft()
                return

    def _take_rows(self, file_index: int, ids: np.ndarray, needed: Sequence[int]) -> list[Any]:
        try:
            return self._open_rows(file_index, needed).take(ids)
        except CorruptDataError:
            pass
        # The copy was good once: another one will be. Other processes keep reading what they have mapped.
        cached_file = self._open_files.pop(file_index)[1]
        cached_file.path.unlink(missing_ok=True)
        cached_file.close()
        return self._open_rows(file_index, needed).take(ids)

    def _open_rows(self, file_index: int, needed: Sequence[int]) -> LocalRowReader:
        opened = self._open_files.pop(file_index, None)
        if opened is not None and opened[1].pin():
            rows, cached_file, _ = opened
        else:
            rows, cached_file = self._open_file(file_index, needed)
        self._open_files[file_index] = rows, cached_file, self._read_count
        self._pending_copies.pop(file_index, None)
        return rows

    def _open_file(self, file_index: int, needed: Sequence[int]) -> tuple[LocalRowReader, CachedFile]:
        file = self._files[file_index][1]
        cached_file = self._acquire_copy(file_index, needed)
        if replace(file, path=cached_file.path).find_problem() is not None:  # truncated since it was copied
            cached_file.path.unlink(missing_ok=True)
            cached_file.close()
            cached_file = self._acquire_copy(file_index, needed)
        return LocalRowReader([replace(file, path=cached_file.path)]), cached_file

    def _acquire_copy(self, file_index: int, needed: Sequence[int]) -> CachedFile:
        copy = self._pending_copies.pop(file_index, None)
        try:
            copy_error = None if copy is None else copy.exception()
            # A copy that was announced was tried long ago, and is tried again.
            if copy_error is not None and file_index not in self._needed_until:
                raise copy_error
            return self._copy_to_cache(file_index)
        except CacheFullError:
            for unneeded in [index for index in self._open_files if index not in needed]:
                self._open_files.pop(unneeded)[1].close()
            return self._copy_to_cache(file_index, self._timeout)

    def _copy_to_cache(self, file_index: int, space_timeout: float = 0) -> CachedFile:
        store, file = self._files[file_index]

        def fill(path: Path) -> None:
            store.copy_file(file.shard.file, path)
            problem = next(replace(file, path=path).verify(), None)
            if problem is not None:
                raise MissingDataError(problem.replace(str(path), f"{store.display_url}/{file.shard.file}"))

        key = f"{store.url}/{file.shard}"
        timeouts = {"space_timeout": space_timeout, "fill_timeout": 2 * self._timeout}
        return self._cache.acquire(key, file.shard.bytes, fill, **timeouts)


def open_remote_rows(
    stores: Sequence[RemoteStore], manifests: Sequence[Manifest], cache: FileCache, timeout: float
) -> RemoteRowReader:
    file_stores = [store for store, manifest in zip(stores, manifests, strict=True) for _ in manifest.shards]
    files = list_shard_files([Path(store.display_url) for store in stores], manifests)
    return RemoteRowReader(list(zip(file_stores, files, strict=True)), cache, timeout)


def _join_rows(count: int, positions: Sequence[np.ndarray], parts: Sequence[Any], pin: bool) -> Any:
    if isinstance(parts[0], Tensor):
        joined = torch.empty((count, *parts[0].shape[1:]), dtype=parts[0].dtype, pin_memory=pin)
        for part_positions, part in zip(positions, parts, strict=True):
            joined[torch.from_numpy(part_positions)] = part
        return joined
    order = np.argsort(np.concatenate(positions)).tolist()
    rows = [row for part in parts for row in part]
    return [rows[index] for index in order]
