"""A training on packed data that dies in mid-epoch and goes on with another number of ranks sees exactly what it had not seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.data import open_source
from echelon.observer import read_events
from tests.data.test_packed import images
from tests.machine import environment

EVERY, DIES, BATCH, SAMPLES, STEPS = 3, 7, 12, 230, 30

JOB = f"""
import os, pathlib
import echelon, torch
from torch.nn import functional as F

HERE = pathlib.Path(__file__).parent

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(192, 10)

    def forward(self, pixels):
        Net.trains = self.training
        return self.head(pixels.flatten(1).float() / 255)

def loss(output, batch):
    if Net.trains and type(batch[1]) is torch.Tensor:
        labels = " ".join(map(str, batch[1].tolist()))
        with (HERE / (os.environ["NAME"] + os.environ.get("RANK", "0"))).open("a") as file:
            print(labels, file=file)
        if labels == os.environ.get("DIES"):
            os.kill(os.getpid(), 9)
    return F.cross_entropy(output, batch[1] % 10)

def job():
    return echelon.Job(
        model=Net, loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=str(HERE / "set"), eval_data=str(HERE / "set"), batch_size={BATCH}, steps={STEPS},
    )
"""


@pytest.mark.slow
def test_resumed_on_other_ranks_it_sees_the_rest_of_the_order(tmp_path: Path, known_machine: Path) -> None:
    images(tmp_path / "set", 4, SAMPLES)
    (tmp_path / "job.py").write_text(JOB)
    order = open_source(str(tmp_path / "set")).make_order(batch=BATCH, seed=0)

    def share(step: int, rank: int, ranks: int) -> str:
        size = order.batch_size(step) // ranks  # even: no batch here is odd
        return " ".join(map(str, order.ids(step, rank * size, (rank + 1) * size).tolist()))

    def train(name: str, ranks: int, **more: str) -> int:
        options = ["--out", str(tmp_path / "run"), "--every", str(EVERY), "--quiet", "--plan", f"dp={ranks} threads=1"]
        command = [sys.executable, "-m", "echelon", "train", str(tmp_path / "job.py"), *options]
        env = {**environment(known_machine), "NAME": name, **more}
        return subprocess.run(command, env=env, check=False, timeout=300).returncode

    def seen(name: str, rank: int, first: str) -> list[str]:
        """What a rank trained on; what was tried out before the first step is not of the order."""
        lines = (tmp_path / f"{name}{rank}").read_text().splitlines()
        return lines[lines.index(first) :]

    assert train("first", 2, DIES=share(DIES, 0, 2)) != 0
    for rank in range(2):
        found = seen("first", rank, share(0, rank, 2))
        assert found == [share(step, rank, 2) for step in range(len(found))]
    assert train("second", 1) == 0
    resumed = int([event for event in read_events(tmp_path / "run") if event.kind == "start"][-1].data["resumed_from"])
    assert resumed in (3, 6)
    assert seen("second", 0, share(resumed, 0, 1)) == [share(step, 0, 1) for step in range(resumed, STEPS)]
