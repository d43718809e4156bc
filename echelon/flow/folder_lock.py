"""One training per folder: two at once would write over each other's checkpoints and mix their events."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.errors import EchelonError
from echelon.flow.run_folder import unwritable_error

#: Its content says who holds it; the kernel, which takes it back however a process ends, says whether.
LOCK_FILE = "run.lock"


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Hold the run's folder, which is made; refuse it while another training does."""
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable_error(folder, error) from error
    try:
        _acquire(file, folder)
        yield
    finally:
        os.close(file)


def _acquire(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return  # a disk that knows no locks: nothing can be said
        raise EchelonError(
            f"{folder}: another training is at work there ({_describe_holder(file)}); wait for it, end it, or name another folder: --out FOLDER"
        ) from None
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds without words


def _describe_holder(file: int) -> str:
    try:
        owner = json.loads(os.pread(file, 1000, 0))
        return f"process {int(owner['pid'])} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "which one is not known"
