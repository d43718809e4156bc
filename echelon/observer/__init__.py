"""Turn the events of a training into a log, a progress bar, TensorBoard scalars and a report.

from echelon.observer import observers, write_report

listeners = observers("runs/digits", world=world)     # the engine calls each with every event
write_report("runs/digits")                           # runs/digits/report.html
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from echelon.observer.batching import EventBatcher
from echelon.observer.event_log import EventLog, read_events
from echelon.observer.progress import Progress, WarningPrinter
from echelon.observer.report.write import write_report
from echelon.observer.tensorboard import TensorBoardWriter

if TYPE_CHECKING:
    from echelon.events import Listener
    from echelon.plan.forecast import Forecast
    from echelon.world import World

__all__ = ["observers", "read_events", "write_report"]


def observers(
    folder: str | Path | None, *, world: World, quiet: bool = False, forecast: Forecast | None = None
) -> list[Listener]:
    """The listeners of this rank. Rank 0 prints and logs everything, the others only warnings and failures.

    `folder=None` writes nothing to disk. Parallel efficiency is relative to `forecast`.
    """
    listeners: list[Listener] = [EventLog(folder, rank=world.rank)] if folder is not None else []
    if not world.is_main:
        return [EventBatcher([*listeners, WarningPrinter()])]
    if folder is not None:
        listeners.append(TensorBoardWriter(folder))
    listeners.append(WarningPrinter() if quiet else Progress(forecast=forecast))
    return [EventBatcher(listeners)]
