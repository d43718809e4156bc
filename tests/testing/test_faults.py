"""Stopping a command at a step of its event log."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from echelon.errors import LaunchError
from echelon.events import Event
from echelon.testing.fault_schedule import last_logged_step, run_until_step

# A training in small: a parent with a child in another session, which logs a step every 10 ms.
TRAINING = """
import signal, subprocess, sys, time
from pathlib import Path
from echelon.events import Event
events, steps = Path(sys.argv[1]), int(sys.argv[2])
if len(sys.argv) == 3:
    child = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "child"], start_new_session=True)
    events.with_suffix(".pid").write_text(str(child.pid))
    try:
        sys.exit(child.wait())
    except KeyboardInterrupt:
        child.kill()
        print("interrupted by hand")
        sys.exit(7)
with events.open("a") as log:
    for step in range(1, steps + 1):
        log.write(Event(kind="step", step=step).to_line() + "\\n")
        log.flush()
        time.sleep(0.01)
"""


@pytest.fixture
def training(tmp_path: Path) -> Path:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    return script


ENVIRONMENT = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not psutil.pid_exists(pid)


def test_kill_reaches_processes_in_other_sessions(training: Path, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    stopped = run_until_step(
        [sys.executable, str(training), str(events), "1000"], events=events, step=5, environment=ENVIRONMENT
    )
    assert stopped.exit_code == -signal.SIGKILL
    assert gone(int(events.with_suffix(".pid").read_text()))
    assert 5 <= stopped.step <= last_logged_step(events) < 1000


def test_interrupt_leaves_the_command_time_to_speak(training: Path, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    command = [sys.executable, str(training), str(events), "1000"]
    stopped = run_until_step(command, events=events, step=5, stop_signal=signal.SIGINT, environment=ENVIRONMENT)
    assert stopped.exit_code == 7
    assert "interrupted by hand" in stopped.output


def test_a_line_that_was_cut_short_is_not_counted(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    assert last_logged_step(events) == 0
    whole = [Event(kind="step", step=step).to_line() for step in (1, 2, 3)]
    events.write_text(f"{whole[0]}\n{whole[2][:9]}\n{whole[1]}\n{whole[2][:-1]}")
    assert last_logged_step(events) == 2


def test_a_command_that_ends_before_the_step_is_an_error(training: Path, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    with pytest.raises(LaunchError, match="ended with 0 before step 50"):
        run_until_step(
            [sys.executable, str(training), str(events), "3"], events=events, step=50, environment=ENVIRONMENT
        )
