"""Files that survive crashes and concurrent processes: atomic writes, and locks that end with their process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from echelon.errors import FileLockError

_POLL_SECONDS = 0.01
_UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Write `path` through a new binary file that replaces it once every byte is on disk; on an error `path` stays as it was.

    A process that is killed may leave `.NAME.*.partial` next to it.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb+") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` (text as UTF-8): after a crash it has the complete old content or the new."""
    with atomic_writer(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Make files created, renamed or deleted in `folder` survive a power cut, if its file system can sync folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def acquire_lock(
    path: Path, *, timeout: float = 0.0, heartbeat: Callable[[], object] = lambda: None
) -> AbstractContextManager[object]:
    """Lock the file `path` exclusively; leaving the returned context releases it, and so does the end of the process.

    The file names its last holder in JSON. Raises TimeoutError, which names the holder, after `timeout` seconds in which
    `heartbeat()` has not changed, and FileLockError where the file system has no locks.
    """
    import filelock

    # A soft lock would outlive a process that is killed.
    lock = filelock.FileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=_write_holder)
    last_heartbeat, deadline = heartbeat(), time.monotonic() + timeout
    while True:
        try:
            return lock.acquire(blocking=False)
        except filelock.Timeout:
            if (current := heartbeat()) != last_heartbeat:
                last_heartbeat, deadline = current, time.monotonic() + timeout
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{path} is locked by {describe_holders(path)}") from None
        except OSError as error:
            raise _explain_failure(error, path) from None
        time.sleep(_POLL_SECONDS)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file if no other process holds a lock that excludes this one; `shared` locks exclude exclusive ones only.

    filelock has no shared locks that the kernel releases with the process.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _explain_failure(error, Path(os.readlink(f"/proc/self/fd/{descriptor}"))) from None
    return True


def release_lock(descriptor: int) -> None:
    """Unlock and close an open file. Closing alone would leave the lock to processes forked meanwhile."""
    with suppress(OSError):  # where the file system has no locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _explain_failure(error: OSError, path: Path) -> Exception:
    if error.errno not in _UNSUPPORTED:
        return error
    reason = f"{error.strerror}; its file system has no locks (Lustre without flock, some of FUSE)"
    return FileLockError(f"{path} cannot be locked: {reason}: use another folder")


def _write_holder(descriptor: int) -> None:
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def describe_holders(path: Path) -> str:
    """The processes that hold a lock on `path`: those of this machine that the kernel lists, else the one that the file names."""
    pids: set[str] = set()
    with suppress(OSError):
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
        inode = f":{path.stat().st_ino}"
        pids = {lock[4] for lock in locks if lock[1] == "FLOCK" and lock[5].endswith(inode)}
    if pids:
        return f"process {', '.join(sorted(pids))} on {socket.gethostname()}"
    with suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(path.read_bytes())
        return f"process {int(holder['pid'])} on {holder['host']}"
    return "another process"
