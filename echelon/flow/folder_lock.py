"""One training per run folder: two at once would overwrite each other's checkpoints and mix their events."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from echelon.errors import EchelonError, FileLockError
from echelon.files import acquire_lock, describe_holders
from echelon.flow.run_folder import unwritable_error


def lock_run_folder(folder: Path) -> AbstractContextManager[object]:
    """Lock the run's folder, creating it if needed; an error while another training has it."""
    path = folder / "run.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return acquire_lock(path)
    except FileLockError:
        return nullcontext()  # a file system without locks: another training cannot be detected
    except TimeoutError:
        raise EchelonError(
            f"{folder}: another training uses this folder ({describe_holders(path)}); wait for it, end it, or give another folder: --out FOLDER"
        ) from None
    except OSError as error:
        raise unwritable_error(folder, error) from error
