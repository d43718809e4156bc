"""A folder of intermediate files that several processes share; the last one that is done with it deletes it."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from echelon.files import acquire_lock, release_lock, try_lock


class SharedTempDir:
    """The folder; `acquire` creates it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock_path, self._lock = folder, folder / ".lock", -1

    def acquire(self) -> None:
        """Keep every process from deleting the folder."""
        while self._lock < 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # deleted between the two calls
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o644)
                if try_lock(lock, shared=True) and os.fstat(lock).st_nlink:
                    self._lock = lock
                    return
                release_lock(lock)
            time.sleep(0.01)

    def remove_if_unused(self) -> None:
        """Delete the folder unless another process has acquired it."""
        if self._lock >= 0:
            release_lock(self._lock)
            self._lock = -1
        with suppress(TimeoutError, FileNotFoundError), acquire_lock(self._lock_path):
            shutil.rmtree(self._folder, ignore_errors=True)
