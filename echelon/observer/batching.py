"""Pass events on to listeners, steps in batches.

Between two steps the model evicts everything else from the CPU caches: handling a step costs about 100 µs when done once per step
and 15 µs within a batch of steps (measured; `docs/report.md`). Other events are passed on at once, after the steps before them.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence

from echelon.events import Event, Listener

#: Longest delay of a step in seconds; slower steps are passed on at once.
_MAX_DELAY = 0.2
#: Most steps that wait, whatever the clock does.
_MAX_WAITING = 500


class EventBatcher:
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
            atexit.register(self.flush)  # the process may end without an end event
        elif event.kind == "end":
            atexit.unregister(self.flush)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for listener in self.listeners:
            for event in waiting:
                listener(event)
