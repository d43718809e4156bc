"""Killed and interrupted trainings against one that was left alone: the same bits, on 1, 2 and 4 ranks, under every ZeRO stage.

    python -m bench.resume [--ranks 1,2,4] [--seed 0] [--json resume.json]

`echelon train` is killed (kill -9 on every process) at a random step, started again, interrupted (Ctrl-C) at a later one,
and started again to the end. Its last checkpoint is compared with that of an unbroken run, in float32, bit by bit:
parameters, buffers and optimizer state. The training has dropout, a schedule, clipping and an uneven last batch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.common import Row, publish, tell
from echelon.checkpoint_files.checkpoint_reader import open_checkpoint, read_full_tensors
from echelon.observer import read_events
from echelon.testing.fault_schedule import StoppedCommand, run_until_step

STEPS, EVERY = 40, 3

JOB = f"""
import time
import echelon, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
        self.hidden, self.drop, self.head = nn.Linear(6 * 36, 31), nn.Dropout(0.2), nn.Linear(31, 5)

    def forward(self, x):
        time.sleep(0.02)  # a step long enough to be hit
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(self.drop(F.relu(self.hidden(x))))

def job():
    draw = torch.Generator().manual_seed(0)
    return echelon.Job(
        model=Net,
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=TensorDataset(torch.randn(93, 1, 8, 8, generator=draw), torch.randint(5, (93,), generator=draw)),
        batch_size=16,
        steps={STEPS},
        clip_norm=0.5,
        lr_schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    )
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination, and the steps at which the run is killed and interrupted."""

    ranks: int
    zero: int
    kill: int
    interrupt: int
    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the broken run compares: the tensors that differ from the unbroken one's, and where it was stopped."""

    tensors: int
    different: tuple[str, ...]
    killed: int
    interrupted: int
    #: The steps from which the second and the third start went on: it could have begun anew, and the bits would agree too.
    resumed: tuple[int, ...]


def cells(ranks: Iterable[int], seed: int) -> list[Cell]:
    """Every combination, with steps drawn from `seed`."""
    draw = random.Random(seed)
    return [
        Cell(
            ranks=count,
            zero=zero,
            kill=draw.randint(1, 12),
            interrupt=draw.randint(18, 26),
            delay=draw.uniform(0, 0.06),
        )
        for count, zero in itertools.product(ranks, range(4))
    ]


def break_and_resume(cell: Cell, folder: Path) -> Outcome:
    """Train unbroken and broken in `folder`; compare."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.py"
    file.write_text(JOB)
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1]), ECHELON_CACHE=str(folder / "cache"))

    def command(out: str) -> list[str]:
        plan = f"dp={cell.ranks} zero={cell.zero} threads=1"
        options = ["--out", str(folder / out), "--every", str(EVERY), "--quiet", "--plan", plan]
        return [sys.executable, "-m", "echelon", "train", str(file), *options]

    def stop(step: int, with_signal: signal.Signals) -> StoppedCommand:
        events = folder / "broken" / "events.jsonl"
        return run_until_step(
            command("broken"),
            events=events,
            step=step,
            stop_signal=with_signal,
            delay=cell.delay,
            environment=environment,
        )

    _finish(command("whole"), environment)
    killed = stop(cell.kill, signal.SIGKILL)
    interrupted = stop(cell.interrupt, signal.SIGINT)
    if interrupted.exit_code != 130:
        raise SystemExit(f"{cell}: interrupted, it ended with {interrupted.exit_code}\n{interrupted.output}")
    _finish(command("broken"), environment)
    whole, broken = (
        read_checkpoint(folder / name / "checkpoints" / f"step-{STEPS:08d}") for name in ("whole", "broken")
    )
    names = sorted(whole.keys() | broken.keys())
    different = [
        name for name in names if name not in whole or name not in broken or not same_bits(whole[name], broken[name])
    ]
    starts = [event for event in read_events(folder / "broken") if event.kind == "start"]
    return Outcome(
        tensors=len(names),
        different=tuple(different),
        killed=killed.step,
        interrupted=interrupted.step,
        resumed=tuple(int(event.data["resumed_from"]) for event in starts[1:]),
    )


def _finish(command: Sequence[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    return read_full_tensors(open_checkpoint(folder))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit by bit: +0 is not -0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every combination; 0 when all are equal bit by bit."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.resume", description="resumed trainings against unbroken ones"
    )
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="draws the steps")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    rows = []
    for cell in cells(map(int, asked.ranks.split(",")), asked.seed):
        with tempfile.TemporaryDirectory() as folder:
            outcome = break_and_resume(cell, Path(folder))
        what = {"ranks": str(cell.ranks), "zero": str(cell.zero), "tensors": str(outcome.tensors)}
        stops = {
            "killed after step": str(outcome.killed),
            "interrupted after": str(outcome.interrupted),
            "went on from": " and ".join(map(str, outcome.resumed)),
        }
        text = f"{len(outcome.different)} differ{': ' + outcome.different[0] if outcome.different else ''}"
        detail = {"different": outcome.different}
        rows.append(tell(Row(what=what | stops, value=len(outcome.different), text=text, limit=0, detail=detail)))
    return publish("Killed, interrupted, resumed: float32, bit by bit", rows, json_path=asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
