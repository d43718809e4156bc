"""Standard error as the place that people look at, which may go away: `| head`, a closed terminal, a full disk."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console


class StderrConsole(Console):
    """A console whose end is not the training's: rich ends the process where the reader of a pipe has gone."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        silence_console(self)


@contextlib.contextmanager
def muting_on_error(console: Console) -> Iterator[None]:
    """Show what can be shown; a screen that refuses is left alone from then on."""
    try:
        yield
    except OSError:
        silence_console(console)


def silence_console(console: Console) -> None:
    """Print nothing more there. Standard error itself leads nowhere then: Python would stumble over it when it ends."""
    console.quiet = True
    with contextlib.suppress(OSError, ValueError):
        if console.file.fileno() == sys.stderr.fileno():
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stderr.fileno())
            os.close(devnull)
