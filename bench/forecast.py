"""Forecast against measured: memory and step time of GPT, ResNet and MLP, each of at least 500 MB, at 1 and 2 ranks.

    python -m bench.forecast [--device cuda] [--only gpt] [--plan tp=2] [--rounds 2] [--refresh] [--json OUT]

Rates come from the measured cluster alone; the models here are never timed to forecast them. Memory on a CPU is the peak of RSS
minus RSS after one step of a tiny model with the same operators, in processes that run nothing else; on a GPU it is the
allocator's peak. Time is the median over all steps of all rounds, less what the ranks' threads spent queueing for a core behind
other programs (nothing on a quiet machine); rounds go through the cases one after another, so that a slow minute meets every case.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from bench.common import Row, publish
from echelon.engine.run import Run
from echelon.job import Job
from echelon.launchers.environment import child_environment
from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.profiler import measure, profile
from echelon.profiler.complete import complete
from echelon.profiler.machine import Busy
from echelon.profiler.probe import queued
from echelon.simulator import simulate
from echelon.testing.models import GPT, MLP, ResNet
from echelon.testing.ranks import Pool
from echelon.world import World

#: DESIGN.md and the issue: memory within 10 %, time within 25 %.
MEMORY, TIME = 0.10, 0.25
STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job in two sizes and the plans it is run under."""

    job: Callable[[], Job]
    tiny: Callable[[], Job]
    plans: tuple[str, ...]


def gpt(
    *, layers: int, width: int, context: int, vocab: int, batch: int, precision: Any = "fp32", heads: int = 4
) -> Job:
    """A GPT on random tokens with AdamW."""
    rows = 4 * batch
    text = torch.randint(vocab, (rows, context + 1), generator=torch.Generator().manual_seed(0))
    return Job(
        model=lambda: GPT(vocab=vocab, context=context, width=width, layers=layers, heads=heads),
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[-1].flatten()),
        optimizer=_adamw,
        data=TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        batch=batch,
        steps=1000,
        precision=precision,
        name="GPT",
    )


def resnet(*, width: int, batch: int, precision: Any = "fp32") -> Job:
    """A ResNet-18 on random 32 x 32 images with SGD."""
    generator = torch.Generator().manual_seed(0)
    rows = 2 * batch
    images, labels = torch.randn(rows, 3, 32, 32, generator=generator), torch.randint(10, (rows,), generator=generator)
    return Job(
        model=lambda: ResNet(width=width),
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        data=TensorDataset(images, labels),
        batch=batch,
        steps=1000,
        precision=precision,
        name="ResNet",
    )


def mlp(*, width: int, layers: int, batch: int, precision: Any = "fp32") -> Job:
    """An MLP on random vectors with AdamW."""
    generator = torch.Generator().manual_seed(0)
    rows = 4 * batch
    data = TensorDataset(torch.randn(rows, width, generator=generator), torch.randint(10, (rows,), generator=generator))
    return Job(
        model=lambda: MLP(width=width, layers=layers, classes=10),
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=_adamw,
        data=data,
        batch=batch,
        steps=1000,
        precision=precision,
        name="MLP",
    )


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def _tiny_gpt() -> Job:
    return gpt(layers=1, width=32, context=16, vocab=64, batch=4)


CPU = {
    "gpt": Case(
        job=lambda: gpt(layers=12, width=256, context=128, vocab=16384, batch=12),
        tiny=_tiny_gpt,
        plans=(
            "dp=1",
            "dp=1 recompute=block",
            "dp=1 recompute=selective",
            "dp=2",
            "dp=2 zero=3",
            "tp=2",
            "pp=2 micro=3",
        ),
    ),
    "resnet": Case(
        job=lambda: resnet(width=32, batch=448), tiny=lambda: resnet(width=4, batch=8), plans=("dp=1", "dp=2")
    ),
    "mlp": Case(
        job=lambda: mlp(width=2048, layers=13, batch=128),
        tiny=lambda: mlp(width=32, layers=3, batch=8),
        plans=("dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=3"),
    ),
}

_BIG: dict[str, Any] = {"layers": 12, "width": 768, "context": 1024, "vocab": 50304, "batch": 32, "heads": 12}
CUDA = {
    "gpt fp32": Case(job=lambda: gpt(**_BIG), tiny=_tiny_gpt, plans=("dp=1",)),
    "gpt tf32": Case(job=lambda: gpt(**_BIG, precision="tf32"), tiny=_tiny_gpt, plans=("dp=1",)),
    "gpt bf16": Case(job=lambda: gpt(**_BIG, precision="bf16"), tiny=_tiny_gpt, plans=("dp=1", "dp=1 micro=8")),
    "resnet": Case(job=lambda: resnet(width=64, batch=1024), tiny=lambda: resnet(width=4, batch=8), plans=("dp=1",)),
    "resnet bf16": Case(
        job=lambda: resnet(width=64, batch=1024, precision="bf16"),
        tiny=lambda: resnet(width=4, batch=8),
        plans=("dp=1",),
    ),
    "mlp": Case(
        job=lambda: mlp(width=8192, layers=8, batch=4096),
        tiny=lambda: mlp(width=32, layers=3, batch=8),
        plans=("dp=1",),
    ),
}


def run_case(
    world: World, device: str, name: str, plan: str, tiny: str, threads: int
) -> tuple[float, list[float], list[float]]:
    """On each rank: (bytes that the process grew by, seconds of each step after the first, of those queueing for a core).

    `plan` and `tiny` are the plans' documents for the model and for its tiny one.
    """
    case = (CUDA if device == "cuda" else CPU)[name]
    job = case.job()
    torch.set_num_threads(threads)
    where = torch.device(device)
    before = _warm(case.tiny(), Plan.from_json(tiny), world, where)
    run = Run(job, Plan.from_json(plan), world, device=where)
    # With one thread the others only carry messages: they queue while the main one works or waits.
    alone = threads == 1
    seconds: list[float] = []
    lost: list[float] = []
    start, queue, busy = time.perf_counter(), queued(main=alone), time.process_time()
    for batch in run.batches(STEPS):
        run.step(batch)
        if where.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        # It cannot have lost more than its own work leaves.
        lost.append(min(queued(main=alone) - queue, seconds[-1] - (time.process_time() - busy) / threads))
        start, queue, busy = time.perf_counter(), queued(main=alone), time.process_time()
    grown = _peak(where) - before
    run.close()
    return grown, seconds[1:], lost[1:]


def _answers(device: str, name: str, plan: Plan, tiny: Plan, threads: int) -> list[Any]:
    """Run a case in new processes: what the last one left would count as held."""
    given = (device, name, plan.to_json(), tiny.to_json(), threads)
    if plan.ranks > 1:
        with Pool() as pool:
            return pool.run(plan.ranks, run_case, *given, timeout=900)
    # The pool's processes start with one thread, which the matrix library keeps to whatever torch is told later.
    code = f"import json; from bench.forecast import World, run_case; print(json.dumps(run_case(World(), *{given!r})))"
    environment = child_environment(threads)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{name} {plan}: {done.stderr.strip()[-2000:]}")
    return [json.loads(done.stdout.splitlines()[-1])]


def _warm(job: Job, plan: Any, world: World, device: torch.device) -> float:
    """One step of a tiny model with the same operators; what the process holds after it."""
    run = Run(job, plan, world, device=device)
    for batch in run.batches(1):
        run.step(batch)
    run.close()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return 0.0
    return _status("VmRSS")


def _status(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _peak(device: torch.device) -> float:
    return float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else _status("VmHWM")


def _forecasts(cases: dict[str, Case], *, refresh: bool) -> dict[tuple[str, str], Forecast]:
    cluster = measure(refresh=refresh)
    for note in cluster.notes:
        print(f"note: {note}", file=sys.stderr)
    found = {}
    for name, case in cases.items():
        job = case.job()
        known = profile(job)
        for text in case.plans:
            found[name, text] = simulate(known, cluster, complete(from_text(text), job, known))
    return found


def _tiny(case: Case, text: str) -> Plan:
    """The plan for a case's tiny model, whose batch is one micro-batch."""
    return complete(replace(from_text(text), micro=None), case.tiny())


def _row(
    name: str, text: str, what: str, unit: str, forecast: float, measured: float, limit: float, detail: Any
) -> Row:
    error = forecast / measured - 1
    return Row(
        what={
            "model": name,
            "plan": text,
            "of": what,
            "forecast": f"{forecast:.4g} {unit}",
            "truth": f"{measured:.4g} {unit}",
        },
        value=abs(error),
        text=f"{error:+.1%}",
        limit=limit,
        detail=detail,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.forecast", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", help="models whose name starts so")
    parser.add_argument("--plan", help="this plan alone")
    parser.add_argument("--rounds", type=int, default=2, help="times that every case is run")
    parser.add_argument("--refresh", action="store_true", help="measure the machine again")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    cases = CUDA if options.device == "cuda" else CPU
    cases = {name: case for name, case in cases.items() if not options.only or name.startswith(options.only)}
    if options.plan:
        cases = {name: replace(case, plans=(options.plan,)) for name, case in cases.items()}
    forecasts = _forecasts(cases, refresh=options.refresh)
    grown: dict[tuple[str, str], float] = {}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in forecasts}
    wall: dict[tuple[str, str], list[float]] = {key: [] for key in forecasts}
    tiny = {key: _tiny(cases[key[0]], key[1]) for key in forecasts}
    cores, others = measure().cores, Busy()
    for _ in range(options.rounds):
        for (name, text), forecast in forecasts.items():
            threads = max(cores // forecast.plan.ranks, 1)
            answers = _answers(options.device, name, forecast.plan, tiny[name, text], threads)
            grown[name, text] = max(answer[0] for answer in answers)
            wall[name, text] += answers[0][1]
            # A rank that queues for a core behind another program makes the others wait: the longest queue counts.
            queues = [max(each) for each in zip(*(answer[2] for answer in answers), strict=True)]
            seconds[name, text] += [step - queue for step, queue in zip(answers[0][1], queues, strict=True)]
    rows = []
    for (name, text), forecast in forecasts.items():
        memory, step = forecast.memory, float(np.median(seconds[name, text]))
        parts = {
            part: getattr(memory, part)
            for part in ("parameters", "gradients", "optimizer", "activations", "temporary", "buckets")
        }
        rows.append(_row(name, text, "memory", "MB", memory.peak / 1e6, grown[name, text] / 1e6, MEMORY, parts))
        causes = {
            part: getattr(forecast.time, part)
            for part in ("forward", "backward", "bubble", "exchange", "hidden", "optimizer", "input", "overhead")
        }
        rows.append(
            _row(
                name,
                text,
                "step",
                "s",
                forecast.time.step,
                step,
                TIME,
                causes | {"steps": seconds[name, text], "wall": wall[name, text]},
            )
        )
    notes = [*measure().notes, f"others used {others.share:.0%} of the cores during the runs"]
    return publish("Forecast against measured", rows, json_path=options.json, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
