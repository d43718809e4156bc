"""What a step keeps with blocks computed again, against the forecast: on one rank, under tp=2 and under pp=2.

    python -m bench.recompute [--json recompute.json]

Measured are the bytes alive at the peak of forward and backward, beside parameters and gradients, as the profiler counts them: what an
allocator adds is bench.forecast's to show.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from bench.common import Row, publish, tell
from bench.workloads import WORKLOADS
from echelon.engine.run import Run
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan, Recompute
from echelon.plan.profile import Profile
from echelon.plan.text import from_text
from echelon.profiler import profile
from echelon.simulator.memory import rank_memories
from echelon.simulator.plan_layout import lay_out_plan
from echelon.simulator.summarize_profile import summarize_profile
from echelon.testing.rank_pool import RankPool
from echelon.trials.op_recorder import record_ops
from echelon.world import World

LIMIT = 0.10  # the project's: memory within 10 %
NAME = "gpt-axes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every plan; 0 when all forecasts hold."""
    parser = argparse.ArgumentParser(prog="python -m bench.recompute", description="activations against the forecast")
    parser.add_argument("--plans", default="dp=1,tp=2,pp=2 micro=2", help="plans, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    job = WORKLOADS[NAME].job()
    known, rows = profile(job), []
    with RankPool() as pool:
        for text in asked.plans.split(","):
            plan, whole = complete(from_text(text), job, known), 0.0
            for what in get_args(Recompute):
                plan = replace(plan, recompute=what)
                found = max(pool.run(plan.ranks, peak, plan, timeout=240))
                whole = whole or found
                rows.append(_row(plan, forecast(known, plan), found, whole))
    notes = ["largest rank", WORKLOADS[NAME].what]
    return publish("Activations with blocks computed again", rows, json_path=asked.json, notes=notes)


def forecast(profile: Profile, plan: Plan) -> float:
    """The same by the simulator, of the rank that has most."""
    layout = lay_out_plan(summarize_profile(profile, plan), profile.batch, plan, trusts_trace=True)
    return max(memory.activations + memory.temporary for memory in rank_memories(layout))


def peak(world: World, plan: Plan) -> float:
    """Bytes that are alive on this rank at the peak of forward and backward, beside parameters and their gradients."""
    with Run(WORKLOADS[NAME].job(), plan, world) as run:
        (batch,) = run.batches(1)
        loss = run.backward(batch)
        run.update(loss, batch.samples)
        held = [each for each in run.model.parameters() if not each.is_meta]
        for parameter in held:
            parameter.grad = torch.zeros_like(parameter)
        with record_ops(run.model, batch.samples) as recorder:
            for value in (*held, *run.model.buffers()):
                recorder.ignore_storage(value)
            run.backward(batch)
    return max(call.alive_bytes for call in recorder.trace.calls)


def _row(plan: Plan, expected: float, found: float, whole: float) -> Row:
    what = {
        "plan": str(plan),
        "MiB": f"{found / 2**20:.2f}",
        "of those with recompute=none": f"{found / whole:.0%}",
        "forecast": f"{expected / 2**20:.2f}",
    }
    error = expected / found - 1
    return tell(Row(what=what, value=abs(error), text=f"{error:+.1%}", limit=LIMIT, detail={"bytes": found}))


if __name__ == "__main__":
    raise SystemExit(main())
