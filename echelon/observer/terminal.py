"""Print on a stderr that may fail: `| head`, a closed terminal, a full disk."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console


def write_stderr(message: str) -> None:
    """Print one line. A closed stderr must not end a training."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"echelon: {message}\n")


class StderrConsole(Console):
    """A console that goes quiet where rich would end the process: when the reader of a pipe is gone."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        silence_console(self)


@contextlib.contextmanager
def muting_on_error(console: Console) -> Iterator[None]:
    """Silence `console` once printing to it fails."""
    try:
        yield
    except OSError:
        silence_console(console)


def silence_console(console: Console) -> None:
    """Print nothing more. stderr itself is redirected to /dev/null: Python would fail to flush it at exit."""
    console.quiet = True
    with contextlib.suppress(OSError, ValueError):
        if console.file.fileno() == sys.stderr.fileno():
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stderr.fileno())
            os.close(devnull)
