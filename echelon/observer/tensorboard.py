"""TensorBoard: loss, learning rate, gradient norm, samples/s and evaluation metrics, in `tensorboard/` of the run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.events import Event
from echelon.observer.stderr import write_stderr

#: Seconds between points. One point costs about 0.1 ms, and TensorBoard shows a thousand per curve at most.
_INTERVAL = 0.5


class TensorBoardWriter:
    """Writes scalars. tensorboard is imported at the first point, after the first step: nobody waits for it to start."""

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
            self._next_write, self._pending = now + _INTERVAL, None
            self._add_scalars(event, _step_scalars(event.data))
        elif event.kind == "evaluation":
            self._add_pending()
            self._add_scalars(
                event, {f"evaluation/{name}": value for name, value in event.data.get("metrics", {}).items()}
            )
            self._flush()
        elif event.kind == "checkpoint":
            self._flush()
        elif event.kind == "end":
            self._add_pending()
            self.close()

    def close(self) -> None:
        """Write what is pending and close the file; a later point opens a new one."""
        self._flush()  # closing alone does not tell of what could not be written
        writer, self._writer = self._writer, None
        if writer is not None:
            self._call_guarded(writer.close)

    def _add_pending(self) -> None:
        """The newest step, though its turn has not come: a curve ends where the training does."""
        event, self._pending = self._pending, None
        if event is not None:
            self._add_scalars(event, _step_scalars(event.data))

    def _add_scalars(self, event: Event, scalars: Mapping[str, float | None]) -> None:
        if self._failed or not scalars:
            return
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
                # Points from this step on belong to the part of the run that was undone: tell the reader to drop them.
                restart = SessionLog(status=SessionLog.START)
                self._writer.add_event(Record(wall_time=event.time, step=event.step, session_log=restart))
        values = [Summary.Value(tag=name, simple_value=_to_float(value)) for name, value in scalars.items()]
        # One record for all of them: half the cost of one each.
        self._writer.add_event(Record(wall_time=event.time, step=event.step, summary=Summary(value=values)))

    def _flush(self) -> None:
        if self._writer is not None:
            self._call_guarded(self._writer.flush)

    def _call_guarded(self, call: Any, *arguments: Any) -> None:
        """A picture that cannot be written does not stop a training; it is told once."""
        try:
            call(*arguments)
        except (OSError, ImportError) as error:
            if not self._failed:
                write_stderr(f"no TensorBoard for this run, or not all of it: {self._folder}: {error}")
            self._failed, self._writer = True, None


def _step_scalars(data: Mapping[str, Any]) -> dict[str, float | None]:
    scalars = {"train/loss": data["loss"], "train/learning_rate": data["rate"]}
    if data.get("norm") is not None:
        scalars["train/gradient_norm"] = data["norm"]
    if data["seconds"] > 0:
        scalars["train/samples_per_second"] = data["samples"] / data["seconds"]
    return scalars


def _to_float(value: float | None) -> float:
    return float("nan") if value is None else float(value)
