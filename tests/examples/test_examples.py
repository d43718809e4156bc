"""The examples, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.events import Event
from echelon.observer import read_events
from tests.machine import ROOT, environment

DIGITS, GPT, RECOMMENDER = (str(ROOT / "examples" / name) for name in ("digits.py", "gpt.py", "recommender.py"))


def run(known_machine: Path, folder: Path, *command: str) -> list[Event]:
    """Run a command in `folder`; the events of the one run that it leaves there."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(known_machine),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (folder / "runs").iterdir()
    assert (made / "report.html").is_file()
    return read_events(made)


def losses(events: list[Event]) -> list[float]:
    return [event.data["loss"] for event in events if event.kind == "step"]


@pytest.mark.journey
@pytest.mark.slow
def test_digits_is_right_on_97_of_100(known_machine: Path, tmp_path: Path) -> None:
    events = run(known_machine, tmp_path, DIGITS)
    metrics = [event.data["metrics"] for event in events if event.kind == "evaluation"]
    assert len(metrics) == 12
    assert metrics[-1]["accuracy"] > 0.97


@pytest.mark.slow
def test_every_way_to_start_gives_the_same_losses(known_machine: Path, tmp_path: Path) -> None:
    """One process, two ranks of ours, two of torchrun's."""
    script = tmp_path / "tiny.py"
    script.write_text(Path(GPT).read_text().replace("echelon.train(job)", "echelon.train(tiny, 'dp=1')"))
    ways = {
        "python": [str(script)],
        "echelon": ["-m", "echelon", "train", f"{GPT}:tiny", "--plan", "dp=2 threads=1"],
        "torchrun": [
            "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "echelon", "train", f"{GPT}:tiny", "--plan", "dp=2 threads=1",
        ],
    }  # fmt: skip
    found = {}
    for way, command in ways.items():
        folder = tmp_path / way
        folder.mkdir()
        found[way] = losses(run(known_machine, folder, *command))
    assert len(found["python"]) == 30
    assert found["torchrun"] == found["echelon"]
    assert found["echelon"] == pytest.approx(found["python"], rel=1e-4)
    assert found["python"][-1] < 0.75 * found["python"][0]


@pytest.mark.slow
def test_the_recommender_learns_with_its_tables_on_a_server(known_machine: Path, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    events = run(known_machine, tmp_path, RECOMMENDER)
    metrics = [event.data["metrics"] for event in events if event.kind == "evaluation"]
    assert len(metrics) == 3  # after the warm-up and after each epoch
    assert metrics[0]["right"] < 0.61 < 0.64 < metrics[-1]["right"]
    assert len(losses(events)) == 12 + 2 * 118
