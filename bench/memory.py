"""What a rank holds of a model's training state: under each ZeRO stage, and under tp=2 and pp=2.

    python -m bench.memory [--json memory.json]

Measured after backward of the second step, when parameters, gradients and optimizer state are all there. Bytes are those of
the storages that the tensors really occupy, padding included, each storage once; "all tensors" counts every live tensor
of the process but the data and one step's batch, to show that nothing is kept aside.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from bench.common import Row, among, publish, tell
from bench.workloads import WORKLOADS
from echelon.engine.run import Run
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World

LIMIT = 1.05  # the project's: the largest rank within 5 % of its even part
#: Cut over tp and pp; its head has a weight of its own.
CUT = "gpt-axes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every stage; 0 when all limits hold."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description="training state held by each rank")
    parser.add_argument("--only", type=among("zero", "axes"), default="zero,axes", help="parts, separated by commas")
    parser.add_argument(
        "--workload", type=among("gpt", "resnet", "mlp"), default="gpt", help="for the ZeRO stages, separated by commas"
    )
    parser.add_argument("--ranks", default="2,4", help="for the ZeRO stages, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    rows: list[Row] = []
    with RankPool() as pool:
        if "zero" in asked.only:
            stages = [f"dp={ranks} zero={zero}" for ranks in asked.ranks.split(",") for zero in range(4)]
            for name in asked.workload:
                rows += _states(pool, name, stages)
        if "axes" in asked.only:
            rows += _states(pool, CUT, ["tp=2", "pp=2 micro=2"])
    notes = [
        "largest rank, MiB; the ratio is to one process's state divided by the ranks, held to its limit where all is cut"
    ]
    return publish("Training state per rank", rows, json_path=asked.json, notes=notes)


def _states(pool: RankPool, name: str, texts: Sequence[str]) -> list[Row]:
    alone = pool.run(1, hold, name, Plan())[0]
    rows = [_row(name, Plan(), alone, alone)]
    for text in texts:
        plan = complete(from_text(text), WORKLOADS[name].job())
        held = pool.run(plan.ranks, hold, name, plan, timeout=240)
        rows.append(_row(name, plan, max(held, key=lambda one: one["state"]), alone))
    return rows


def hold(world: World, name: str, plan: Plan) -> dict[str, int]:
    """Bytes that this rank holds after backward of the second step."""
    gc.collect()
    before = _live()
    run = Run(WORKLOADS[name].job(), plan, world)
    batches = iter(run.batches())
    run.step(next(batches))
    run.backward(next(batches))
    parameters = list(run.model.parameters())
    state = [value for optimizer in run.optimizers for entry in optimizer.state.values() for value in entry.values()]
    parts: dict[str, Iterable[Any]] = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer": state,
    }
    held = {part: _bytes(tensors) for part, tensors in parts.items()}
    held["state"] = _bytes(tensor for tensors in parts.values() for tensor in tensors)
    batches.close()  # type: ignore[attr-defined]
    gc.collect()
    data = _bytes(run.job.data.tensors)
    held["all tensors"] = _live() - before - data
    run.close()
    return held


def _bytes(tensors: Iterable[Any]) -> int:
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            if storage.device.type != "meta":  # other stages' tensors, which have a shape and no numbers
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _live() -> int:
    return _bytes([thing for thing in gc.get_objects() if isinstance(thing, Tensor) and type(thing) is not DTensor])


def _row(name: str, plan: Plan, held: dict[str, int], alone: dict[str, int]) -> Row:
    ranks = plan.ranks
    part, weights = (held[each] / (alone[each] / ranks) for each in ("state", "parameters"))
    sizes = {each: f"{size / 2**20:.2f}" for each, size in held.items()}
    what = {"workload": name, "plan": str(plan)} | sizes
    cut = plan.zero == 3 or ranks > plan.mesh.dp
    text = f"{part:.4f} of 1/{ranks}\nparameters {weights:.4f}"
    return tell(Row(what=what, value=max(part, weights), text=text, limit=LIMIT if cut else None, detail=held))


if __name__ == "__main__":
    raise SystemExit(main())
