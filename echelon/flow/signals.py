"""Ctrl-C, SIGTERM and a closed terminal as a request: stop after the step under way."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from echelon.launchers.local import requests


@contextmanager
def asking(stop: Callable[[], None]) -> Iterator[None]:
    """While it lasts, the first of a kind of signal calls `stop`; a second one ends the process as usual."""
    before: dict[int, Any] = {}

    def ask(number: int, _: FrameType | None) -> None:
        stop()
        signal.signal(number, before[number])

    usual: Callable[..., Any] = signal.signal
    try:
        for number in requests():
            before[number] = usual(number, ask)
    except ValueError:
        pass  # not the main thread: whoever owns it decides
    try:
        yield
    finally:
        for saved, handler in before.items():
            usual(saved, handler)
