"""Jobs that cannot be cut as a plan asks: they fall back by themselves and train to the numbers of one device."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon import Job
from echelon.engine.run import Run
from echelon.flow.job_source import JobSource
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.world import World

WIDTH = 8


class Blocks(nn.Module):
    """Blocks one after another; what a case does otherwise, it overrides."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Outside(Blocks):
    """Reads the weights of a block that does not run."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.blocks[1][0].weight.square().mean())


class Inner(Blocks):
    """Calls what lies in a block, not the block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block[2](block[0](x).relu())
        return self.head(x)


class Dropped(Blocks):
    """Leaves out a block now and then."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.7:
                x = x + block(x)
        return self.head(x)


class Adapters(Blocks):
    """A block for each language; few samples speak most of them."""

    def forward(self, x: Tensor, texts: list[str]) -> Tensor:
        for language in sorted(set(texts)):
            rows = torch.tensor([number for number, text in enumerate(texts) if text == language])
            x = x.index_add(0, rows, self.blocks[int(language)](x[rows]))
        return self.head(x)


class Teacher(Blocks):
    """Follows itself by an average, written past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Blocks().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        own = dict(self.named_parameters())
        for name, value in self.teacher.named_parameters():
            value.data.mul_(0.9).add_(own[name].data, alpha=0.1)
        return super().forward(x) - 0.5 * self.teacher(x)


class Clipped(Blocks):
    """Keeps its weights small, all at once."""

    def forward(self, x: Tensor) -> Tensor:
        torch._foreach_clamp_max_([value.data for value in self.blocks.parameters()], 0.2)
        return super().forward(x)


class Sloped(Blocks):
    """Takes a derivative with torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda x: super(Sloped, self).forward(x).square().sum())(x)
        return super().forward(x + 0.1 * slope)


class Empty(Blocks):
    """Holds a parameter without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


def orthogonal() -> nn.Module:
    model = Blocks()
    for block in model.blocks:
        nn.utils.parametrizations.orthogonal(block[0])
    return model


class Lazy(nn.Module):
    """Layers that take their sizes from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.LazyLinear(12), nn.LazyBatchNorm1d(), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


class Averaged(nn.Module):
    """Batch norms that average over all batches there were."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


@dataclass
class Hidden:
    """What a block gives."""

    x: Tensor
    note: str = "kept"


class Recording(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(self.inner(x).tanh())


class Recorded(nn.Module):
    """Blocks that give dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recording() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            given = block(x)
            assert given.note == "kept"
            x = x + given.x
        return self.head(x)


class Noisy(Blocks):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) + 0.1 * torch.randn(WIDTH, generator=self.numbers).to(x)
        return self.head(x)


class Growing(Blocks):
    """Calls one block more after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: 2 + self.steps // 2]:
            x = x + block(x)
        if self.training:
            self.steps += 1
        return self.head(x)


class GrowingOutside(Growing):
    """The same, and reads the weights of a block that does not run."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.blocks[1][0].weight.square().mean())


class Late(Blocks):
    """Leaves out a block once it has trained for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        for number, block in enumerate(self.blocks):
            if self.seen < 4 or number != 1:
                x = x + block(x)
        return self.head(x)


# Their batches


def _sample(number: int) -> tuple[Tensor, int, str]:
    numbers = torch.Generator().manual_seed(number)
    return torch.randn(WIDTH, generator=numbers), number % 3, str(max(0, number - 12) % 4)


SAMPLES = [_sample(number) for number in range(16)]


def _plain(samples: list[Any]) -> Any:
    return torch.stack([x for x, _, _ in samples]), torch.tensor([y for _, y, _ in samples])


@dataclass(frozen=True)
class Batch:
    """A batch as people write them."""

    x: Tensor
    y: Tensor
    texts: tuple[str, ...]


def _record(samples: list[Any]) -> Batch:
    return Batch(*_plain(samples), tuple(text for _, _, text in samples))


def _encoding(samples: list[Any]) -> Any:
    from transformers import BatchEncoding

    x, y = _plain(samples)
    return BatchEncoding({"x": x, "y": y})


def _texts(samples: list[Any]) -> Any:
    x, y = _plain(samples)
    return x, [text for _, _, text in samples], y


def _job(model: Callable[[], nn.Module], collate: Callable[..., Any] = _plain, **given: Any) -> Job:
    target = given.pop("target", lambda batch: batch[-1])
    return Job(
        model=model,
        loss=lambda output, batch: F.cross_entropy(output, target(batch)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        data=SAMPLES,
        collate=collate,
        batch_size=8,
        steps=3,
        **given,
    )


JOBS: dict[str, Callable[[], Job]] = {
    "plain": lambda: _job(Blocks),
    "outside": lambda: _job(Outside),
    "inner": lambda: _job(Inner),
    "dropped": lambda: _job(Dropped),
    "adapters": lambda: _job(Adapters, _texts),
    "teacher": lambda: _job(Teacher),
    "clipped": lambda: _job(Clipped),
    "sloped": lambda: _job(Sloped),
    "empty": lambda: _job(Empty),
    "orthogonal": lambda: _job(orthogonal),
    "lazy": lambda: _job(Lazy),
    "averaged": lambda: _job(Averaged),
    "scripted": lambda: _job(lambda: torch.jit.script(Blocks())),
    "recorded": lambda: _job(Recorded),
    "noisy": lambda: _job(Noisy),
    "growing": lambda: _job(Growing),
    "growing outside": lambda: _job(GrowingOutside),
    "late": lambda: _job(Late),
    "record": lambda: _job(Blocks, _record, target=lambda batch: batch.y, inputs=lambda batch: ((batch.x,), {})),
    "encoding": lambda: _job(Blocks, _encoding, target=lambda batch: batch["y"]),
}


def settled(name: str, plan: str) -> tuple[Plan, str]:
    """The plan that a job runs under where `plan` is asked for, and what is said about it."""
    subject = JobSource(JOBS[name]())
    return subject.adapt_plan(from_text(plan), subject.try_profile(), None)


def outcome(world: World, name: str, document: str, own: bool = False) -> Any:
    """Losses and parameters of a job under a plan document; the error's type and text where it fails."""
    run: Run | None = None
    try:
        run = Run(JOBS[name](), Plan.from_json(document), world, dtype=None if own else torch.float64)
        losses = [float(run.step(batch).loss) for batch in run.batches()]
        state = run.gather_full_state()
        return losses, None if state is None else state.parameters
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        if run is not None:
            run.close()


def outcomes(world: World, cases: list[tuple[str, str]]) -> list[Any]:
    """Of several, one after another."""
    return [outcome(world, *case) for case in cases]
