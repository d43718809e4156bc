"""The example under torchrun, as its first lines promise it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.events import Event
from echelon.observer import read_events
from tests.machine import ROOT, environment
from tests.sampling import only_whole


def run(folder: Path, known_machine: Path, *command: str) -> list[Event]:
    """Run a command in `folder`; the events of the one run that it leaves there."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(known_machine),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_events(folder / "runs" / "digits")


@pytest.mark.slow
@only_whole  # in CI tests/examples/test_examples.py has the same of a smaller one
def test_digits_under_torchrun_has_the_losses_of_our_own_launcher(tmp_path: Path, known_machine: Path) -> None:
    """Rank 0 of torchrun's two plans for both; our launcher is given the plan that it found."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
        text = (ROOT / "examples" / "digits.py").read_text()
        (folder / "digits.py").write_text(text.replace("epochs=12", "steps=20"))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    under_torchrun = run(theirs, known_machine, *torchrun, "digits.py")
    plan = theirs / "runs" / "digits" / "plan.json"
    under_ours = run(ours, known_machine, "-m", "echelon", "train", "digits.py", "--plan", str(plan))
    losses = [
        [event.data["loss"] for event in events if event.kind == "step"] for events in (under_torchrun, under_ours)
    ]
    assert len(losses[0]) == 20
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    assert all(event.data["ranks"] == 2 for event in under_torchrun + under_ours if event.kind == "start")
