"""A folder of copies of remote files, of bounded size, shared by the processes of a machine.

A copy is made under another name by whoever holds its lock, and renamed when it is whole and safe on the disk. Whoever reads a copy
holds a shared lock on it, so that nobody else deletes it meanwhile. Locks are the kernel's: they go with the process, however it
ends, and what a killed process left half written is never taken for a copy.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.errors import DataError
from echelon.plan.units import size as in_words


class CacheFullError(DataError):
    """The cache is full of copies that are in use."""


class Held:
    """A copy that stays until it is let go."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    def release(self) -> None:
        """From now on the copy may be deleted; where it is mapped, it can be read all the same."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __del__(self) -> None:
        self.release()


class Cache:
    """Copies in `folder`, of `limit` bytes together."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True)

    def hold(self, key: str, size: int, fill: Callable[[Path], None], *, patience: float = 0) -> Held:
        """The copy `key` of `size` bytes. Where there is none, `fill(path)` writes it; an error of it leaves no copy.

        `patience`: seconds to wait for others to let go of their copies where these fill the cache.
        """
        while True:
            held = self._taken(key)
            if held is not None:
                return held
            with _locked(self.folder / f"{key}.lock"):
                if (self.folder / key).exists():
                    continue
                part = self.folder / f".{key}.part"
                self._reserve(part, size, patience)
                try:
                    fill(part)
                    with part.open("rb") as file:
                        os.fsync(file.fileno())
                    part.replace(self.folder / key)
                finally:
                    part.unlink(missing_ok=True)

    def _taken(self, key: str) -> Held | None:
        path = self.folder / key
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not os.fstat(lock).st_nlink:  # deleted between the two calls
            os.close(lock)
            return None
        os.utime(path)
        return Held(path, lock)

    def _reserve(self, part: Path, size: int, patience: float) -> None:
        """Make room for `size` bytes, and take it at once, so that two who fill do not both count on it."""
        if size > self.limit:
            raise DataError(
                f"{self.folder}: a cache of {in_words(self.limit)} cannot hold one file of {in_words(size)}: give it more"
            )
        until = time.monotonic() + patience
        while True:
            with _locked(self.folder / "room.lock"):
                part.unlink(missing_ok=True)
                if self._room(size):
                    part.touch()
                    os.truncate(part, size)
                    return
            if time.monotonic() > until:
                raise CacheFullError(
                    f"{self.folder}: all {in_words(self.limit)} of the cache are in use, {in_words(size)} more are needed: give it more "
                    "(cache_bytes=), or shuffle fewer files at a time (window=)"
                )
            time.sleep(0.05)

    def _room(self, size: int) -> bool:
        """Delete what was not used for longest and is not in use, until `size` more bytes fit."""
        found = []
        for path in self.folder.iterdir():
            if path.suffix != ".lock":
                try:
                    state = path.stat()
                except FileNotFoundError:
                    continue  # a filler gave up
                found.append((state.st_mtime_ns, state.st_size, path))
        total = sum(each[1] for each in found)
        for _, freed, path in sorted(found, key=lambda each: each[0]):
            if total + size <= self.limit:
                break
            if self._deleted(path):
                total -= freed
        return total + size <= self.limit

    def _deleted(self, path: Path) -> bool:
        """Whether nobody used it; then it is gone."""
        guard = self.folder / f"{path.name[1:-5]}.lock" if path.name.startswith(".") else path
        try:
            lock = os.open(guard, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            return True
        except BlockingIOError:
            return False
        finally:
            _unlock(lock)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        _unlock(lock)


def _unlock(lock: int) -> None:
    """Said, not left to the closing: a process that was forked meanwhile has the same lock open, and would keep it."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
