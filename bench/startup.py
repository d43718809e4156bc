"""How long until the first step is done: `echelon train` against `accelerate launch` and `torchrun`, two ranks, same model and data.

    python -m bench.startup [--rounds 5] [--json startup.json]

From the command's start to the moment when rank 0 has made the first optimizer step. Also what `import echelon` and
`echelon --help` take.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.common import Row, Timing, median, publish, ratio
from echelon.events import Event
from echelon.testing import models

IMPORT, HELP = 0.050, 0.300  # seconds, the project's limits

TASK = '''
"""What is trained: plain PyTorch, the same for everybody."""
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from models import GPT

BATCH = 16

def model():
    torch.manual_seed(0)
    return GPT(vocab=256, context=128, width=256, layers=6, heads=4)

def data():
    text = torch.randint(256, (64, 129), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())

def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
'''

ECHELON = """
import echelon, torch, task

def job():
    return echelon.Job(
        model=task.model,
        loss=lambda output, batch: task.loss(output, batch[-1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        data=task.data(),
        batch_size=task.BATCH,
        steps=2,
    )
"""

ACCELERATE = """
import sys, time
import torch, task
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = task.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
loader = DataLoader(task.data(), batch_size=task.BATCH // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert accelerator.num_processes == 2
for inputs, targets in loader:
    accelerator.backward(task.loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
    break
if accelerator.is_main_process:
    open(sys.argv[1], "w").write(repr(time.time()))
accelerator.end_training()
"""

TORCHRUN = """
import sys, time
import torch, task
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(task.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
data = task.data()
loader = DataLoader(data, batch_size=task.BATCH // dist.get_world_size(), sampler=DistributedSampler(data))
assert dist.get_world_size() == 2
for inputs, targets in loader:
    task.loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    break
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(repr(time.time()))
dist.destroy_process_group()
"""

LAUNCH = {
    # `--cpu` would start one process, or want mpirun; the script itself asks for the CPU.
    "accelerate launch": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
                          "--mixed_precision", "no", "--dynamo_backend", "no", "with_accelerate.py"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "with_torchrun.py"],
}  # fmt: skip


class Bench:
    """A folder with the three scripts, and how each is started once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(models.__file__, folder / "models.py")
        for name, text in (
            ("task", TASK),
            ("job", ECHELON),
            ("with_accelerate", ACCELERATE),
            ("with_torchrun", TORCHRUN),
        ):
            (folder / f"{name}.py").write_text(text)
        self._environment = dict(
            os.environ,
            PYTHONPATH=str(Path(__file__).parents[1]),
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            ECHELON_CACHE=str(folder / "cache"),
        )

    def start(self, arguments: Sequence[str], read: Callable[[], float]) -> float:
        """Seconds from starting `python ARGUMENTS` to the first step, whose time `read` finds afterwards."""
        began = time.time()
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return read() - began

    def echelon(self, plan: str) -> float:
        """One start of `echelon train`."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        return self.start(
            ["-m", "echelon", "train", "job.py", "--plan", plan, "--out", "run", "--quiet"], self._first_step
        )

    def peer(self, name: str) -> float:
        """One start of a peer."""
        stamp = self.folder / "first"
        return self.start([*LAUNCH[name], str(stamp)], lambda: float(stamp.read_text()))

    def _first_step(self) -> float:
        for line in (self.folder / "run" / "events.jsonl").read_text().splitlines():
            event = Event.from_line(line)
            if event.kind == "step":
                return event.time
        raise SystemExit("echelon train wrote no step event")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 when every limit holds."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description="time to the first step")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (A B C C B A)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    rows = [*_small(), *_first_steps(asked.rounds)]
    notes = [
        "seconds; ratios are medians with a 95 % interval over the rounds, the upper end is held against the limit"
    ]
    return publish("Start-up", rows, json_path=asked.json, notes=notes)


def _small() -> list[Row]:
    code = "import time, sys; t = time.perf_counter(); import echelon; print(time.perf_counter() - t, 'torch' in sys.modules)"
    imports, torches = [], set()
    for _ in range(10):
        seconds, torch = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        imports.append(float(seconds))
        torches.add(torch)
    helps = []
    for _ in range(10):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "echelon", "--help"], capture_output=True, check=True)
        helps.append(time.perf_counter() - began)
    taken = median(imports)
    loads = "imports torch" if "True" in torches else "without torch"
    limit = IMPORT if loads == "without torch" else 0.0
    return [
        Row(what={"what": "import echelon"}, value=taken.median, text=f"{taken.median:.3f} s, {loads}", limit=limit),
        Row(
            what={"what": "echelon --help"},
            value=median(helps).median,
            text=f"{median(helps).median:.3f} s",
            limit=HELP,
        ),
    ]


def _first_steps(rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        cold = bench.echelon("auto")
        contenders: dict[str, Callable[[], float]] = {
            "echelon train --plan dp=2": lambda: bench.echelon("dp=2"),
            "echelon train": lambda: bench.echelon("auto"),
            **{peer: lambda peer=peer: bench.peer(peer) for peer in LAUNCH},  # type: ignore[misc]
        }
        for start in contenders.values():
            start()  # files into the page cache
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            spent = dict.fromkeys(contenders, 0.0)
            for name in [*contenders, *reversed(contenders)]:
                spent[name] += contenders[name]() / 2
            for name, seconds in spent.items():
                taken[name].append(seconds)
        plan = json.loads((bench.folder / "run" / "plan.json").read_text())["mesh"]["dp"]
    timings = {name: Timing(name=name, wall=tuple(seconds), cpu=()) for name, seconds in taken.items()}
    ours = timings["echelon train --plan dp=2"]
    rows = [
        Row(what={"what": f"first step: {name}"}, value=timing.step, text=f"{timing.step:.2f} s")
        for name, timing in timings.items()
    ]
    rows.append(
        Row(
            what={"what": "first step: echelon train, nothing known yet (profile, measure, search)"},
            value=cold,
            text=f"{cold:.2f} s",
        )
    )
    rows[1].what["what"] += f" (auto: dp={plan}, known)"  # type: ignore[index]
    for peer in LAUNCH:
        limit = 1.0 if peer.startswith("accelerate") else None
        against = ratio(ours, timings[peer])
        rows.append(
            Row(
                what={"what": f"echelon train --plan dp=2 / {peer}"}, value=against.high, text=str(against), limit=limit
            )
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
