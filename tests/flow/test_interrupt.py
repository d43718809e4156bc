"""Trainings that end otherwise than they should, as a person at a terminal and a program that reads JSON see them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sampling import only_whole, some

ROOT = Path(__file__).parents[2]
JOB = """
import time
import echelon
from tests.flow.jobs import make

def slow(output, batch):
    time.sleep(0.05)
    return (output - batch[-1]).square().mean()

def job():
    return make(name=None, loss=slow, epochs=500)

def early():
    open("reading", "w").close()
    time.sleep(60)

def wrong():
    return make(name=None, loss=lambda output, batch: (output - batch[-1]).square().mean() * float("nan"))

if __name__ == "__main__":
    print(echelon.train(job, "dp=2"))
"""


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    """`python COMMAND` in a folder that has JOB as slow.py."""
    (folder / "slow.py").write_text(JOB)
    environment = {**os.environ, "ECHELON_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip


def wait_for(path: Path, words: str = "", *, process: subprocess.Popen[str]) -> None:
    """Until the file says so."""
    limit = time.monotonic() + 180
    while not path.is_file() or words not in path.read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)


def end(process: subprocess.Popen[str], *signals: int, apart: float = 0.0) -> tuple[int, str, str]:
    """Send signals and wait; exit code, output, errors."""
    for number in signals:
        process.send_signal(number)
        time.sleep(apart)
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


TRAIN = ("-m", "echelon", "train", "slow.py", "--every", "1000", "--out", "my run")


@pytest.mark.slow
@pytest.mark.parametrize("plan", some("advice", ["dp=1", "dp=2"], 1))
def test_the_advice_goes_on_with_the_run(tmp_path: Path, plan: str) -> None:
    process = start(tmp_path, *TRAIN, "--plan", plan)
    wait_for(tmp_path / "my run" / "events.jsonl", '"kind": "step"', process=process)
    code, _, err = end(process, signal.SIGINT)
    assert code == 130, err
    advice = err.partition("resume with: ")[2].splitlines()[0]
    assert shlex.split(advice) == [sys.executable, *TRAIN, "--plan", plan]


@pytest.mark.journey
@pytest.mark.parametrize("plan", [pytest.param("dp=1", marks=only_whole), "dp=2"])
def test_a_fresh_run_goes_on_where_it_was(tmp_path: Path, plan: str) -> None:
    (tmp_path / "my run").mkdir()
    process = start(tmp_path, *TRAIN, "--plan", plan, "--fresh", "--json")
    wait_for(tmp_path / "my run-2" / "events.jsonl", '"kind": "step"', process=process)
    code, out, _ = end(process, signal.SIGTERM)
    told = json.loads(out)
    assert (code, told["reason"], told["folder"]) == (130, "interrupted", "my run-2")
    events = [json.loads(line) for line in (tmp_path / "my run-2" / "events.jsonl").read_text().splitlines()]
    words = shlex.split(events[-1]["message"].partition("resume with: ")[2])
    assert "--fresh" not in words
    assert words[-3:] == ["--resume", "--out", "my run-2"]


@pytest.mark.slow
def test_an_interrupted_script_gets_the_result_and_its_own_command(tmp_path: Path) -> None:
    process = start(tmp_path, "slow.py", "-x", "a b")
    wait_for(tmp_path / "runs" / "slow" / "events.jsonl", '"kind": "step"', process=process)
    code, out, err = end(process, signal.SIGINT)
    assert code == 0, err
    assert out.startswith("TrainResult(interrupted at step ")
    assert out.count("TrainResult") == 1
    assert f"resume with: {sys.executable} slow.py -x 'a b'\n" in err


@pytest.mark.slow
@pytest.mark.parametrize("plan", some("test_an_interrupt_before_the_first_step_is_no_error", ["dp=1", "dp=2"], 1))
def test_an_interrupt_before_the_first_step_is_no_error(tmp_path: Path, plan: str) -> None:
    process = start(tmp_path, "-m", "echelon", "train", "slow.py:early", "--plan", plan)
    wait_for(tmp_path / "reading", process=process)
    code, _, err = end(process, signal.SIGINT)
    assert (code, err) == (130, "interrupted before the first step; nothing to save\n")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=1", pytest.param("dp=2", marks=only_whole)])
def test_a_failure_is_told_once_and_machines_hear_of_it(tmp_path: Path, plan: str) -> None:
    code, out, err = end(start(tmp_path, "-m", "echelon", "train", "slow.py:wrong", "--plan", plan))
    assert code == 1, err
    assert err.count("the loss is nan") == 1
    assert out == ""
    code, out, err = end(start(tmp_path, "-m", "echelon", "train", "slow.py:wrong", "--plan", plan, "--json"))
    assert (code, list(json.loads(out))) == (1, ["error"])
    assert "the loss is nan" in json.loads(out)["error"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=1", pytest.param("dp=2", marks=only_whole)])
def test_a_reader_who_leaves_does_not_end_the_training(tmp_path: Path, plan: str) -> None:
    (tmp_path / "slow.py").write_text(JOB.replace("epochs=500", "epochs=5"))
    command = shlex.join([sys.executable, "-m", "echelon", "train", "slow.py", "--plan", plan, "--out", "run"])
    environment = {**os.environ, "ECHELON_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    script = f"({command}; echo $? > code) 2>&1 | head -1"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (tmp_path / "code").read_text() == "0\n", done
    last = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["reason"], last["step"]) == ("end", "finished", 20)
