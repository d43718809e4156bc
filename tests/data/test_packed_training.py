"""A training on packed data that dies in mid-epoch and goes on with another number of ranks sees exactly what it had not seen."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.data import open_source
from tests.data.test_packed import images
from tests.machine import environment

EVERY, DIES, BATCH, SAMPLES, STEPS = 3, 8, 12, 230, 30

JOB = f"""
import os, pathlib
import echelon, torch
from torch.nn import functional as F

HERE = pathlib.Path(__file__).parent
seen = []

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(192, 10)

    def forward(self, pixels):
        return self.head(pixels.flatten(1).float() / 255)

def loss(output, batch):
    if output.requires_grad and (HERE / "log").is_dir():
        seen.append(batch[1].tolist())
        name = os.environ["NAME"] + "-" + os.environ.get("RANK", "0")
        (HERE / "log" / name).write_text("\\n".join(" ".join(map(str, each)) for each in seen))
        if os.environ.get("DIES") and len(seen) == {DIES}:
            os.kill(os.getpid(), 9)
    return F.cross_entropy(output, batch[1] % 10)

def job():
    return echelon.Job(
        model=Net, loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=str(HERE / "set"), evaluation=str(HERE / "set"), batch={BATCH}, steps={STEPS},
    )
"""


@pytest.mark.slow
def test_resumed_on_other_ranks_it_sees_the_rest_of_the_order(tmp_path: Path, known_machine: Path) -> None:
    images(tmp_path / "set", 4, SAMPLES)
    (tmp_path / "job.py").write_text(JOB)
    # The job is tried out in this process first; only what ranks train on is noted.
    command = [
        sys.executable,
        "-m",
        "echelon",
        "train",
        str(tmp_path / "job.py"),
        "--out",
        str(tmp_path / "run"),
        "--every",
        str(EVERY),
        "--quiet",
    ]
    (tmp_path / "log").mkdir()

    def train(name: str, ranks: int, **more: str) -> int:
        env = {**environment(known_machine), "NAME": name, **more}
        return subprocess.run(
            [*command, "--plan", f"dp={ranks} threads=1"], env=env, check=False, timeout=300
        ).returncode

    def steps(name: str, ranks: int) -> list[list[int]]:
        logs = [(tmp_path / "log" / f"{name}-{rank}").read_text().splitlines() for rank in range(ranks)]
        parts = ([[int(word) for word in line.split()] for line in log] for log in logs)
        return [list(itertools.chain(*step)) for step in zip(*parts, strict=False)]

    assert train("first", 2, DIES="1") != 0
    assert train("second", 1) == 0
    source = open_source(str(tmp_path / "set"))
    order = source.order(batch=BATCH, seed=0)
    want = [order.ids(step, 0, order.size(step)).tolist() for step in range(STEPS)]
    first, second = steps("first", 2), steps("second", 1)
    resumed = STEPS - len(second)
    assert resumed > 0
    assert resumed % EVERY == 0
    assert first[:resumed] == want[:resumed]
    assert second == want[resumed:]
