"""A folder of copies of remote files, of bounded size, shared by the processes of a machine.

The process that holds a copy's lock writes it under another name, and renames it once it is complete and on disk. A process that reads a
copy holds a shared lock on it, so that no other process deletes it. Locks end with their process, and what a killed process left
unfinished is never mistaken for a copy. Files with other names in the folder are not touched.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from echelon.data.packed.locked_tasks import lock_file
from echelon.errors import CacheFullError, DataError
from echelon.files import release_lock, try_lock
from echelon.plan.format_units import format_bytes
from echelon.world import cache_folder

#: Names of copies, finished or not.
_COPY_NAME = re.compile(r"[0-9a-f]{24}\.arrow|\.[0-9a-f]{24}\.arrow\.part")
#: Names of the locks of unfinished copies.
_LOCK_NAME = re.compile(r"[0-9a-f]{24}\.lock")


def default_cache_folder() -> Path:
    return cache_folder() / "data"


class CachedFile:
    """A copy that this process has open. While it is pinned, no process deletes it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock, self._owner_pid = path, lock, os.getpid()

    def unpin(self) -> None:
        """Let others delete it. What is mapped of it can still be read.

        A forked process shares the lock with its parent: this unpins it for both.
        """
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def pin(self) -> bool:
        """Keep others from deleting it; False: it is deleted already."""
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        os.utime(self._lock)
        return not self.is_deleted

    @property
    def is_deleted(self) -> bool:
        """Whether it is deleted; its space is free only once no process has it open."""
        return _is_deleted(self._lock)

    def close(self) -> None:
        if self._lock >= 0:
            if self._owner_pid == os.getpid():
                self.unpin()  # closing does not unlock it while a forked process has it open
            os.close(self._lock)
            self._lock = -1

    def __del__(self) -> None:
        self.close()


class FileCache:
    """Copies in `folder`, of at most `limit` bytes in total."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder}: cannot hold copies: {error.strerror}; give cache= another folder") from None

    def acquire(
        self, key: str, size: int, fill: Callable[[Path], None], *, space_timeout: float = 0, fill_timeout: float = 60
    ) -> CachedFile:
        """Open the copy named `key`, of `size` bytes. If there is none, `fill(path)` writes it; if it raises, there is no copy.

        `fill` overwrites a file of `size` allocated bytes. `space_timeout`: seconds to wait for space while other processes' copies
        fill the cache. `fill_timeout`: seconds to wait for a process that makes this copy without writing to it.
        """
        path = self.folder / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.arrow"
        partial_path = path.with_name(f".{path.name}.part")
        while True:
            with suppress(FileNotFoundError):
                cached_file = CachedFile(path, os.open(path, os.O_RDONLY))
                if cached_file.pin():  # else deleted between the two calls
                    return cached_file
            lock_path = path.with_suffix(".lock")
            with lock_file(lock_path, timeout=fill_timeout, heartbeat=lambda: _modified_ns(partial_path)):
                if path.exists():
                    continue
                self._reserve(partial_path, size, space_timeout)
                try:
                    fill(partial_path)
                    with partial_path.open("rb") as file:
                        os.fsync(file.fileno())
                    # Pinned before it has its name: in a full cache another process would delete it at once.
                    cached_file = CachedFile(path, os.open(partial_path, os.O_RDONLY))
                    cached_file.pin()
                    partial_path.replace(path)
                    return cached_file
                finally:
                    partial_path.unlink(missing_ok=True)

    def _reserve(self, partial_path: Path, size: int, space_timeout: float) -> None:
        """Make space for `size` bytes and allocate it at once, so that two processes do not count on the same space."""
        if size > self.limit:
            problem = f"a cache of {format_bytes(self.limit)} cannot hold a file of {format_bytes(size)}"
            raise DataError(f"{self.folder}: {problem}: increase cache_bytes=")
        deadline = time.monotonic() + space_timeout
        while True:
            with lock_file(self.folder / "room.lock"):
                partial_path.unlink(missing_ok=True)
                fits = self._evict_for(size)
                if fits and self._try_allocate(partial_path, size):
                    return
                free_bytes = shutil.disk_usage(self.folder).free
            if time.monotonic() > deadline:
                problem, remedy = f"all {format_bytes(self.limit)} of the cache are in use", "increase cache_bytes="
                if fits or free_bytes < size:
                    problem = f"its disk has {format_bytes(free_bytes)} left"
                    remedy = "free some, or give cache= another disk"
                problem = f"{self.folder}: {problem}, {format_bytes(size)} more is needed"
                raise CacheFullError(f"{problem}: {remedy}, or shuffle fewer files at a time (window=)")
            time.sleep(0.05)

    def _try_allocate(self, partial_path: Path, size: int) -> bool:
        """Whether the disk has the space: a deleted copy takes up its own until everybody has closed it."""
        try:
            with partial_path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            partial_path.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                return False
            problem = f"cannot hold a copy of {format_bytes(size)}: {error.strerror}"
            raise DataError(f"{self.folder}: {problem}; give cache= another folder") from None
        return True

    def _evict_for(self, size: int) -> bool:
        """Delete the least recently used copies that no process has pinned until `size` more bytes fit into the cache and its disk."""
        copies = self._list_copies()
        total = sum(copy[1] for copy in copies)
        limit = min(self.limit, total + shutil.disk_usage(self.folder).free)
        for _, copy_bytes, path in sorted(copies, key=lambda copy: copy[0]):
            if total + size <= limit:
                break
            if self._try_delete(path):
                total -= copy_bytes
        return total + size <= limit

    def _list_copies(self) -> list[tuple[int, int, Path]]:
        """List when each copy was used last, its size and its path."""
        copies = []
        for path in self.folder.iterdir():
            if _COPY_NAME.fullmatch(path.name):
                with suppress(FileNotFoundError):  # an unfinished copy was abandoned
                    stat = path.stat()
                    copies.append((stat.st_mtime_ns, stat.st_size, path))
        return copies

    def usage(self) -> tuple[int, int]:
        copies = self._list_copies()
        return len(copies), sum(size for _, size, _ in copies)

    def clear(self) -> tuple[int, int]:
        """Delete unused copies and locks; returns how many copies were deleted, and how many are in use."""
        with lock_file(self.folder / "room.lock"):
            deletions = [self._try_delete(path) for _, _, path in self._list_copies()]
            for path in self.folder.iterdir():
                if _LOCK_NAME.fullmatch(path.name):
                    self._try_delete(path)
        return sum(deletions), len(deletions) - sum(deletions)

    def _try_delete(self, path: Path) -> bool:
        """Delete a copy or lock unless it is in use; returns whether it was deleted."""
        is_partial = path.name.startswith(".")
        lock_path = self.folder / f"{path.name[1:25]}.lock" if is_partial else path
        try:
            lock = os.open(lock_path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            is_unused = try_lock(lock) and not _is_deleted(lock)
            if is_unused:
                path.unlink(missing_ok=True)
            return is_unused
        finally:
            release_lock(lock)


def _is_deleted(descriptor: int) -> bool:
    return os.fstat(descriptor).st_nlink == 0


def _modified_ns(partial_path: Path) -> int:
    with suppress(FileNotFoundError):
        return partial_path.stat().st_mtime_ns
    return 0
