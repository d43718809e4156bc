"""Report listener failures on stderr."""

from __future__ import annotations

import contextlib
import sys


def write_stderr(message: str) -> None:
    """Print one line. A closed stderr must not end a training."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"echelon: {message}\n")
