"""The GPT of `gpt-axes` cut by hand, with torch's own API: what somebody writes who knows the model and the axes.

Each starts from the values that echelon starts from and makes a step from (inputs, targets); `advance` feeds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from bench.workloads import HeadGPT, Workload
from echelon.plan.batch_split import split_batch
from echelon.plan.plan import Plan
from echelon.world import World


class ByHand(ABC):
    """A training that was written for one axis."""

    name = "by hand"
    optimizer: torch.optim.Optimizer

    def __init__(self, workload: Workload, world: World, plan: Plan) -> None:
        self.workload = workload
        self._batches = workload.batches(world.rank if plan.mesh.dp > 1 else 0, plan.mesh.dp)

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.step(*next(self._batches))

    @abstractmethod
    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """One training step on this rank's part of a batch; the loss, where it is computed."""

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        del self.optimizer

    def built(self) -> HeadGPT:
        model = self.workload.build()
        assert isinstance(model, HeadGPT)
        return model


class Tensors(ByHand):
    """tp: `parallelize_module`, columns into rows, the vocabulary cut at both ends, `loss_parallel`."""

    def __init__(self, workload: Workload, world: World, plan: Plan) -> None:
        super().__init__(workload, world, plan)
        mesh = init_device_mesh("cpu", (world.size,))
        self.model = self.built()
        for block in self.model.blocks:
            _deal_heads(block.qkv, world.size)
            columns = {"qkv": ColwiseParallel(), "up": ColwiseParallel()}
            parallelize_module(block, mesh, columns | {"out": RowwiseParallel(), "down": RowwiseParallel()})
        logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(self.model, mesh, {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": logits})
        # A fused step takes tensors of one kind at a time.
        parameters = list(self.model.parameters())
        cut = [{"params": [each for each in parameters if isinstance(each, DTensor) is kind]} for kind in (True, False)]
        self.optimizer = workload.optimizer(cut, plan.fused or None)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = self.workload.loss(self.model(inputs), targets)
            loss.backward()
        self.update()
        return loss


@torch.no_grad()
def _deal_heads(qkv: Any, ranks: int) -> None:
    """Order the rows of a fused projection such that an even cut gives each rank q, k and v of its own heads."""
    for value in (qkv.weight, qkv.bias):
        value.copy_(value.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2))


class Stages(ByHand):
    """pp: the first and the second half of the layers as modules, torch's 1F1B."""

    def __init__(self, workload: Workload, world: World, plan: Plan) -> None:
        super().__init__(workload, world, plan)
        whole = self.built()
        # Units are tokens, positions, and then the blocks.
        self.model = _Half(whole, world.rank, plan.pipeline.stages[0] - 2)
        self.first, self.last = world.rank == 0, world.rank == world.size - 1
        micros = split_batch(workload.batch, 1, plan.micro)[0]
        inputs, _ = workload.samples()
        tokens = torch.empty(micros[0].size, inputs.shape[1], dtype=inputs.dtype, device="meta")
        between = torch.empty(*tokens.shape, whole.tokens.embedding_dim, device="meta", requires_grad=True)
        logits = torch.empty(*tokens.shape, whole.tokens.num_embeddings, device="meta", requires_grad=True)
        stage = PipelineStage(
            self.model,
            world.rank,
            world.size,
            torch.device("cpu"),
            input_args=(tokens if self.first else between,),
            output_args=(logits if self.last else between,),
        )
        self.schedule = Schedule1F1B(stage, len(micros), loss_fn=workload.loss)
        self.optimizer = workload.optimizer(self.model.parameters(), plan.fused or None)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        given = (inputs,) if self.first else ()
        wanted: dict[str, Any] = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*given, **wanted, return_outputs=False)
        self.update()
        return torch.stack(losses).mean() if self.last else None


class _Half(nn.Module):
    """The model's beginning up to a block, or the rest of it."""

    def __init__(self, model: HeadGPT, rank: int, block: int) -> None:
        super().__init__()
        self.begins = rank == 0
        if self.begins:
            self.tokens, self.positions, self.blocks = model.tokens, model.positions, model.blocks[:block]
        else:
            self.blocks, self.norm, self.head = model.blocks[block:], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.begins:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.begins else self.head(self.norm(x))


class Sharded(ByHand):
    """zero=3: `fully_shard` on each block, then on the model."""

    def __init__(self, workload: Workload, world: World, plan: Plan) -> None:
        super().__init__(workload, world, plan)
        mesh = init_device_mesh("cpu", (world.size,))
        self.model = self.built()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        # What belongs to no block is the last of forward and the first of backward.
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        self.optimizer = workload.optimizer(self.model.parameters(), plan.fused or None)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.workload.loss(self.model(inputs), targets)
        loss.backward()
        self.update()
        return loss


BY_HAND: dict[str, type[ByHand]] = {"tp": Tensors, "pp": Stages, "zero": Sharded}
