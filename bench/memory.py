"""What a rank holds of a model's training state under each ZeRO stage: GPT 6 x 256 on 1, 2 and 4 ranks.

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

from bench.common import Row, publish
from bench.workloads import WORKLOADS
from echelon.testing.ranks import Pool
from echelon.world import World

LIMIT = 1.05  # the project's: the largest rank within 5 % of its even part


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every stage; 0 when the fully sharded ones keep their limit."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description="training state held by each rank")
    parser.add_argument("--only", default="gpt", help="workloads, separated by commas: gpt, resnet, mlp")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    rows: list[Row] = []
    with Pool() as pool:
        for name in asked.only.split(","):
            alone = pool.run(1, hold, name, 0)[0]
            rows.append(_row(name, 1, 0, alone, alone))
            for ranks in map(int, asked.ranks.split(",")):
                for zero in range(4):
                    held = pool.run(ranks, hold, name, zero, timeout=240)
                    rows.append(_row(name, ranks, zero, max(held, key=lambda one: one["state"]), alone))
    notes = [
        "largest rank, MiB; the ratio is to one process's state divided by the ranks, held to its limit where all is sharded"
    ]
    return publish("Training state per rank", rows, json_path=asked.json, notes=notes)


def hold(world: World, name: str, zero: int) -> dict[str, int]:
    """Bytes that this rank holds after backward of the second step."""
    from echelon.engine.run import Run
    from echelon.plan.mesh import Mesh
    from echelon.plan.plan import Plan

    gc.collect()
    before = _live()
    run = Run(WORKLOADS[name].job(), Plan(mesh=Mesh(dp=world.size), zero=zero), world)
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
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def _live() -> int:
    return _bytes([thing for thing in gc.get_objects() if isinstance(thing, Tensor) and type(thing) is not DTensor])


def _row(name: str, ranks: int, zero: int, held: dict[str, int], alone: dict[str, int]) -> Row:
    part = held["state"] / (alone["state"] / ranks)
    columns = {part: f"{size / 2**20:.2f}" for part, size in held.items()}
    what = {"workload": name, "ranks": str(ranks), "zero": str(zero)} | columns
    limit = LIMIT if zero == 3 else None
    return Row(what=what, value=part, text=f"{part:.4f} of 1/{ranks}", limit=limit, detail=held)


if __name__ == "__main__":
    raise SystemExit(main())
