"""Write loss, learning rate, gradient norm, samples/s and evaluation metrics to `tensorboard/` of the run folder."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.events import Event
from echelon.observer.terminal import write_stderr

#: Seconds between points. A point costs about 0.1 ms, and TensorBoard shows at most a thousand per curve.
_INTERVAL = 0.5


class TensorBoardWriter:
    """Writes scalars. Imports tensorboard at the first point, so that training starts without it."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / "tensorboard"
        self._writer: Any = None
        self._next_write = 0.0
        self._pending: Event | None = None
        self._failed = False
        self._opened = False

    def __call__(self, event: Event) -> None:
        if event.kind == "step":
            now = time.perf_counter()
            if now < self._next_write:
                self._pending = event
                return
            self._next_write, self._pending = now + _INTERVAL, event
            self._add_pending()
        elif event.kind == "evaluation":
            self._add_pending()
            metrics = event.data.get("metrics", {})
            self._add_scalars(event, {f"evaluation/{name}": value for name, value in metrics.items()})
            self._flush()
        elif event.kind == "checkpoint":
            self._flush()
        elif event.kind == "end":
            self._add_pending()
            self.close()

    def close(self) -> None:
        """Write what is pending and close the file; a later point opens a new one."""
        self._flush()  # closing alone raises no write error
        writer, self._writer = self._writer, None
        if writer is not None:
            self._call_guarded(writer.close)

    def _add_pending(self) -> None:
        """Write the newest step, so that curves end where the training does."""
        event, self._pending = self._pending, None
        if event is not None:
            self._add_scalars(event, _step_scalars(event.data))

    def _add_scalars(self, event: Event, scalars: Mapping[str, float | None]) -> None:
        if scalars and not self._failed:
            self._call_guarded(self._write, event, scalars)

    def _write(self, event: Event, scalars: Mapping[str, float | None]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            resumed = not self._opened and any(self._folder.glob("events.out.*"))
            self._writer = EventFileWriter(str(self._folder), flush_secs=10)
            self._opened = True
            if resumed:
                # Points from this step on were undone by the resume: have readers drop them.
                restart = SessionLog(status=SessionLog.START)
                self._writer.add_event(Record(wall_time=event.time, step=event.step, session_log=restart))
        values = {name: math.nan if value is None else value for name, value in scalars.items()}
        # One record for all scalars costs half as much as one each.
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Record(wall_time=event.time, step=event.step, summary=summary))

    def _flush(self) -> None:
        if self._writer is not None:
            self._call_guarded(self._writer.flush)

    def _call_guarded(self, call: Any, *arguments: Any) -> None:
        """Report the first failure; it does not stop the training."""
        try:
            call(*arguments)
        except (OSError, ImportError) as error:
            if not self._failed:
                write_stderr(f"the TensorBoard scalars of this run are incomplete: {self._folder}: {error}")
            self._failed, self._writer = True, None


def _step_scalars(data: Mapping[str, Any]) -> dict[str, float | None]:
    scalars = {"train/loss": data["loss"], "train/learning_rate": data["rate"]}
    if data.get("norm") is not None:
        scalars["train/gradient_norm"] = data["norm"]
    if data["seconds"] > 0:
        scalars["train/samples_per_second"] = data["samples"] / data["seconds"]
    return scalars
