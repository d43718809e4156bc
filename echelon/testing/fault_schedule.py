"""Faults on a schedule: stop a training at a step, as a crash or a person at the keyboard would."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from echelon.errors import LaunchError
from echelon.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedCommand:
    """How a command that was to be stopped ended. `step` is the last in its event log when the signal was sent."""

    step: int
    exit_code: int
    output: str


def run_until_step(
    command: Sequence[str],
    *,
    events: Path,
    step: int,
    stop_signal: signal.Signals = signal.SIGKILL,
    delay: float = 0.0,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> StoppedCommand:
    """Run `command` until its event log reaches `step`, send the signal `delay` seconds later, and wait for its end.

    SIGKILL goes to every process that the command started, so that none can save anything. Any other signal goes to its process
    group, as Ctrl-C in a terminal does.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile() as output_file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output_file, stderr=output_file, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            last_step = _wait_for_step(process, events, step, deadline)
            if last_step is not None:
                time.sleep(delay)
                _send_signal(process, stop_signal)
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{command[0]} did not end within {timeout:g} s\n{_read_output(output_file)}") from None
        finally:
            if process.poll() is None:
                _send_signal(process, signal.SIGKILL)
                process.wait()
        output = _read_output(output_file)
        if last_step is None:
            raise LaunchError(f"the command ended with {process.returncode} before step {step}\n{output}")
        return StoppedCommand(step=last_step, exit_code=process.returncode, output=output)


def last_logged_step(events: Path) -> int:
    """The largest step number in an event log; 0 while there is none. A line that was cut short is not counted."""
    last_step = 0
    with contextlib.suppress(FileNotFoundError), events.open() as lines:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError):
                event = Event.from_line(line)
                if event.kind == "step":
                    last_step = max(last_step, event.step)
    return last_step


def _wait_for_step(process: subprocess.Popen[bytes], events: Path, step: int, deadline: float) -> int | None:
    while process.poll() is None:
        last_step = last_logged_step(events)
        if last_step >= step:
            return last_step
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, 0)
        time.sleep(0.005)
    return None


def _send_signal(process: subprocess.Popen[bytes], with_signal: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if with_signal is not signal.SIGKILL:
            os.killpg(process.pid, with_signal)
            return
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _read_output(output_file: IO[bytes]) -> str:
    output_file.seek(0)
    return output_file.read().decode(errors="replace")
