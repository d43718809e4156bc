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
_POLL_SECONDS = 0.01


@contextmanager
def hold_lock(
    path: Path, *, timeout: float = 60.0, read_heartbeat: Callable[[], object] | None = None
) -> Iterator[None]:
    """With the lock. One that waits for `timeout` seconds, in which `read_heartbeat()` (of life of the holder) stays the same, gives up.

    Where no sign is given, it is another holder, or a file that comes or goes beside the lock.
    """
    read_heartbeat = read_heartbeat or (lambda: (describe_holders(path), path.parent.stat().st_mtime_ns))
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        last_heartbeat, deadline = read_heartbeat(), time.monotonic() + timeout
        while not try_lock(lock) or is_deleted(lock):
            if is_deleted(lock):  # who comes later would make another
                stale_lock, lock = lock, os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                unlock(stale_lock)
                continue
            heartbeat = read_heartbeat()
            if heartbeat != last_heartbeat:
                last_heartbeat, deadline = heartbeat, time.monotonic() + timeout
            if time.monotonic() > deadline:
                raise DataError(
                    f"{path}: {describe_holders(path)} has held this lock for {timeout:g} s and did nothing: let it go on if it is stopped, "
                    "or end it"
                )
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        unlock(lock)


def try_lock(lock: int, *, shared: bool = False) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        lock_path = os.readlink(f"/proc/self/fd/{lock}")
        raise DataError(
            f"{lock_path} cannot be locked: {error.strerror}; its file system has no locks (Lustre without flock, some of FUSE): use "
            "another folder"
        ) from None
    return True


def is_deleted(lock: int) -> bool:
    """Whether the file of a lock is gone: then it keeps out nobody who comes later."""
    return os.fstat(lock).st_nlink == 0


def unlock(lock: int) -> None:
    """Said, not left to the closing: a process that was forked meanwhile has the same lock open, and would keep it."""
    with suppress(OSError):  # where there are no locks, `try_lock` has said so
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def describe_holders(path: Path) -> str:
    """Who has a file's lock, in words."""
    try:
        inode, lock_table = path.stat().st_ino, Path("/proc/locks").read_text()
    except OSError:
        return "another process"
    lines = (line.split() for line in lock_table.splitlines() if "->" not in line)
    pids = sorted({fields[4] for fields in lines if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}")})
    return f"process {', '.join(pids)}" if pids else "another process"
