"""Jobs whose blocks are computed again, and what ranks are asked to do with them. Everything here runs inside rank processes too."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from bench.workloads import HeadGPT
from echelon.engine.run import Run
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.testing.models import GPT, ResNet
from echelon.trials.op_recorder import record_ops
from echelon.world import World
from tests.engine.jobs import classes, numbers


def gpt(
    *, dropout: float = 0.0, layers: int = 4, width: int = 16, context: int = 9, batch: int = 8, kind: Any = None
) -> Job:
    kind = kind or partial(GPT, width=width, layers=layers, dropout=dropout)
    text = torch.randint(1, 32, (3 * batch, context), generator=torch.Generator().manual_seed(2))
    return Job(
        model=lambda: kind(vocab=32, context=context, heads=2),
        loss=lambda output, batch: F.cross_entropy(output[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()),
        inputs=lambda batch: ((batch[0],), {}),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        data=TensorDataset(text),
        batch_size=batch,
        epochs=1,
    )


def resnet() -> Job:
    return Job(
        model=lambda: ResNet(width=4, classes=4),
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=TensorDataset(numbers(24, 3, 8, 8), classes(24)),
        batch_size=8,
        epochs=1,
    )


class Careless(nn.Module):
    """Changes in place what its products gave, and drops attention weights before it draws once more."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), dropout

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.up(x), inplace=True)
        if self.dropout:
            parts = [part.unsqueeze(0).unsqueeze(0) for part in wide.chunk(2, -1)]
            seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[1], dropout_p=self.dropout)
            wide = wide * F.dropout(seen[0, 0], self.dropout).repeat(1, 2)
        y = self.down(wide)
        y += x
        return y.tanh()


def careless(dropout: float = 0.0) -> Job:
    return Job(
        model=lambda: nn.Sequential(*(Careless(dropout) for _ in range(3))),
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=TensorDataset(numbers(24, 16), classes(24)),
        batch_size=8,
        epochs=1,
    )


class Moving(nn.Module):
    """Reads buffers that it changes: the vectors of a spectral norm, and a running scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.product = parametrizations.spectral_norm(nn.Linear(16, 16))
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x / self.scale)
        self.scale = 0.9 * self.scale + 0.1 * y.detach().abs().mean(0)
        return y.tanh() + x


class Making(nn.Module):
    """Makes the buffer that it reads from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(16, 16)
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x if self.scale is None else x / self.scale)
        if self.scale is None:
            self.scale = 1 + y.detach().abs().mean(0)
        return y.tanh() + x


def moving(block: type[nn.Module] = Moving) -> Job:
    return Job(
        model=lambda: nn.Sequential(*(block() for _ in range(4))),
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=TensorDataset(numbers(24, 16), classes(24)),
        batch_size=8,
        epochs=1,
    )


JOBS = {
    "moving": moving,
    "making": lambda: moving(Making),
    "gpt": gpt,
    "cut heads": lambda: gpt(kind=partial(HeadGPT, width=16, layers=4)),
    "resnet": resnet,
    "dropout": lambda: gpt(dropout=0.5),
    "in place": careless,
    "attention dropout": lambda: careless(dropout=0.5),
}


def trained(world: World, name: str, plan: str) -> dict[str, Any]:
    """Losses, and on rank 0 parameters and buffers, after an epoch in float64."""
    with Run(JOBS[name](), Plan.from_json(plan), world, dtype=torch.float64) as run:
        losses = [float(run.step(batch).loss) for batch in run.batches()]
        state = run.gather_full_state()
    return {"losses": losses} | ({} if state is None else {"parameters": state.parameters, "buffers": state.buffers})


def peak(world: World, job: Job, plan: Plan) -> float:
    """Bytes that are alive at the peak of a step beside parameters and their gradients."""
    with Run(job, plan, world) as run:
        (batch,) = run.batches(1)
        loss = run.backward(batch)  # gradients are there from now on
        run.update(loss, batch.samples)
        for parameter in run.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with record_ops(run.model, batch.samples) as recorder:
            for value in (*run.model.parameters(), *run.model.buffers()):
                recorder.ignore_storage(value)
            run.backward(batch)
    return max(call.alive_bytes for call in recorder.trace.calls)
