"""What becomes of events: a log, a progress bar, TensorBoard, and a report when the run is over.

from echelon.observer import observers, write_report

listeners = observers("runs/digits", world=world)     # the engine calls each with every event
write_report("runs/digits")                           # runs/digits/report.html
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from echelon.observer.batching import Relay
from echelon.observer.event_log import Log, read_events
from echelon.observer.progress import Progress, Warnings
from echelon.observer.report.write import write_report
from echelon.observer.tensorboard import Board

if TYPE_CHECKING:
    from echelon.events import Listener
    from echelon.plan.forecast import Forecast
    from echelon.world import World

__all__ = ["observers", "read_events", "write_report"]


def observers(
    folder: str | Path | None, *, world: World, quiet: bool = False, forecast: Forecast | None = None
) -> list[Listener]:
    """The listeners of this rank. Rank 0 speaks, logs and draws; the others only tell what goes wrong.

    `folder=None` keeps nothing on disk. `forecast` is what parallel efficiency is held against.
    """
    listeners: list[Listener] = [Log(folder, rank=world.rank)] if folder is not None else []
    if not world.main:
        return [Relay([*listeners, Warnings()])]
    if folder is not None:
        listeners.append(Board(folder))
    listeners.append(Warnings() if quiet else Progress(forecast=forecast))
    return [Relay(listeners)]
