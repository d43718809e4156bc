"""The lock that guards short changes to a folder of data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from echelon.errors import DataError
from echelon.files import acquire_lock, describe_holders


def lock_file(
    path: Path, *, timeout: float = 60.0, heartbeat: Callable[[], object] | None = None
) -> AbstractContextManager[object]:
    """Lock `path`; an error after `timeout` seconds in which `heartbeat()` has not changed.

    Without `heartbeat`, another holder counts as one, and so does a file that appears in or vanishes from the lock's folder.
    """
    heartbeat = heartbeat or (lambda: (describe_holders(path), path.parent.stat().st_mtime_ns))
    try:
        return acquire_lock(path, timeout=timeout, heartbeat=heartbeat)
    except TimeoutError as error:
        problem = f"{error}, which made no progress for {timeout:g} s"
        raise DataError(f"{problem}: resume it if it is stopped, or end it") from None
