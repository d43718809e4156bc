"""Models that keep state between calls, in every way that people do, and a loop that calls each once a step. Runs inside rank processes too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.engine.run import Run
from echelon.errors import EchelonError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.world import World


class Keeping(nn.Module):
    """A layer whose output also depends on what earlier steps left in `state`; `note` changes it."""

    def __init__(self, note: Callable[[Any, Tensor], None], state: Tensor, **declared: str) -> None:
        super().__init__()
        self.line, self.note = nn.Linear(8, 4), note
        self.register_buffer("state", state)
        if declared:
            self.buffer_reductions = declared

    def forward(self, x: Tensor) -> Tensor:
        out = self.line(x) + 0.1 * self.state.double().nan_to_num(neginf=0.0).mean().to(x)
        if self.training:
            self.note(self, x.detach())
        return out


class KeepingLate(nn.Module):
    """Like `Keeping`, but `note` changes the state, or makes it where it is None, from call number `first` on (the step's, from 0)."""

    def __init__(
        self, note: Callable[[Any, Tensor], None], first: int, state: Tensor | None, rule: str | None = None
    ) -> None:
        super().__init__()
        self.line, self.note, self.first = nn.Linear(8, 4), note, first
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("state", state)
        if rule is not None:
            self.buffer_reductions = {"state": rule}

    def forward(self, x: Tensor) -> Tensor:
        out = self.line(x)
        if self.state is not None:
            out = out + 0.1 * self.state.double().mean().to(x)
        if self.training:
            if self.calls >= self.first:
                self.note(self, x.detach())
            self.calls += 1
        return out


class Teacher(nn.Module):
    """A teacher follows the student at every call from number `first` on, and the student learns from it."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)
        self.first = first
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                weight = self.teacher.weight if self.first else self.teacher.weight.data  # which has no version
                if self.calls >= self.first:
                    weight.lerp_(self.student.weight, 0.3)
                self.calls += 1
        return self.student(x) - 0.5 * self.teacher(x)


def _centre(model: Any, x: Tensor) -> None:
    model.state.lerp_(x.mean(0), 0.3)


def _made(model: Any, x: Tensor) -> None:
    model.state = x.mean(0) if model.state is None else model.state * 0.5 + x.mean(0)


def _counted(model: Any, x: Tensor) -> None:
    model.state = (x > 0).sum(0) if model.state is None else model.state + (x > 0).sum(0)


def _made_for_some(model: Any, x: Tensor) -> None:
    if x[0, 0] > 0:
        _made(model, x)


def _queue(model: Any, x: Tensor) -> None:
    model.state.copy_(torch.cat([x, model.state])[: len(model.state)])


def _codebook(model: Any, x: Tensor) -> None:
    model.state.mul_(0.9).add_(0.1 * (x > 0).to(x).sum(0))


def _sum_then_mean(model: Any, x: Tensor) -> None:
    if model.calls < 1:
        model.state.add_(x.sum(0))
    else:
        model.state.lerp_(x.mean(0), 0.3)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "centre": lambda: Keeping(_centre, torch.zeros(8)),
    "calls": lambda: Keeping(lambda m, x: m.state.add_(1), torch.zeros((), dtype=torch.int64)),
    "samples": lambda: Keeping(lambda m, x: m.state.add_(len(x)), torch.zeros((), dtype=torch.int64)),
    "positive": lambda: Keeping(lambda m, x: m.state.add_((x > 0).sum(0)), torch.zeros(8)),
    "largest": lambda: Keeping(lambda m, x: m.state.copy_(torch.maximum(m.state, x.amax(0))), torch.zeros(8)),
    "range": lambda: Keeping(
        lambda m, x: m.state.copy_(torch.maximum(m.state, x.amax(0))), torch.full((8,), -torch.inf)
    ),
    "least": lambda: Keeping(lambda m, x: m.state.copy_(torch.minimum(m.state, x.amin(0))), torch.zeros(8)),
    "replaced": lambda: Keeping(lambda m, x: setattr(m, "state", m.state * 0.9 + 0.1 * x.mean(0)), torch.zeros(8)),
    "spectral": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6)), nn.Linear(6, 4)),
    "teacher": Teacher,
}
#: State that begins to change, or that forward makes.
LATE: dict[str, Callable[[], nn.Module]] = {
    "late centre": lambda: KeepingLate(_centre, 3, torch.zeros(8)),
    "late samples": lambda: KeepingLate(lambda m, x: m.state.add_(len(x)), 3, torch.zeros((), dtype=torch.int64)),
    "late largest": lambda: KeepingLate(
        lambda m, x: m.state.copy_(torch.maximum(m.state, x.amax(0))), 3, torch.zeros(8)
    ),
    "made at once": lambda: KeepingLate(_made, 0, None),
    "made late": lambda: KeepingLate(_made, 3, None),
    "counter made late": lambda: KeepingLate(_counted, 3, None),
    "table made late": lambda: KeepingLate(lambda m, x: setattr(m, "state", torch.arange(8.0).to(x)), 3, None),
    "late teacher": lambda: Teacher(3),
    "declared": lambda: KeepingLate(_centre, 3, torch.zeros(8), rule="mean"),
}
#: Those of them that a plan keeps; the others end the run by name.
KEPT_LATE = {
    "dp=1 micro=4": ("declared",),
    "dp=2": ("late centre", "made at once", "made late", "table made late", "late teacher", "declared"),
    "dp=2 zero=3": ("late centre", "made at once", "made late", "table made late", "declared"),
    "dp=2 micro=3": ("declared",),
}
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "queue": lambda: Keeping(_queue, torch.zeros(32, 8)),
    "codebook": lambda: Keeping(_codebook, torch.ones(8)),
    "codebook of zeros": lambda: Keeping(_codebook, torch.zeros(8)),
    "late queue": lambda: KeepingLate(_queue, 1, torch.zeros(32, 8)),
    "late codebook": lambda: KeepingLate(_codebook, 1, torch.zeros(8)),
    "made for some": lambda: KeepingLate(_made_for_some, 1, None),
    "sum then mean": lambda: KeepingLate(_sum_then_mean, 0, torch.zeros(8)),
}


def _job(name: str) -> Job:
    draw = torch.Generator().manual_seed(0)
    return Job(
        model=(MODELS | LATE | REFUSED)[name],
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda params: torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1),
        data=TensorDataset(torch.randn(41, 8, generator=draw), torch.randint(0, 4, (41,), generator=draw)),
        batch_size=15,
        epochs=2,
    )


def by_hand(name: str) -> dict[str, Tensor]:
    job = _job(name)
    run = Run(job, from_text("dp=1"), World(), dtype=torch.float64)
    model = copy.deepcopy(run.model)
    batches = [run.move_batch(micro.batch) for step in run.batches() for micro in step.micro_batches]
    run.close()
    optimizer: Any = job.optimizer(model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {key: value.detach() for key, value in model.state_dict().items()}


def trained(world: World, names: list[str], plan: str) -> dict[str, Any]:
    """Each model's state after training under a plan, or the error."""
    found: dict[str, Any] = {}
    for name in names:
        job = _job(name)
        try:
            with Run(job, complete(from_text(plan), job), world, dtype=torch.float64) as run:
                for batch in run.batches():
                    run.step(batch)
                state = run.gather_full_state()
                found[name] = None if state is None else {**state.parameters, **state.buffers}
        except EchelonError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
