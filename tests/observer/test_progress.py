"""What a person sees: rate, time left and efficiency are right, and the line says them."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from echelon.events import Event
from echelon.observer import observers
from echelon.observer.batching import EventBatcher
from echelon.observer.eta import ProgressTracker, ideal_rate
from echelon.observer.progress import Progress, WarningPrinter
from echelon.plan import format_units
from echelon.plan.mesh import Mesh
from echelon.world import World

from .runs import forecast, plan, start, step, training


def paced(
    *, steps: int, total: int = 100, seconds: float = 0.5, samples: int = 64, single: float | None = None
) -> ProgressTracker:
    pace = ProgressTracker(total=total, ideal_rate=single)
    for number in range(1, steps + 1):
        pace.add(number, {"seconds": 9.0 if number == 1 else seconds, "samples": samples, "loss": 2.0})
    return pace


def test_rate_and_time_left_leave_the_first_step_out() -> None:
    pace = paced(steps=20)
    assert pace.rate == pytest.approx(128.0)
    assert pace.seconds_left == pytest.approx(80 * 0.5)
    assert paced(steps=1).rate == pytest.approx(64 / 9)


def test_the_rate_follows_a_change_of_pace() -> None:
    pace = paced(steps=20)
    for number in range(21, 121):
        pace.add(number, {"seconds": 1.0, "samples": 64, "loss": 2.0})
    assert pace.rate == pytest.approx(64.0, rel=0.01)
    assert pace.seconds_left == 0


def test_an_uneven_last_batch_counts_as_what_it_is() -> None:
    pace = ProgressTracker(total=3)
    for number, samples in enumerate((64, 64, 16), start=1):
        pace.add(number, {"seconds": 1e-9, "samples": samples, "loss": 1.0})
    assert pace.rate == pytest.approx(80 / 2e-9)


def test_the_loss_is_a_running_mean_that_leaves_out_what_is_no_number() -> None:
    pace = ProgressTracker()
    for number, loss in enumerate((1.0, 3.0, float("nan"), None), start=1):
        pace.add(number, {"seconds": 0.1, "samples": 1, "loss": loss})
    assert pace.loss == pytest.approx((0.98 * 1 + 3) / 1.98)


def test_efficiency_is_held_against_ranks_that_do_not_wait() -> None:
    alone = ideal_rate(forecast())
    assert alone == pytest.approx(256 / 0.027)  # 31 ms less 4 ms of exchange
    assert paced(steps=9, seconds=0.030, samples=256, single=alone).efficiency == pytest.approx(0.9)
    assert paced(steps=9).efficiency is None
    assert ideal_rate(None) is None
    assert ideal_rate(replace(forecast(), plan=replace(plan(), mesh=Mesh()))) is None


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10_000))  # one second passes between two looks at the clock
    monkeypatch.setattr("echelon.observer.progress.time.perf_counter", lambda: float(next(now)))
    file = io.StringIO()
    progress = Progress(forecast=forecast(), console=Console(file=file, width=60))
    for event in training(last=100, total=100):
        progress(event)
    progress(Event(kind="warning", rank=3, data={"message": "late [red]again[/red]"}))
    lines = file.getvalue().splitlines()
    assert lines[0] == (
        "digits: dp=2 zero=1 micro=64 threads=1, 2 ranks on cpu, 421,642 parameters, 12,800 samples, batch 256, 100 steps"
    )
    status = [line for line in lines if line.startswith("epoch")]
    assert 8 <= len(status) <= 11  # every tenth second, and the last
    pattern = r"epoch 2/2  100/100  loss 1\.\d+  \d,\d{3} samples/s  efficiency \d\d % of forecast  0:00 left"
    assert re.fullmatch(pattern, status[-1])
    assert sum(line.startswith("evaluation at step") for line in lines) == 2
    assert "checkpoint runs/digits/checkpoints/step-00000100 (5.06 MB, 50.0 ms, best so far)" in lines
    last, evaluated = (
        format_units.format_number(value) for value in (step(100).data["loss"], 2 * math.exp(-100 / 110) + 0.08)
    )
    assert any(
        line.startswith(
            f"finished after step 100, 5.00 s, loss of the last step {last}, last evaluation (loss {evaluated}, "
        )
        for line in lines
    )
    assert lines[-1] == "warning (rank 3): late [red]again[/red]"
    assert "\x1b" not in file.getvalue()


def test_a_terminal_gets_a_bar_that_is_drawn_now_and_then() -> None:
    file = io.StringIO()
    progress = Progress(console=Console(file=file, width=110, force_terminal=True))
    for event in training(last=200, total=200):
        progress(event)
    text = file.getvalue()
    assert "━" in text
    assert "200/200" in text
    assert text.count("samples/s") < 30  # not once a step
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is given back
    assert "efficiency" not in text


def test_a_run_without_an_end_has_no_time_left() -> None:
    file = io.StringIO()
    progress = Progress(console=Console(file=file, width=200))
    for event in (start(total=100, steps=None, epochs=None), step(1), step(2)):
        progress(event)
    progress(
        Event(
            kind="end", step=2, data={"reason": "interrupted", "seconds": 70.0, "message": "go on with: echelon train"}
        )
    )
    lines = file.getvalue().splitlines()
    assert re.fullmatch(r"epoch 1  2  loss \S+  \S+ samples/s", lines[1])
    assert lines[2].startswith("interrupted after step 2, 1 min 10 s")
    assert lines[2].endswith(": go on with: echelon train")


def said(*events: Event) -> str:
    file = io.StringIO()
    progress = Progress(console=Console(file=file, width=200))
    for event in events:
        progress(event)
    return file.getvalue()


def test_why_a_training_failed_is_left_to_the_error() -> None:
    end = Event(kind="end", step=1, data={"reason": "failed", "seconds": 1.0, "message": "the disk is full"})
    text = said(start(total=9), step(1), end)
    assert "failed after step 1, 1.00 s" in text
    assert "the disk is full" not in text


def test_a_run_with_nothing_left_to_do_says_only_that() -> None:
    end = Event(
        kind="end", step=9, data={"reason": "finished", "seconds": 1.0, "message": "already finished at step 9"}
    )
    assert said(start(total=9, resumed_from=9), end).splitlines()[1:] == ["already finished at step 9"]


class Gone(io.StringIO):
    """A screen that has gone, and how often somebody wrote to it."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_screen_that_has_gone_is_left_alone(terminal: bool) -> None:
    screen = Gone()
    for made in (Progress, WarningPrinter):
        listener = made(console=Console(file=screen, width=100, force_terminal=terminal))
        before = screen.writes
        for event in training(last=60, total=60):
            listener(event)
        listener(Event(kind="warning", data={"message": "late"}))
        assert screen.writes > before, f"{made.__name__} never met the screen"


def test_a_pipe_that_nobody_reads_does_not_end_the_process() -> None:
    code = (
        "from echelon.observer.progress import Progress, WarningPrinter\n"
        "from tests.observer.runs import training\n"
        "from echelon.events import Event\n"
        "for listener in (Progress(), WarningPrinter()):\n"
        "    for event in training(last=60, total=60): listener(event)\n"
        "    listener(Event(kind='warning', data={'message': 'late'}))\n"
        "print('alive')\n"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=write, text=True
    )
    os.close(write)
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_who_speaks() -> None:
    other = World(rank=1, size=2, local_rank=1, local_size=2)

    def names(folder: str | None, world: World, *, quiet: bool = False) -> list[str]:
        (relay,) = observers(folder, world=world, quiet=quiet)
        assert isinstance(relay, EventBatcher)
        return [type(listener).__name__ for listener in relay.listeners]

    assert names("x", World()) == ["EventLog", "TensorBoardWriter", "Progress"]
    assert names("x", World(), quiet=True) == ["EventLog", "TensorBoardWriter", "WarningPrinter"]
    assert names(None, World()) == ["Progress"]
    assert names("x", other) == ["EventLog", "WarningPrinter"]


def test_steps_are_handed_on_in_handfuls_and_in_order() -> None:
    heard: list[Event] = []
    relay = EventBatcher([heard.append])
    fast = [Event(kind="step", step=number, time=1000 + 0.06 * number) for number in range(1, 12)]
    for event in fast[:3]:
        relay(event)
    assert heard == fast[:1]  # the first at once, the others wait for a fifth of a second
    for event in fast[3:6]:
        relay(event)
    assert heard == fast[:5]
    warning = Event(kind="warning", step=6, time=1000.37)
    relay(warning)
    assert heard == [*fast[:6], warning]
    slow = [Event(kind="step", step=number, time=1000.0 + number) for number in range(7, 10)]
    for count, event in enumerate(slow, start=1):
        relay(event)
        assert heard[-count:] == slow[:count]


def test_a_clock_set_back_holds_nothing_up() -> None:
    heard: list[Event] = []
    relay = EventBatcher([heard.append])
    relay(Event(kind="step", time=1e9))
    for number in range(1000):
        relay(Event(kind="step", step=number, time=5.0))
    assert len(heard) >= 500


def test_quiet_ranks_still_warn() -> None:
    file = io.StringIO()
    listener = WarningPrinter(Console(file=file))
    listener(step(1))
    listener(Event(kind="warning", rank=1, data={"message": "waited 3 s"}))
    assert file.getvalue() == "warning (rank 1): waited 3 s\n"


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (format_units.format_seconds, 0, "0 µs"), (format_units.format_seconds, 4.2e-5, "42.0 µs"), (format_units.format_seconds, 0.0123, "12.3 ms"), (format_units.format_seconds, 4.5, "4.50 s"),
        (format_units.format_seconds, 59.99, "1 min 00 s"), (format_units.format_seconds, 3599.6, "1 h 00 min"), (format_units.format_seconds, 90_000, "1 d 01 h"),
        (format_units.format_clock, 7.4, "0:07"), (format_units.format_clock, 3661, "1:01:01"), (format_units.format_bytes, 999, "999 B"), (format_units.format_bytes, 999_900, "1.00 MB"),
        (format_units.format_bytes, 4.2e9, "4.20 GB"), (format_units.format_count, 1234, "1,234"), (format_units.format_count, 1.5e6, "1.50 million"), (format_units.format_count, 7.25, "7.25"),
        (format_units.format_percent, 0.931, "93 %"), (format_units.format_percent, 0.0421, "4.2 %"), (format_units.format_percent, 0.0003, "0.03 %"), (format_units.format_number, 0.00012345, "0.0001234"),
        (format_units.format_number, 2e-7, "2e-07"), (format_units.format_number, 123456, "123,456"), (format_units.format_number, float("nan"), "not a number"), (format_units.format_number, None, "not a number"),
    ],
)  # fmt: skip
def test_numbers_carry_units(show: format_units.Formatter, value: float, text: str) -> None:
    assert show(value) == text
