"""The event log: `events.jsonl` in the run folder, one line per event, readable while it grows and after a crash.

Each line reaches the kernel before the next event is taken, so `kill -9` loses at most the line being written and the steps of
the last 0.2 s, which wait in `EventBatcher` and are repeated by a resumed run. Other ranks write a file of their own
(`events-3.jsonl`) and only warnings and failures: concurrent appends to one file on a network disk would tear lines.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from echelon.errors import EchelonError
from echelon.events import Event
from echelon.observer.terminal import write_stderr

#: What a resumed run repeats.
_REPEATED_KINDS = frozenset({"step", "evaluation", "checkpoint"})


def log_path(folder: str | Path, rank: int = 0) -> Path:
    return Path(folder) / ("events.jsonl" if rank == 0 else f"events-{rank}.jsonl")


class EventLog:
    """Writes events to the run folder. A disk error is reported once and does not stop the training."""

    def __init__(self, folder: str | Path, *, rank: int = 0) -> None:
        self._path = log_path(folder, rank)
        self._logs_all = rank == 0
        self._file: int | None = None
        self._has_torn_line = False  # the file ends in the middle of a line
        self._has_complained = False

    def __call__(self, event: Event) -> None:
        is_failure = event.kind == "end" and event.data.get("reason") == "failed"
        if not (self._logs_all or event.kind == "warning" or is_failure):
            return
        line = (event.to_line() + "\n").encode()
        try:
            if self._file is None:
                self._open()
            if self._has_torn_line:
                line = b"\n" + line
            assert self._file is not None
            self._has_torn_line = os.write(self._file, line) != len(line)
        except OSError as error:
            self._has_torn_line = True
            if not self._has_complained:
                self._has_complained = True
                write_stderr(
                    f"{self._path} cannot be written ({error.strerror}): the training continues, but its log and report will have gaps; "
                    "free some space or make the folder writable"
                )
        if event.kind == "end":
            self.close()

    def close(self) -> None:
        """Close the file; the next event opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        self._has_torn_line = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"


def read_events(folder: str | Path) -> list[Event]:
    """The events of a run in order, each step once: of a step repeated after a resume, the last run counts.

    Lines that were cut short (`kill -9`, a full disk) are skipped.
    """
    folder = Path(folder)
    path = log_path(folder)
    if not path.is_file():
        problem = "no such folder" if not folder.is_dir() else f"no {path.name} in it"
        raise EchelonError(f"{folder}: {problem}: expected a run folder, which `echelon train` creates (runs/NAME)")
    streams = [_drop_repeats(_read_file(path)), *map(_read_file, sorted(folder.glob("events-*.jsonl")))]
    return list(heapq.merge(*streams, key=lambda event: event.time))


def _read_file(path: Path) -> Iterator[Event]:
    with path.open("rb") as lines:
        for line in lines:
            try:
                yield Event.from_line(line.decode())
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # cut short


def _drop_repeats(events: Iterable[Event]) -> list[Event]:
    """Drop what a later part of the run repeated.

    The first step after a `start` shows where that part began: what earlier parts did from that step on has been undone. Only
    steps are compared, so it does not matter whether a checkpoint carries the number of the step before or after it.
    """
    segments: list[list[Event]] = [[]]
    for event in events:
        if event.kind == "start":
            segments.append([])
        segments[-1].append(event)
    history: list[Event] = []
    for segment in segments:
        first_step = next((event.step for event in segment if event.kind == "step"), math.inf)
        undone = (index for index, event in enumerate(history) if event.kind == "step" and event.step >= first_step)
        cut = next(undone, len(history))
        history[cut:] = [event for event in history[cut:] if event.kind not in _REPEATED_KINDS]
        history += segment
    return history
