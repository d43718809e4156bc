"""Ctrl-C, SIGTERM and a closed terminal as a request: stop after the step under way."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from echelon.launchers.local import stop_signals


@contextmanager
def stop_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """While it lasts, the first of a kind of signal calls `stop`; a second one ends the process as usual."""
    previous_handlers: dict[int, Any] = {}

    def handle_signal(signal_number: int, _: FrameType | None) -> None:
        stop()
        signal.signal(signal_number, previous_handlers[signal_number])

    set_handler: Callable[..., Any] = signal.signal
    try:
        for signal_number in stop_signals():
            previous_handlers[signal_number] = set_handler(signal_number, handle_signal)
    except ValueError:
        pass  # not the main thread: whoever owns it decides
    try:
        yield
    finally:
        for restored_signal, handler in previous_handlers.items():
            set_handler(restored_signal, handler)
