"""State that forward begins to change, or makes, after the first steps, and state whose first values hide its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.adversary.jobs.buffers import PER_CALL, PER_RANK, Observed
from bench.adversary.kit import CLASSES, WIDTH, plain
from bench.adversary.spec import Spec, job

#: Plans under which a plain loop calls the model with parts of a batch.
PARTED = f"{PER_RANK} pp"


class Late(Observed):
    """Shifts its features by `state`, which `note` changes from call number `first` on."""

    def __init__(self, note: Callable[[Any, Tensor], None], first: int, state: Tensor | None) -> None:
        super().__init__()
        self.note, self.first = note, first
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("state", state)

    def observe(self, x: Tensor) -> Tensor:
        out = x if self.state is None else x + 0.1 * self.state.to(x).nan_to_num(neginf=0.0).tanh()
        if self.training:
            with torch.no_grad():
                if self.calls >= self.first:
                    self.note(self, x)
                self.calls += 1
        return out


def late(note: Callable[[Any, Tensor], None], first: int, state: Tensor | None) -> Spec:
    return Spec(**plain(model=lambda: Late(note, first, None if state is None else state.clone()).double()))


def centre(model: Any, x: Tensor) -> None:
    model.state.lerp_(x.mean(0), 0.3)


def moving_sum(model: Any, x: Tensor) -> None:
    model.state.mul_(0.9).add_(0.1 * (x > 0).to(x).sum(0))


def made(model: Any, x: Tensor) -> None:
    model.state = x.mean(0) if model.state is None else 0.5 * model.state + x.mean(0)


def table(model: Any, x: Tensor) -> None:
    if model.state is None:
        model.state = torch.arange(float(WIDTH)).to(x).cos()


def largest(model: Any, x: Tensor) -> None:
    model.state.copy_(torch.maximum(model.state, x.amax(0)))


def counted(model: Any, x: Tensor) -> None:
    model.state.add_((x > 0).sum(0))


@job("a moving average that begins at the fourth step", refusable=PER_CALL)
def late_centre() -> Spec:
    return late(centre, 3, torch.zeros(WIDTH))


@job("a histogram that begins at the fourth step", refusable=PARTED)
def late_histogram() -> Spec:
    return late(counted, 3, torch.zeros(WIDTH, dtype=torch.int64))


@job("moving sums that start at zero: the first step shows a plain sum", refusable=PARTED)
def moving_sums() -> Spec:
    return late(moving_sum, 0, torch.zeros(WIDTH))


@job("moving sums that start at zero at the fourth step", refusable=PARTED)
def late_moving_sums() -> Spec:
    return late(moving_sum, 3, torch.zeros(WIDTH))


@job("a buffer that forward makes at its first call and updates later", refusable=PARTED)
def made_at_once() -> Spec:
    return late(made, 0, None)


@job("a buffer that forward makes at the fourth step and updates later", refusable=PARTED)
def made_late() -> Spec:
    return late(made, 3, None)


@job("a constant table that forward makes at the fourth step", refusable=PER_CALL)
def table_made_late() -> Spec:
    return late(table, 3, None)


@job("an observer of ranges that starts at minus infinity", refusable=PER_CALL)
def range_from_infinity() -> Spec:
    return late(largest, 0, torch.full((WIDTH,), -torch.inf))


class LateTeacher(nn.Module):
    """A teacher that follows the student from the fourth step on; the student learns from it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                if self.calls >= 3:
                    for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                        mine.lerp_(theirs, 0.3)
                self.calls += 1
        out: Tensor = self.student(x) - 0.5 * self.teacher(x)
        return out


@job("a frozen teacher that begins to follow the student at the fourth step", refusable="micro pp zero tp")
def late_teacher() -> Spec:
    return Spec(**plain(model=lambda: LateTeacher().double()))
