"""A folder of work that is half done: those who use it hold it together, and the last who is done with it takes it away."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from echelon.files import release_lock, try_lock


class SharedTempDir:
    """The folder; it is made when it is first held."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, -1

    def acquire(self) -> None:
        """Nobody takes it away from now on."""
        while self._lock < 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._try_lock(shared=True)

    def remove_if_unused(self) -> None:
        """Take it away, unless another holds it."""
        if self._lock >= 0:
            release_lock(self._lock)
            self._lock = -1
        lock = self._try_lock(shared=False)
        if lock >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            release_lock(lock)

    def _try_lock(self, *, shared: bool) -> int:
        """Its lock, if nobody else has it; -1: another has, or the folder is gone."""
        path = self._folder / ".lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return -1
        try:
            # One may have been taken away, and made anew, between the two calls.
            if try_lock(lock, shared=shared) and path.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        except FileNotFoundError:
            pass
        release_lock(lock)
        return -1
