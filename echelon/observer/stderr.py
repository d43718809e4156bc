"""A listener's own trouble, told to whoever reads standard error."""

from __future__ import annotations

import contextlib
import sys


def write_stderr(message: str) -> None:
    """One line, if anybody can read it; a reader who has gone must not end a training."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"echelon: {message}\n")
