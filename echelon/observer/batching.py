"""Hands events on to the listeners, steps in handfuls.

Between two steps the processor's caches fill with the model, so the same code costs about 100 µs where it is called once per step
and 15 µs where it runs over a handful of steps in a row (both measured; `docs/report.md`). Anything that is not a step is
handed on at once, after the steps before it.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence

from echelon.events import Event, Listener

#: A step is handed on at most this late (seconds); slower steps than this go straight through.
_MAX_DELAY = 0.2
#: More than this many never wait, whatever the clock does.
_MAX_WAITING = 500


class EventBatcher:
    """One listener that stands for several."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = tuple(listeners)
        self._waiting: list[Event] = []
        self._flush_time = 0.0

    def __call__(self, event: Event) -> None:
        self._waiting.append(event)
        if event.kind == "step" and event.time < self._flush_time and len(self._waiting) < _MAX_WAITING:
            return
        self._flush_time = event.time + _MAX_DELAY
        self.flush()
        if event.kind == "start":
            atexit.register(self.flush)  # an end that nobody tells of
        elif event.kind == "end":
            atexit.unregister(self.flush)

    def flush(self) -> None:
        """Give the listeners everything that waits."""
        waiting, self._waiting = self._waiting, []
        for listener in self.listeners:
            for event in waiting:
                listener(event)
