"""Read a run folder back, for the report and other readers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError
from echelon.events import Event
from echelon.observer.event_log import read_events
from echelon.plan.certificate import Certificate
from echelon.plan.cluster import Cluster
from echelon.plan.codec import Document
from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The events and documents of a run. In place of a document that cannot be read there is the reason."""

    folder: Path
    events: Sequence[Event]
    events_by_kind: Mapping[str, Sequence[Event]]
    #: The steps that show the speed: all but the first after each start, which is a warm-up.
    warm_steps: Sequence[Event]
    plan: Plan | str
    forecast: Forecast | str
    cluster: Cluster | str
    certificate: Certificate | str
    profile: Profile | str

    def events_of(self, kind: str) -> Sequence[Event]:
        return self.events_by_kind.get(kind, ())

    @property
    def start(self) -> Mapping[str, Any]:
        return self._newest("start")

    @property
    def end(self) -> Event | None:
        """How the newest part of the run ended, by the first rank that did; None: it is running, or was killed."""
        newest_part = itertools.takewhile(lambda event: event.kind != "start", reversed(self.events))
        ends = [event for event in newest_part if event.kind == "end"]
        return ends[-1] if ends else None

    @property
    def duration(self) -> float:
        """Seconds of all parts of the run: as counted by the end event, else from the start to the last event."""
        total = 0.0
        starts = [index for index, event in enumerate(self.events) if event.kind == "start"]
        for begin, stop in itertools.pairwise([*starts, len(self.events)]):
            segment = self.events[begin:stop]
            counted = next((read_number(event, "seconds") for event in segment if event.kind == "end"), None)
            total += counted or max(segment[-1].time - segment[0].time, 0.0)
        return total

    @property
    def median_step_time(self) -> float | None:
        times = [event.data["seconds"] for event in self.warm_steps]
        return statistics.median(times) if times else None

    @property
    def rate(self) -> float | None:
        """Samples per second of training, without evaluations and checkpoints."""
        spent = sum(event.data["seconds"] for event in self.warm_steps)
        return sum(read_number(event, "samples") or 0 for event in self.warm_steps) / spent if spent else None

    @property
    def memory(self) -> Mapping[str, Any]:
        return self._newest("memory")

    def _newest(self, kind: str) -> Mapping[str, Any]:
        events = self.events_of(kind)
        return events[-1].data if events else {}

    def series(self, kind: str, *path: str) -> list[tuple[float, float]]:
        """(step, value) of the number at `path` in the events of one kind, where it is a number."""
        values = ((event.step, read_number(event, *path)) for event in self.events_of(kind))
        return [(float(step), value) for step, value in values if value is not None]


def read_run(folder: str | Path) -> RunRecord:
    """Read a run folder. Only the event log is required."""
    folder = Path(folder)
    events = read_events(folder)
    events_by_kind: dict[str, list[Event]] = {}
    for event in events:
        events_by_kind.setdefault(event.kind, []).append(event)
    return RunRecord(
        folder=folder, events=events, events_by_kind=events_by_kind, warm_steps=_warm_steps(events),
        plan=_read_document(Plan, folder, "the plan was not saved"),
        forecast=_read_document(Forecast, folder, "this run was not forecast"),
        cluster=_read_document(Cluster, folder, "the machine was not measured"),
        certificate=_read_document(Certificate, folder, "this run carries no proof; echelon verify makes one"),
        profile=_read_document(Profile, folder, "the model was not profiled"),
    )  # fmt: skip


def read_number(event: Event, *path: str) -> float | None:
    """The number at `path` in the event's data; None: there is none (NaN is written as null)."""
    value: Any = event.data
    for name in path:
        value = value.get(name) if type(value) is dict else None
    return float(value) if type(value) is float or type(value) is int else None


def _warm_steps(events: Sequence[Event]) -> list[Event]:
    relevant = [event for event in events if event.kind in ("start", "step")]
    pairs = itertools.pairwise(relevant)
    return [step for last, step in pairs if last.kind == step.kind == "step" and read_number(step, "seconds")]


def _read_document(kind: type[Document], folder: Path, reason_absent: str) -> Any:
    path = folder / f"{kind.KIND}.json"
    if not path.exists():
        return f"No {path.name} in the folder: {reason_absent}."
    try:
        return kind.load(path)
    except EchelonError as error:
        return f"{path.name} cannot be read: {error}."
