"""Schedules, optimizers and forwards that read or replace what a plan splits, and what a run says of it. Runs inside rank processes too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules
from torch.optim.lr_scheduler import LambdaLR, SequentialLR
from torch.utils.data import TensorDataset

from echelon.engine.run import Run
from echelon.errors import DivergenceError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.testing.models import MLP
from echelon.world import World


def make_job(**changes: Any) -> Job:
    """Four steps."""
    draw = torch.Generator().manual_seed(0)
    job = Job(
        model=lambda: MLP(width=12, layers=3, inputs=8, classes=4),
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        data=TensorDataset(torch.randn(64, 8, generator=draw), torch.randint(0, 4, (64,), generator=draw)),
        batch_size=16,
        epochs=1,
    )
    return replace(job, **changes)


def by(read: Callable[[Any], Any], *, after: int = 2) -> Callable[[Any], Any]:
    """A schedule whose rate follows from what `read` gives of the optimizer, from a step on."""

    def schedule(optimizer: Any) -> Any:
        return LambdaLR(optimizer, lambda step: 1.0 if step < after else 1 / (1 + abs(float(read(optimizer)))))

    return schedule


def _parameters(optimizer: Any) -> list[Any]:
    return [value for group in optimizer.param_groups for value in group["params"]]


def _norm(optimizer: Any) -> Tensor:
    return sum(value.detach().norm() for value in _parameters(optimizer))  # type: ignore[return-value]


def _shapes(optimizer: Any) -> float:
    return 0.1 * sum(value.ndim + (value.grad is None) + value.shape[0] * 0 for value in _parameters(optimizer)[:1])


def _uncut(optimizer: Any) -> Tensor:
    """The bias of the second layer, which tp cuts by rows."""
    return next(value for value in _parameters(optimizer) if value.shape == (12,)).detach().norm()


class Normed(torch.optim.SGD):
    """Steps on whole tensors, each of which one rank owns under zero."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for value in _parameters(self):
            value.div_(1 + 0.01 * value.norm())


class LateTie(nn.Module):
    """Ties a weight to another one in its second forward; `restored`: for that forward only."""

    def __init__(self, *, restored: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.restored, self.calls = restored, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        before = self.b.weight
        if self.calls == 2:
            self.b.weight = self.a.weight
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        if self.restored and self.calls == 2:
            self.b.weight = before
        return self.out(x)


class OwnSetattr(nn.Module):
    """FSDP2 assigns to its attributes, because it has a `__setattr__` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class TiedAdapters(nn.Module):
    """Ties a layer that tp cuts in its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.out = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 2:
            self.adapters[1][0].weight = self.adapters[0][0].weight  # type: ignore[index]
        return self.out(self.adapters[0](x) - 2 * self.adapters[1](x))


#: name -> (job, plan, what the error says; "" where there is none, steps).
CASES: dict[str, tuple[Callable[[], Job], str, str, int]] = {
    "weights under pp": (lambda: make_job(lr_schedule=by(_norm)), "pp=2 micro=4", "(LambdaLR) reads parameter ", 1),
    "weights under tp": (lambda: make_job(lr_schedule=by(_norm)), "tp=2", "(LambdaLR) reads parameter ", 1),
    "weights at the start": (lambda: make_job(lr_schedule=by(_norm, after=0)), "pp=2 micro=4", "lr_schedule= reads", 0),
    "weights by data": (
        lambda: make_job(lr_schedule=by(lambda each: _parameters(each)[0].data[0, 0])),
        "pp=2 micro=4",
        "step 2: lr_schedule= (LambdaLR) reads parameter",
        1,
    ),
    "many at once": (
        lambda: make_job(lr_schedule=by(lambda each: torch._foreach_norm(_parameters(each))[0].detach())),
        "tp=2",
        "reads parameter",
        1,
    ),
    "gradients": (
        lambda: make_job(lr_schedule=by(lambda each: _parameters(each)[0].grad.norm())),
        "pp=2 micro=4",
        "reads the gradient of",
        1,
    ),
    "optimizer state": (
        lambda: make_job(lr_schedule=by(lambda each: each.state[_parameters(each)[0]]["momentum_buffer"].norm())),
        "pp=2 micro=4",
        "reads momentum_buffer of",
        1,
    ),
    "shapes": (lambda: make_job(lr_schedule=by(_shapes)), "pp=2 micro=4", "", 4),
    "a rate that is a tensor": (
        lambda: make_job(
            optimizer=lambda params: torch.optim.SGD(params, lr=torch.tensor(0.1)),
            lr_schedule=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        ),
        "pp=2 micro=4",
        "",
        4,
    ),
    "whole under tp": (lambda: make_job(lr_schedule=by(_uncut)), "tp=2", "", 4),
    "weights under dp": (lambda: make_job(lr_schedule=by(_norm)), "dp=2", "", 4),
    "weights under zero": (lambda: make_job(lr_schedule=by(_norm)), "dp=2 zero=3", "", 4),
    "whole tensors under zero": (
        lambda: make_job(optimizer=lambda params: Normed(params, lr=0.1), lr_schedule=by(_norm)),
        "dp=2 zero=3",
        "reads parameter",
        1,
    ),
    "tied late under zero": (
        lambda: make_job(model=LateTie),
        "dp=2 zero=3",
        "step 2: forward replaces parameter b.weight",
        1,
    ),
    "tied late under zero=1": (lambda: make_job(model=LateTie), "dp=2 zero=1", "replaces parameter b.weight", 1),
    "tied late under dp": (lambda: make_job(model=LateTie), "dp=2", "", 4),
    "tied late, cut": (lambda: make_job(model=TiedAdapters), "tp=2", "replaces parameter adapters.1.0.weight", 1),
    "restored": (lambda: make_job(model=lambda: LateTie(restored=True)), "dp=2 zero=3", "", 4),
    "own setattr": (
        lambda: make_job(model=lambda: nn.Sequential(OwnSetattr(), nn.Linear(8, 4))),
        "dp=2 zero=3",
        "",
        4,
    ),
    "loss on the last stage": (lambda: shared("global dict"), "pp=2 micro=16", "lr_schedule= reads notes.SEEN", 0),
}

SEEN = {"mean": 1.0}
MEAN = 1.0
STEP = 0


class Note:
    """What a loss and a schedule share."""

    def __init__(self) -> None:
        self.mean, self.other, self.tensor = 1.0, 1.0, torch.ones(())


class ByNote(torch.optim.SGD):
    """Steps with a rate that a loss decides."""

    def __init__(self, params: Any, note: Note) -> None:
        super().__init__(params, lr=0.1)
        self.note = note

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.1 / self.note.mean
        super().step()


def _note_in_dict(value: float) -> None:
    SEEN["mean"] = 0.9 * SEEN["mean"] + 0.1 * value


def _note_in_global(value: float) -> None:
    global MEAN
    MEAN = 0.9 * MEAN + 0.1 * value


def _count(value: float) -> None:
    global STEP
    STEP += 1


class ByGlobal(LambdaLR):
    """Reads a global in a method."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, lambda step: 1.0)

    def get_lr(self) -> list[Any]:
        return [rate / (1 + MEAN) for rate in self.base_lrs]


def shared(name: str) -> Job:
    """A loss that notes its values somewhere, and who reads that."""
    note, mean = Note(), 1.0

    def in_closure(value: float) -> None:
        nonlocal mean
        mean = 0.9 * mean + 0.1 * value

    def in_object(value: float) -> None:
        note.mean = 0.9 * note.mean + 0.1 * value

    def in_tensor(value: float) -> None:
        note.tensor.mul_(0.9).add_(value, alpha=0.1)

    def made_late(value: float) -> None:
        made_late.value = value  # type: ignore[attr-defined]

    def anneal(step: int) -> float:
        note.mean = 1 / (1 + step)
        return note.mean

    def hooked(params: Any) -> Any:
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.register_step_pre_hook(lambda each, *_: each.param_groups[0].update(lr=0.1 / note.mean))
        return optimizer

    def chained(optimizer: Any) -> Any:
        two = [LambdaLR(optimizer, lambda step: 1.0), LambdaLR(optimizer, lambda step: 1 / note.mean)]
        return SequentialLR(optimizer, two, [3])

    def lambda_lr(factor: Callable[[int], float]) -> dict[str, Any]:
        return {"lr_schedule": lambda optimizer: LambdaLR(optimizer, factor)}

    notes, changes = {
        "global dict": (_note_in_dict, lambda_lr(lambda step: 1 / (1 + SEEN["mean"]))),
        "global": (_note_in_global, {"lr_schedule": ByGlobal}),
        "closure": (in_closure, lambda_lr(lambda step: 1 / (1 + mean))),
        "object": (in_object, lambda_lr(lambda step: 1 / (1 + note.mean))),
        "tensor": (in_tensor, lambda_lr(lambda step: 1 / (1 + float(note.tensor)))),
        "chain": (in_object, {"lr_schedule": chained}),
        "optimizer": (in_object, {"optimizer": lambda params: ByNote(params, note)}),
        "hook": (in_object, {"optimizer": hooked}),
        "made late": (made_late, lambda_lr(lambda step: 1 / (1 + getattr(made_late, "value", 0.0)))),
        # Fine:
        "another attribute": (in_object, lambda_lr(lambda step: 1 / (1 + note.other))),
        "nothing noted": (lambda value: note.mean and None, lambda_lr(lambda step: 1 / (1 + note.mean))),
        "schedule to loss": (lambda value: note.mean and None, lambda_lr(anneal)),
        "only counted": (_count, lambda_lr(lambda step: 1 / (1 + step))),
        "like an attribute": (_count, lambda_lr(lambda step: 1 / (1 + getattr(note, "STEP", step)))),
    }[name]

    def loss(output: Tensor, batch: Any) -> Tensor:
        value = F.cross_entropy(output, batch[-1])
        notes(float(value.detach()))
        return value

    return make_job(loss=loss, **changes)


def outcome(world: World, job: Job, plan: str) -> tuple[str, int]:
    """What a run's error says ("" where it trained), and the steps that it made."""
    steps = 0
    try:
        with Run(job, complete(from_text(plan), job), world) as run:
            for batch in run.batches():
                run.step(batch)
                steps += 1
    except DivergenceError as error:
        return str(error), steps
    return "", steps


def outcomes(world: World, names: list[str]) -> dict[str, tuple[str, int]]:
    before = set(torch_modules._global_parameter_registration_hooks)  # of other tests' runs in this process
    found = {name: outcome(world, CASES[name][0](), CASES[name][1]) for name in names}
    assert set(torch_modules._global_parameter_registration_hooks) <= before, "a closed run left its hook"
    return found
