"""The event log survives what happens to runs: kill -9, a resume, a full disk, a rank that fails alone."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.errors import EchelonError
from echelon.events import Event
from echelon.observer import observers, read_events
from echelon.observer.event_log import EventLog, log_path
from echelon.world import World

from .runs import start, step, training


def write(folder: Path, *events: Event, rank: int = 0) -> None:
    log = EventLog(folder, rank=rank)
    for event in events:
        log(event)
    log.close()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    events = list(training(last=60, total=60))
    write(tmp_path, *events)
    read = read_events(tmp_path)
    assert [(event.kind, event.step, event.data) for event in read] == [(e.kind, e.step, e.data) for e in events]


@pytest.mark.parametrize("loss", [0.25, float("nan"), float("inf"), None])
def test_what_is_no_number_is_written_as_null(loss: float | None) -> None:
    event = step(3, loss=loss, metrics={"a": loss})
    expected = loss if loss is None or math.isfinite(loss) else None
    data = Event.from_line(event.to_line()).data
    assert (data["loss"], data["metrics"], data["samples"]) == (expected, {"a": expected}, event.data["samples"])


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_last_line_cut_short_costs_only_itself(tmp_path: Path, cut: int) -> None:
    write(tmp_path, start(total=9), step(1), step(2))
    path = log_path(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    # Without its newline alone the line is whole.
    assert [event.step for event in read_events(tmp_path)] == ([0, 1, 2] if cut == 1 else [0, 1])
    write(tmp_path, start(total=9, resumed_from=2), step(3))
    kept = [event.step for event in read_events(tmp_path) if event.kind == "step"]
    assert kept == ([1, 2, 3] if cut == 1 else [1, 3])


def test_every_event_before_a_kill_is_there(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal\n"
        "from echelon.observer.event_log import EventLog\n"
        "from echelon.events import Event\n"
        "log = EventLog(sys.argv[1])\n"
        "for n in range(1, 301): log(Event(kind='step', step=n, data={'loss': 1.0}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == -signal.SIGKILL
    assert [event.step for event in read_events(tmp_path)] == list(range(1, 301))


def test_of_steps_run_again_the_last_run_counts(tmp_path: Path) -> None:
    write(tmp_path, *training(last=130, total=200, end=None))
    write(tmp_path, *training(first=101, last=200, total=200))
    events = read_events(tmp_path)
    steps = [event for event in events if event.kind == "step"]
    assert [event.step for event in steps] == list(range(1, 201))
    assert [event.step for event in events if event.kind == "evaluation"] == [50, 100, 150, 200]
    assert sum(event.kind == "start" for event in events) == 2


def test_a_run_that_begins_anew_replaces_the_old_one(tmp_path: Path) -> None:
    write(tmp_path, *training(last=60, total=60, end="failed"))
    write(tmp_path, start(total=60), step(1, loss=7.0))
    events = read_events(tmp_path)
    assert [(event.step, event.data["loss"]) for event in events if event.kind == "step"] == [(1, 7.0)]
    assert not [event for event in events if event.kind == "checkpoint"]


def test_a_resume_that_did_no_step_undoes_nothing(tmp_path: Path) -> None:
    write(tmp_path, *training(last=60, total=99, end="interrupted"))
    write(tmp_path, start(total=99, resumed_from=50))
    assert [event.step for event in read_events(tmp_path) if event.kind == "step"] == list(range(1, 61))


def test_other_ranks_leave_a_file_only_when_something_is_wrong(tmp_path: Path) -> None:
    write(tmp_path, *training(last=3, total=9, end=None))
    quiet, loud = (observers(tmp_path, world=World(rank=rank, size=3, local_size=3)) for rank in (1, 2))
    for event in training(last=3, total=9):
        quiet[0](event), loud[0](event)
    loud[0](Event(kind="warning", step=2, rank=2, data={"message": "slow"}))
    loud[0](Event(kind="end", step=3, rank=2, data={"reason": "failed", "message": "out of memory"}))
    assert not log_path(tmp_path, 1).exists()
    told = [(event.kind, event.rank) for event in read_events(tmp_path) if event.rank]
    assert told == [("warning", 2), ("end", 2)]


def test_a_disk_that_refuses_is_told_once_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    log = EventLog(tmp_path / "run")
    for event in training(last=5, total=5):
        log(event)
    said = capsys.readouterr().err
    assert said.count("cannot be written") == 1
    assert "events.jsonl" in said


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_that_is_no_run(tmp_path: Path, folder: str) -> None:
    with pytest.raises(EchelonError, match=r"expected a run folder, which `echelon train` creates"):
        read_events(tmp_path / folder)
