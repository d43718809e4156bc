"""What the gate costs: verification before the first step and spot checks after it, against the training that they guard.

    python -m bench.gate [--only digits,gpt] [--device cuda] [--json gate.json]

Each job is trained by `echelon train` as a user would, with an empty cache, then once more with the certificate in the cache. Seconds
are those that the run itself logged: of the gate, of the spot checks, and of the whole training.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import Row, among, publish, tell
from echelon.observer import read_events
from echelon.testing import models

ROOT = Path(__file__).parents[1]
LEAST, SHARE = 30.0, 0.05  # the project's: max(30 s, 5 % of the expected run)

_GPT = """
import echelon, torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from models import GPT

def job():
    text = torch.randint({vocab}, ({rows}, {length} + 1), generator=torch.Generator().manual_seed(0))
    return echelon.Job(
        model=lambda: GPT(vocab={vocab}, context={length}, width={width}, layers={layers}, heads={heads}),
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[1].flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        data=TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        batch_size={batch},
        steps={steps},
        clip_norm=1.0,
        precision="{precision}",
    )
"""
_BERT = """
import echelon, torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

class Sentences(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        words = torch.randint(5, 1000, (64,), generator=draw)
        return {"input_ids": words, "attention_mask": torch.ones(64, dtype=torch.long), "labels": words[0] % 2}

def model():
    return BertForSequenceClassification(BertConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=512, max_position_embeddings=64))

def job():
    return echelon.Job(model=model, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4), data=Sentences(), batch_size=32, epochs=10)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job to train: its file's text or the name of an example, and the plan."""

    text: str = ""
    example: str = ""
    plan: str
    device: str = "cpu"


CASES = {
    "digits": Case(example="digits.py", plan="dp=2"),
    "gpt-10M": Case(
        text=_GPT.format(
            vocab=256, rows=512, length=128, width=320, layers=8, heads=4, batch=16, steps=100, precision="fp32"
        ),
        plan="dp=2",
    ),
    "recommender": Case(example="recommender.py", plan="dp=2"),
    "bert-tiny": Case(text=_BERT, plan="dp=2"),
    "gpt-124M": Case(
        text=_GPT.format(
            vocab=50304, rows=2048, length=1024, width=768, layers=12, heads=12, batch=32, steps=600, precision="bf16"
        ),
        plan="dp=1 micro=16",
        device="cuda",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train each job twice; 0 when every gate ended within its bound."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gate", description="seconds that the gate and spot checks take"
    )
    parser.add_argument("--only", type=among(*CASES), help="jobs, separated by commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    names = asked.only or [name for name, case in CASES.items() if case.device == asked.device]
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            rows += [tell(row) for row in _measure(name, CASES[name], Path(folder))]
    notes = [
        "gate: verification before the first step; checks: later steps computed again on one device; run: the whole training"
    ]
    return publish("Gate", rows, json_path=asked.json, notes=notes)


def _measure(name: str, case: Case, folder: Path) -> list[Row]:
    shutil.copy(models.__file__, folder / "models.py")
    file = folder / "job_file.py"
    file.write_text(case.text or (ROOT / "examples" / case.example).read_text())
    return [_train(name, case, folder, start) for start in ("first", "second")]


def _train(name: str, case: Case, folder: Path, start: str) -> Row:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "ECHELON_CACHE": str(folder / "cache"), "GLOO_SOCKET_IFNAME": "lo", "ECHELON_VERIFY": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "echelon", "train", "job_file.py", "--plan", case.plan, "--out", start, "--quiet"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    last: dict[str, Any] = {event.kind: event.data for event in read_events(folder / start)}
    gate, checks = last["verified"]["seconds"], last.get("checked", {"seconds": 0.0, "count": 0})
    run = last["end"]["seconds"]
    what = {
        "job": name, "plan": case.plan, "start": start, "run": f"{run:.1f} s",
        "checks": f"{checks['count']} in {checks['seconds']:.2f} s ({checks['seconds'] / run:.1%})",
    }  # fmt: skip
    detail = {"gate": gate, "checks": checks["seconds"], "run": run}
    return Row(
        what=what,
        value=gate,
        text=f"{gate:.1f} s ({gate / (gate + run):.0%})",
        limit=max(LEAST, SHARE * run),
        detail=detail,
    )


if __name__ == "__main__":
    raise SystemExit(main())
