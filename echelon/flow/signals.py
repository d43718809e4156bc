"""Ctrl-C, SIGTERM and a closed terminal request a stop after the current step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from echelon.launchers.local import stop_signals


@contextmanager
def stop_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, the first signal of each kind calls `stop`; a second one ends the process as usual."""
    previous_handlers: dict[int, Any] = {}

    def handle_signal(signal_number: int, _: FrameType | None) -> None:
        stop()
        signal.signal(signal_number, previous_handlers[signal_number])

    set_handler: Callable[..., Any] = signal.signal
    with suppress(ValueError):  # not the main thread, which alone may set handlers
        for signal_number in stop_signals():
            previous_handlers[signal_number] = set_handler(signal_number, handle_signal)
    try:
        yield
    finally:
        for restored_signal, handler in previous_handlers.items():
            set_handler(restored_signal, handler)
