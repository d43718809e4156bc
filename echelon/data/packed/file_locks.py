"""Locks of the kernel on files: they go with the process that has them, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from echelon.errors import DataError

#: Seconds between two looks at a lock that another has.
_LOOK = 0.01


@contextmanager
def locked(path: Path, *, patience: float = 60.0, sign: Callable[[], object] | None = None) -> Iterator[None]:
    """With the lock. One that waits for `patience` seconds, in which `sign()` (of life of the holder) stays the same, gives up.

    Where no sign is given, it is another holder, or a file that comes or goes beside the lock.
    """
    sign = sign or (lambda: (holders(path), path.parent.stat().st_mtime_ns))
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        seen, until = sign(), time.monotonic() + patience
        while not taken(lock) or deleted(lock):
            if deleted(lock):  # who comes later would make another
                old, lock = lock, os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                unlock(old)
                continue
            now = sign()
            if now != seen:
                seen, until = now, time.monotonic() + patience
            if time.monotonic() > until:
                raise DataError(
                    f"{path}: {holders(path)} has held this lock for {patience:g} s and did nothing: let it go on if it is stopped, "
                    "or end it"
                )
            time.sleep(_LOOK)
        yield
    finally:
        unlock(lock)


def taken(lock: int, *, shared: bool = False) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        where = os.readlink(f"/proc/self/fd/{lock}")
        raise DataError(
            f"{where} cannot be locked: {error.strerror}; its file system has no locks (Lustre without flock, some of FUSE): use "
            "another folder"
        ) from None
    return True


def deleted(lock: int) -> bool:
    """Whether the file of a lock is gone: then it keeps out nobody who comes later."""
    return os.fstat(lock).st_nlink == 0


def unlock(lock: int) -> None:
    """Said, not left to the closing: a process that was forked meanwhile has the same lock open, and would keep it."""
    with suppress(OSError):  # where there are no locks, `taken` has said so
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def holders(path: Path) -> str:
    """Who has a file's lock, in words."""
    try:
        inode, known = path.stat().st_ino, Path("/proc/locks").read_text()
    except OSError:
        return "another process"
    lines = (line.split() for line in known.splitlines() if "->" not in line)
    found = sorted({words[4] for words in lines if words[1] == "FLOCK" and words[5].endswith(f":{inode}")})
    return f"process {', '.join(found)}" if found else "another process"
