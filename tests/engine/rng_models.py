"""Random numbers under the tensor axis, called on every rank of the pool."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.engine.parallel.shard_layout import to_local
from echelon.engine.parallel.tensor_parallel import find_tp_shards, install_tensor_parallel, shard_parameters
from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.engine.process_groups import WorldCommunicator
from echelon.engine.run import Run
from echelon.partition.find_sequence_parallel import find_segments
from echelon.partition.find_tp import find_tensor_cuts
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.world import World
from tests.engine.sequences import Attention, numbers
from tests.zoo import ZOO


class Noisy(nn.Module):
    """Dropout before a pair, in it and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.behind = nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5)
        self.attention, self.up, self.down = Attention(False), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.behind(self.down(self.inside(F.gelu(self.up(self.before(x))))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Noisy() for _ in range(2)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def masks(world: World, sequence: bool, length: int) -> dict[str, Tensor]:
    """By dropout, which numbers it kept here."""
    ranks = WorldCommunicator(world, torch.device("cpu"))
    try:
        axis = TPCommunicator(ranks.create_axes(Mesh(tp=world.size))[0]["tp"])
        torch.manual_seed(1)
        model = Model().double()
        x = numbers(2, length, 12)

        def step() -> Tensor:
            return (model(x) * numbers(2, length, 12, seed=9)).sum()

        model.eval()
        placements = find_tensor_cuts(model, step, axis.size).placements
        found = find_segments(model, step, axis.size, placements) if sequence else None
        kept = find_tp_shards(model, placements, axis)
        install_tensor_parallel(model, placements, axis, found.segments if found else ())
        shard_parameters(model, kept)
        seen: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(lambda _, __, out, path=path: seen.update({path: out != 0}))
        torch.manual_seed(2)
        model.train()(x)
        return seen
    finally:
        ranks.close()


def trained(world: World, name: str, plan: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """A zoo model after some steps with its dropout: the losses, and the parameters that are whole on each rank of tp."""
    with Run(ZOO[name](), Plan.from_json(plan), world) as run:
        losses = [run.step(batch).read()[0] for batch in run.batches(steps)]
        whole = {n: to_local(p.detach()).clone() for n, p in run.model.named_parameters() if n not in run.tp_shards}
        return losses, whole


def resumed(world: World, name: str, plan: str, folder: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same in two runs."""
    with Run(ZOO[name](), Plan.from_json(plan), world) as run:
        losses = [run.step(batch).read()[0] for batch in run.batches(steps // 2)]
        run.save(folder)
    with Run(ZOO[name](), Plan.from_json(plan), world) as run:
        run.load(folder)
        losses += [run.step(batch).read()[0] for batch in run.batches(steps)]
        whole = {n: to_local(p.detach()).clone() for n, p in run.model.named_parameters() if n not in run.tp_shards}
        return losses, whole
