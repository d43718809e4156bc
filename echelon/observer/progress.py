"""Print progress: a bar on a terminal, a line every ten seconds elsewhere, warnings at once."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from echelon.events import Event
from echelon.observer.eta import ProgressTracker, ideal_rate
from echelon.observer.terminal import StderrConsole, muting_on_error
from echelon.plan import format_units as units

if TYPE_CHECKING:
    from echelon.plan.forecast import Forecast

#: Largest share of the time spent on drawing; a slow terminal is drawn less often.
_DRAWING_SHARE = 1 / 1000
_MIN_INTERVAL, _MAX_INTERVAL = 0.2, 1.0
#: Seconds between lines without a terminal.
_LINE_INTERVAL = 10.0


class Progress:
    def __init__(self, *, forecast: Forecast | None = None, console: Console | None = None) -> None:
        self._console = console or StderrConsole()
        self._forecast = forecast
        self._tracker = ProgressTracker()
        self._epochs: int | None = None
        self._bar: Live | None = None
        self._next_draw = 0.0
        self._latest: Event | None = None
        self._metrics: Mapping[str, Any] = {}

    def __call__(self, event: Event) -> None:
        if self._console.quiet:
            return
        with muting_on_error(self._console):
            self._handle(event)
        if self._console.quiet:
            self._close_bar()

    def _handle(self, event: Event) -> None:
        match event.kind:
            case "step":
                self._tracker.add(event.step, event.data)
                self._latest = event
                if time.perf_counter() >= self._next_draw:
                    self._draw()
            case "start":
                self._start(event.data)
            case "evaluation":
                self._metrics = event.data.get("metrics", {})
                self._print(evaluation_line(event), "green")
            case "checkpoint":
                self._print(checkpoint_line(event), "dim")
            case "verified":
                self._print(str(event.data.get("message", "")), "green")
            case "warning":
                self._print(warning_line(event), "yellow")
            case "end":
                self._end(event)

    def _start(self, data: Mapping[str, Any]) -> None:
        self._epochs, ideal = data.get("epochs"), ideal_rate(self._forecast)
        self._tracker = ProgressTracker(total=data.get("steps"), step=data.get("resumed_from") or 0, ideal_rate=ideal)
        self._latest, self._metrics = None, {}
        self._print(start_line(data), "bold")
        self._next_draw = 0.0 if self._console.is_terminal else time.perf_counter() + _LINE_INTERVAL
        if self._console.is_terminal:
            self._open_bar()

    def _end(self, event: Event) -> None:
        if self._latest is not None:
            self._draw()
        self._close_bar()
        style = "bold green" if event.data.get("reason") == "finished" else "bold yellow"
        self._print(end_line(event, self._tracker, self._latest, self._metrics), style)

    def _draw(self) -> None:
        begin = time.perf_counter()
        assert self._latest is not None
        if self._bar is None:
            self._print("  ".join(_status_texts(self._latest, self._tracker, self._epochs)))
            self._next_draw = begin + _LINE_INTERVAL
            return
        self._update_bar()
        end = time.perf_counter()
        self._next_draw = end + min(max((end - begin) / _DRAWING_SHARE, _MIN_INTERVAL), _MAX_INTERVAL)

    def _update_bar(self) -> None:
        if self._bar is not None and self._latest is not None:
            status = _status_texts(self._latest, self._tracker, self._epochs)
            self._bar.update(_Bar(self._tracker, *status), refresh=True)

    def _open_bar(self) -> None:
        # No drawing thread, which would compete with the training; only a terminal's stdout is printed above the bar.
        options: Any = {"auto_refresh": False, "redirect_stdout": sys.stdout.isatty()}
        self._bar = Live(_Bar(self._tracker, "", "first step ..."), console=self._console, **options)
        self._bar.start()
        atexit.register(self._close_bar)  # without an end event the cursor must not stay hidden

    def _close_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            atexit.unregister(self._close_bar)
            with muting_on_error(self._console):
                bar.stop()

    def _print(self, line: str, style: str = "") -> None:
        self._update_bar()  # printing redraws the bar
        self._console.print(Text(line, style=style), soft_wrap=True)


class _Bar:
    """Epoch, bar and figures in one line. rich's Progress lays out a table each time, at six times the cost."""

    def __init__(self, tracker: ProgressTracker, epoch: str, status: str) -> None:
        self._tracker, self._epoch, self._status = tracker, epoch, status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - len(self._epoch) - len(self._status) - 4
        yield Segment(self._epoch, Style(bold=True))
        if room >= 5:
            total, step = self._tracker.total, self._tracker.step
            yield Segment("  ")
            yield ProgressBar(total=total, completed=step, width=room, pulse=total is None)
            yield Segment(" ")
        yield Segment(f" {self._status}")


class WarningPrinter:
    """Prints warnings only: on ranks other than 0, and with `--quiet`."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or StderrConsole()

    def __call__(self, event: Event) -> None:
        if event.kind == "warning":
            with muting_on_error(self._console):
                self._console.print(Text(warning_line(event), style="yellow"), soft_wrap=True)


def start_line(data: Mapping[str, Any]) -> str:
    ranks = data.get("ranks", 1)
    parts = [f"{data.get('job', 'job')}: {data.get('plan', '')}".rstrip(": "), f"{ranks} rank{'s' * (ranks != 1)}"]
    if data.get("device"):
        parts[-1] += f" on {data['device']}"
    if data.get("parameters"):
        parts.append(f"{units.format_count(data['parameters'])} parameters")
    if data.get("samples"):
        parts.append(f"{units.format_count(data['samples'])} samples")
    if data.get("batch"):
        parts.append(f"batch {data['batch']:,}")
    if data.get("steps"):
        parts.append(f"{data['steps']:,} steps")
    if data.get("resumed_from"):
        parts.append(f"resumed after step {data['resumed_from']:,}")
    return ", ".join(parts)


def evaluation_line(event: Event) -> str:
    data = event.data
    metrics = _format_metrics(data.get("metrics", {}))
    facts = [f"{units.format_count(data['samples'])} samples"] if data.get("samples") else []
    facts += [units.format_seconds(data["seconds"])] if data.get("seconds") is not None else []
    return f"evaluation at step {event.step:,}: {metrics or 'no metrics'}{_in_brackets(facts)}"


def checkpoint_line(event: Event) -> str:
    data = event.data
    facts = [units.format_bytes(data["bytes"])] if data.get("bytes") else []
    facts += [units.format_seconds(data["seconds"])] if data.get("seconds") is not None else []
    facts += ["best so far"] if data.get("best") else []
    return f"checkpoint {data.get('path', '')}{_in_brackets(facts)}"


def warning_line(event: Event) -> str:
    return f"warning (rank {event.rank}): {event.data.get('message', '')}"


def end_line(event: Event, tracker: ProgressTracker, latest: Event | None, metrics: Mapping[str, Any]) -> str:
    """How the run ended, with the loss of its last step and the last evaluation."""
    data = event.data
    reason, message = data.get("reason", "ended"), data.get("message")
    if reason == "finished" and latest is None and message:
        return str(message)  # nothing was left to train
    parts = [f"{reason} after step {tracker.step:,}"]
    if data.get("seconds") is not None:
        parts.append(units.format_seconds(data["seconds"]))
    if latest is not None:
        parts.append(f"loss of the last step {units.format_number(latest.data.get('loss'))}")
    if metrics:
        parts.append(f"last evaluation ({_format_metrics(metrics)})")
    if tracker.rate is not None:
        parts.append(units.format_rate(tracker.rate))
    line = ", ".join(parts)
    # The error itself is printed once, by the caller that catches it.
    return f"{line}: {message}" if message and reason != "failed" else line


def _format_metrics(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {units.format_number(value)}" for name, value in metrics.items())


def _in_brackets(facts: list[str]) -> str:
    return f" ({', '.join(facts)})" if facts else ""


def _status_texts(event: Event, tracker: ProgressTracker, epochs: int | None) -> tuple[str, str]:
    epoch = event.data.get("epoch", 0) + 1
    parts = [f"{tracker.step:,}/{tracker.total:,}" if tracker.total else f"{tracker.step:,}"]
    if tracker.loss is not None:
        parts.append(f"loss {units.format_number(tracker.loss)}")
    if tracker.rate is not None:
        parts.append(units.format_rate(tracker.rate))
    if tracker.efficiency is not None:
        parts.append(f"efficiency {units.format_percent(tracker.efficiency)} of forecast")
    if tracker.seconds_left is not None:
        parts.append(f"{units.format_clock(tracker.seconds_left)} left")
    return f"epoch {epoch}/{epochs}" if epochs else f"epoch {epoch}", "  ".join(parts)
