"""The event log: `events.jsonl` in the run folder, one line per event, readable while it grows and after any death.

Each line reaches the kernel before the log takes the next event, so that `kill -9` costs at most the line being written (and
the steps of the last fifth of a second, which wait in the relay; a resumed run does those again). Ranks other than 0 write
a file of their own (`events-3.jsonl`), and only when something went wrong there: appends of several machines to one file on
a network disk would tear each other's lines.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from echelon.errors import EchelonError
from echelon.events import Event
from echelon.observer.stderr import write_stderr

#: Allowing no NaN makes the fast C encoder refuse what `Event.to_line` must replace; that walk costs more than the rest.
_encode = json.JSONEncoder(allow_nan=False).encode

#: What a resumed run does again.
_REPEATED_KINDS = frozenset({"step", "evaluation", "checkpoint"})


def log_path(folder: str | Path, rank: int = 0) -> Path:
    """Where `rank` writes its events."""
    return Path(folder) / ("events.jsonl" if rank == 0 else f"events-{rank}.jsonl")


class EventLog:
    """Writes events to the run folder. A disk that refuses is told once; the training goes on."""

    def __init__(self, folder: str | Path, *, rank: int = 0) -> None:
        self._path = log_path(folder, rank)
        self._is_rank_zero = rank == 0
        self._file: int | None = None
        self._has_torn_line = False  # the file ends in the middle of a line
        self._has_complained = False

    def __call__(self, event: Event) -> None:
        if not self._is_rank_zero and not _is_warning_or_failure(event):
            return
        line = (_encode_event(event) + "\n").encode()
        try:
            if self._file is None:
                self._open()
            if self._has_torn_line:
                line = b"\n" + line
            assert self._file is not None
            self._has_torn_line = os.write(self._file, line) != len(line)
        except OSError as error:
            self._has_torn_line = True
            self._report_once(error)
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

    def _report_once(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            write_stderr(
                f"{self._path} cannot be written ({error.strerror}): the training goes on, its log and report will have gaps; free "
                "some space or make the folder writable"
            )


def read_events(folder: str | Path) -> list[Event]:
    """What happened in the run, in order, each step once: of a step that was run again after a resume, the last run counts.

    A line that was cut short (by `kill -9`, by a full disk) is skipped.
    """
    folder = Path(folder)
    path = log_path(folder)
    if not path.is_file():
        problem = "no such folder" if not folder.is_dir() else f"no {path.name} in it"
        raise EchelonError(
            f"{folder}: {problem}, so it is not the folder of a run; give the folder that `echelon train` made (runs/NAME)"
        )
    other_paths = sorted(folder.glob("events-*.jsonl"))
    streams = [_drop_repeats(_read_file(path)), *(list(_read_file(other_path)) for other_path in other_paths)]
    return list(heapq.merge(*streams, key=lambda event: event.time))


def _encode_event(event: Event) -> str:
    """The same as `event.to_line()`, at a third of the cost where every number is finite: this runs once a step."""
    try:
        return _encode(
            {"kind": event.kind, "step": event.step, "rank": event.rank, "time": round(event.time, 3), **event.data}
        )
    except ValueError:
        return event.to_line()


def _is_warning_or_failure(event: Event) -> bool:
    return event.kind == "warning" or (event.kind == "end" and event.data.get("reason") == "failed")


def _read_file(path: Path) -> Iterator[Event]:
    with path.open("rb") as lines:
        for line in lines:
            try:
                yield Event.from_line(line.decode())
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # cut short


def _drop_repeats(events: Iterable[Event]) -> list[Event]:
    """Without what later lines did again.

    The first step after a `start` says where that part of the run began: whatever the parts before it did from that step
    on has been undone. Steps are compared with steps only, so it does not matter whether a checkpoint carries the number
    of the step before it or after it.
    """
    segments: list[list[Event]] = [[]]
    for event in events:
        if event.kind == "start":
            segments.append([])
        segments[-1].append(event)
    kept_events: list[Event] = []
    for segment in segments:
        first_step = next((event.step for event in segment if event.kind == "step"), None)
        if first_step is not None:
            kept_events = _undo_steps(kept_events, first_step)
        kept_events += segment
    return kept_events


def _undo_steps(events: list[Event], first_step: int) -> list[Event]:
    index = next(
        (position for position, event in enumerate(events) if event.kind == "step" and event.step >= first_step),
        len(events),
    )
    return events[:index] + [event for event in events[index:] if event.kind not in _REPEATED_KINDS]
