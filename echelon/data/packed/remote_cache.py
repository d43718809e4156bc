"""A folder of copies of remote files, of bounded size, shared by the processes of a machine.

A copy is made under another name by whoever holds its lock, and renamed when it is whole and safe on the disk. Whoever reads a copy
holds a shared lock on it, so that nobody else deletes it meanwhile. Locks are the kernel's: they go with the process, however it
ends, and what a killed process left half written is never taken for a copy. Files of other names in the folder are not touched.
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
from pathlib import Path

from echelon.data.packed.file_locks import deleted, locked, taken, unlock
from echelon.errors import CacheFullError, DataError
from echelon.plan.format_units import size as in_words
from echelon.world import cache_folder

#: The names of copies, finished or not.
_COPY = re.compile(r"[0-9a-f]{24}\.arrow|\.[0-9a-f]{24}\.arrow\.part")
#: The names of the locks of those who make them.
_LOCK = re.compile(r"[0-9a-f]{24}\.lock")


def default_folder() -> Path:
    """Where copies are kept of data that names no folder for them."""
    return cache_folder() / "data"


class Held:
    """A copy that this process has open, and that nobody deletes while it is read."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock, self._process = path, lock, os.getpid()

    def rest(self) -> None:
        """It is not read for now: others may delete it. Where it is mapped, it can be read all the same.

        A forked process has the same lock as its parent: this rests it for both.
        """
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def again(self) -> bool:
        """Read it again; False: it was deleted."""
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        os.utime(self._lock)
        return not self.deleted

    @property
    def deleted(self) -> bool:
        """Whether it has been deleted; its room is free only once nobody has it open."""
        return os.fstat(self._lock).st_nlink == 0

    def release(self) -> None:
        """It is not needed any more."""
        if self._lock >= 0:
            if self._process == os.getpid():
                self.rest()  # said, not left to the closing: a process that was forked meanwhile has it open
            os.close(self._lock)
            self._lock = -1

    def __del__(self) -> None:
        self.release()


class Cache:
    """Copies in `folder`, of `limit` bytes together."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"{folder}: copies cannot be kept there: {error.strerror}; give cache= another folder"
            ) from None

    def hold(
        self, key: str, size: int, fill: Callable[[Path], None], *, patience: float = 0, timeout: float = 60
    ) -> Held:
        """The copy of what `key` names, of `size` bytes. Where there is none, `fill(path)` writes it; an error of it leaves no copy.

        `fill` finds a file of `size` bytes, which are taken from the room that there is, and writes over them. `patience`: seconds to
        wait for others to let go of their copies where these fill the cache. `timeout`: seconds to wait for another who makes this copy and
        does not write.
        """
        path = self.folder / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.arrow"
        part = path.with_name(f".{path.name}.part")
        while True:
            held = _opened(path)
            if held is not None:
                return held
            with locked(path.with_suffix(".lock"), patience=timeout, sign=lambda: _changed(part)):
                if path.exists():
                    continue
                self._reserve(part, size, patience)
                try:
                    fill(part)
                    with part.open("rb") as file:
                        os.fsync(file.fileno())
                    # Held before it has its name: in a cache that is just large enough another process would delete it at once.
                    held = Held(path, os.open(part, os.O_RDONLY))
                    held.again()
                    part.replace(path)
                    return held
                finally:
                    part.unlink(missing_ok=True)

    def _reserve(self, part: Path, size: int, patience: float) -> None:
        """Make room for `size` bytes, and take it at once, so that two who fill do not both count on it."""
        if size > self.limit:
            raise DataError(
                f"{self.folder}: a cache of {in_words(self.limit)} cannot hold one file of {in_words(size)}: give it more"
            )
        until = time.monotonic() + patience
        while True:
            with locked(self.folder / "room.lock"):
                part.unlink(missing_ok=True)
                fits = self._room(size)
                if fits and self._allocated(part, size):
                    return
                left = shutil.disk_usage(self.folder).free
            if time.monotonic() > until:
                disk = fits or left < size
                what = (
                    f"its disk has {in_words(left)} left"
                    if disk
                    else f"all {in_words(self.limit)} of the cache are in use"
                )
                more = "free some, or give cache= another disk" if disk else "give it more (cache_bytes=)"
                raise CacheFullError(
                    f"{self.folder}: {what}, {in_words(size)} more are needed: {more}, or shuffle fewer files at a time (window=)"
                )
            time.sleep(0.05)

    def _allocated(self, part: Path, size: int) -> bool:
        """Whether the disk gave the room: a copy that was deleted takes its own until everybody has closed it."""
        try:
            with part.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            part.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                return False
            raise DataError(
                f"{self.folder}: no copy of {in_words(size)} can be written there: {error.strerror}; give cache= another folder"
            ) from None
        return True

    def _room(self, size: int) -> bool:
        """Delete what was not used for longest and is not in use, until `size` more bytes fit: into the cache, and onto its disk."""
        found = self._copies()
        total = sum(each[1] for each in found)
        limit = min(self.limit, total + shutil.disk_usage(self.folder).free)
        for _, freed, path in sorted(found, key=lambda each: each[0]):
            if total + size <= limit:
                break
            if self._deleted(path):
                total -= freed
        return total + size <= limit

    def _copies(self) -> list[tuple[int, int, Path]]:
        """When each copy was used last, its size and its path."""
        found = []
        for path in self.folder.iterdir():
            if _COPY.fullmatch(path.name):
                try:
                    state = path.stat()
                except FileNotFoundError:
                    continue  # a filler gave up
                found.append((state.st_mtime_ns, state.st_size, path))
        return found

    def kept(self) -> tuple[int, int]:
        """How many copies there are, and their bytes."""
        found = self._copies()
        return len(found), sum(size for _, size, _ in found)

    def clear(self) -> tuple[int, int]:
        """Delete the copies that nobody uses, and the locks of those who made them: how many, and how many are in use."""
        with locked(self.folder / "room.lock"):
            gone = [self._deleted(path) for _, _, path in self._copies()]
            for path in self.folder.iterdir():
                if _LOCK.fullmatch(path.name):
                    self._deleted(path)
        return sum(gone), len(gone) - sum(gone)

    def _deleted(self, path: Path) -> bool:
        """Whether nobody used it; then it is gone."""
        unfinished = path.name.startswith(".")
        guard = self.folder / f"{path.name[1:25]}.lock" if unfinished else path
        try:
            lock = os.open(guard, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            if taken(lock) and not deleted(lock):
                path.unlink(missing_ok=True)
                return True
            return False
        finally:
            unlock(lock)


def _opened(path: Path) -> Held | None:
    try:
        held = Held(path, os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        return None
    return held if held.again() else None  # deleted between the two calls


def _changed(part: Path) -> int:
    """When a copy that is being made was last written to."""
    try:
        return part.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
