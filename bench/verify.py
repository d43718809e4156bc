"""What a proof costs: `echelon verify` of a GPT with 10 M parameters on 4 ranks, under plans of every axis.

    python -m bench.verify [--plans "dp=4;tp=2 pp=2"] [--json verify.json]

From the command's start to its certificate, as a user meets it: the ranks are started, nothing is known of the job yet. Beside the
wall clock stand the processor seconds of all processes together: those tell on a machine that has other work too.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.common import Row, publish, tell
from echelon.plan.certificate import Certificate
from echelon.testing import models

LIMIT = 60.0  # seconds, the project's, on two cores
PLANS = ("dp=4", "dp=4 zero=3", "dp=2 tp=2", "tp=2 pp=2", "dp=2 pp=2 zero=1")

JOB = """
import echelon, torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from models import GPT

def job():
    text = torch.randint(256, (512, 129), generator=torch.Generator().manual_seed(0))
    return echelon.Job(
        model=lambda: GPT(vocab=256, context=128, width=320, layers=8, heads=4),
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[1].flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        data=TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        batch_size=16,
        steps=100,
        clip_norm=1.0,
    )
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify under each plan; 0 when all are verified within the limit."""
    parser = argparse.ArgumentParser(prog="python -m bench.verify", description="seconds that a proof takes")
    parser.add_argument("--plans", default=";".join(PLANS), help="plans of 4 ranks, separated by semicolons")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(models.__file__, folder / "models.py")
        (folder / "job.py").write_text(JOB)
        rows = [tell(_measure(folder, plan)) for plan in asked.plans.split(";")]
    notes = [
        "GPT 8 x 320 (10.1 M parameters), T=128, AdamW, batch 16; seconds from the command's start to its certificate"
    ]
    return publish("Verify", rows, json_path=asked.json, notes=notes)


def _measure(folder: Path, plan: str) -> Row:
    shutil.rmtree(folder / "cache", ignore_errors=True)  # what is known of the job from the plan before
    environment = dict(
        os.environ,
        PYTHONPATH=str(Path(__file__).parents[1]),
        GLOO_SOCKET_IFNAME="lo",
        ECHELON_CACHE=str(folder / "cache"),
    )
    began, before = time.perf_counter(), _processor()
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "verify", "job.py", "--plan", plan, "--out", "certificate.json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    wall, cpu = time.perf_counter() - began, _processor() - before
    if done.returncode:
        raise SystemExit(f'"{plan}" ended with {done.returncode}\n{done.stdout}\n{done.stderr}')
    worst = max(finding.max_difference for finding in Certificate.load(folder / "certificate.json").findings)
    what = {"plan": plan, "largest difference": f"{worst:.1e}", "processor": f"{cpu:.1f} s"}
    return Row(what=what, value=wall, text=f"{wall:.1f} s", limit=LIMIT, detail={"wall": wall, "cpu": cpu})


def _processor() -> float:
    """Seconds of all processes that have ended below this one: the command waits for its ranks."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
