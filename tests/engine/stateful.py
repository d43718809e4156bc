"""Optimizers, schedules and models that keep state in every way that people do; run inside rank processes too."""

from __future__ import annotations

import math
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from echelon.engine.checkpoint.json_values import encode
from echelon.engine.run import Run
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.testing.models import MLP
from echelon.world import World
from tests.engine.jobs import mlp


class Nested(Optimizer):
    """Momentum in a list, bookkeeping of many types in a dict, per parameter."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-2, "mix": (0.5, [0.25, math.inf]), "name": "nested"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                if not state:
                    state["moments"] = [torch.zeros_like(value), (torch.zeros_like(value), 0)]
                    state["log"] = {"seen": 0, 3: None, "last": math.nan, "words": ("a", b"\0\1"), "kinds": {1, 2}}
                    state["recent"] = deque(maxlen=2)
                    state["rng"] = np.float64(0.5)
                    state["dtype"], state["text"] = torch.float32, "plain"
                first, (second, count) = state["moments"]
                first.mul_(0.9).add_(value.grad)
                second.mul_(0.99).add_(value.grad.square())
                state["moments"][1] = (second, count + 1)
                state["log"]["seen"] += 1
                state["recent"].append(count)
                state["rng"] = np.float64(state["rng"] * 0.9)
                value.sub_(first * group["lr"] * float(state["rng"]) / (count + 1))


class Shared(Optimizer):
    """A count, a rate and a tensor for all parameters together, under string keys."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = self.state["shared"]
        shared["count"] = shared.get("count", 0) + 1
        shared["decay"] = shared.get("decay", torch.ones(3)) * 0.5
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.sub_(value.grad, alpha=group["lr"] * shared["count"] * float(shared["decay"][0]))


class Looking(SGD):
    """Slow weights that its own `state_dict` adds."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, lr=1e-2, momentum=0.9)
        self.slow: list[Tensor] = []
        self.ticks = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        values = [value for group in self.param_groups for value in group["params"]]
        if not self.slow:
            self.slow = [value.detach().clone() for value in values]
        super().step()
        self.ticks += 1
        for slow, value in zip(self.slow, values, strict=True):
            slow.lerp_(value, 0.5)
            if self.ticks % 2 == 0:
                value.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": self.slow, "ticks": self.ticks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.slow, self.ticks = state_dict.pop("slow"), state_dict.pop("ticks")
        super().load_state_dict(state_dict)


class Forgetful(Looking):
    """Saves what it does not load."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        SGD.load_state_dict(self, {key: state_dict[key] for key in ("state", "param_groups")})


class Opaque(Shared):
    """Keeps an object of its own."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["shared"]["object"] = object()


class Shy(Opaque):
    """The same, and refuses to work on small parameters."""

    def step(self, closure: Any = None) -> None:
        if all(value.numel() < 50 for group in self.param_groups for value in group["params"]):
            raise RuntimeError("too small")
        super().step()


class Keeping(nn.Module):
    """A module with extra state: how often it was called, with what mean, in a dict; or as a tensor."""

    def __init__(self, tensor: bool = False) -> None:
        super().__init__()
        self.tensor, self.calls, self.scale = tensor, 0, torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.scale = self.scale * 0.9
        return x * self.scale[0] + 0.01 * self.calls

    def get_extra_state(self) -> Any:
        return torch.cat([self.scale, torch.tensor([float(self.calls)])]) if self.tensor else self._dict()

    def _dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "scale": self.scale, "kept": [("a", 1.5), None]}

    def set_extra_state(self, state: Any) -> None:
        if self.tensor:
            self.scale, self.calls = state[:2].clone(), int(state[2])
        else:
            assert state["kept"] == [("a", 1.5), None]
            self.calls, self.scale = state["calls"], state["scale"]


class Counting(nn.Module):
    """A counter and a flag that state_dict() does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.begun = 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        self.begun, first = True, not self.begun
        return x * (1 + 0.01 * self.calls + 0.5 * first)


class Caching(nn.Module):
    """A cache of tensors that state_dict() does not hold, and how much is in it: both start over together."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Tensor] = []
        self.filled = 0

    def forward(self, x: Tensor) -> Tensor:
        assert self.filled == len(self.cache)
        if self.training:
            self.cache.append(x.detach().mean())
            self.filled += 1
        return x


class Assorted(nn.Module):
    """State of many types that state_dict() does not hold; `share` is held elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.first, self.recent = np.float64(1), None, deque([0.0], maxlen=3)
        self.share: dict[str, Any] = {"calls": 0, "seen": [1, (2, "a")]}
        self.read = lambda held=self.share: held["calls"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.number = self.number * np.float64(0.99)
            self.first = 0.5 if self.first is None else self.first
            self.recent.append(len(self.recent) / 10)
            self.share["calls"] += 1
        return x * float(self.number) + 0.01 * (self.first or 0.0) + 0.001 * sum(self.recent) + 0.01 * self.read()


class Average:
    def __init__(self) -> None:
        self.value = 0.0


class Holding(nn.Module):
    """An object, generators, a cached tensor, and a counter beside a buffer that state_dict() leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.python, self.numpy = Average(), random.Random(1), np.random.default_rng(1)
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.steps, self.last, self.parts = 0, None, [Average(), Average()]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.average.value += 0.1
            self.parts.reverse()
            self.parts[0].value += 0.01 * self.steps
            self.table += 0.01
            self.last = torch.full((1,), 0.02) if self.last is None else self.last * 1.5
            x = x * (1 + 0.1 * self.python.random() + 0.1 * float(self.numpy.random()))
        held = self.average.value + self.parts[0].value + self.table.sum() + (0 if self.last is None else self.last)
        return x * (1 + held)


class Switching(nn.Module):
    """Unfreezes one layer and freezes another, once, in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.first, self.second, self.last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 2:
            self.first.requires_grad_(True)
            self.second.requires_grad_(False)
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Refreezing(nn.Module):
    """Lets one layer train in its first step only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.first, self.last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        self.first.requires_grad_(self.calls == 1)
        return self.last(torch.tanh(self.first(x)))


class Weighing:
    """A loss that counts its calls, keeps a mean and asks another object."""

    def __init__(self) -> None:
        self.calls, self.mean, self.ramp = 0, torch.zeros(()), Ramp()

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        loss = F.cross_entropy(output, batch[-1])
        if output.requires_grad:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss * (1 + 0.1 * self.calls) + 0.1 * self.mean * loss + self.ramp.up() * loss


class Ramp:
    def __init__(self) -> None:
        self.steps: list[float] = []

    def up(self) -> float:
        self.steps.append(0.01)
        return sum(self.steps)


class Centre(nn.Module):
    """A loss that is a module with a buffer and a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("centre", torch.zeros(4))

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        self.inner.centre.lerp_(output.detach().mean(0), 0.3)
        return F.cross_entropy(output - self.inner.centre, batch[-1])


class Proxies(nn.Module):
    """A loss with parameters of its own: one learned vector for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.eye(4))

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output @ self.vectors, batch[-1])


def proxies() -> Job:
    """The loss's parameters train beside the model's, with a rate of their own."""
    loss = Proxies()

    def optimizer(params: Any) -> Optimizer:
        return torch.optim.Adam([{"params": list(params)}, {"params": loss.parameters(), "lr": 0.1}], lr=0.01)

    return mlp(loss=loss, optimizer=optimizer)


def closing() -> Job:
    """A loss with a counter in its closure and one in a default; beside them what no checkpoint keeps."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        compiled = torch.jit.script(nn.Identity())
    calls, table = 0, torch.ones(2**20)
    sparse = torch.eye(3).to_sparse()
    weight = MLP(width=12, layers=3, inputs=8, classes=4)[0].weight

    def loss(output: Tensor, batch: Any, seen: list[int] = []) -> Tensor:  # noqa: B006
        nonlocal calls
        calls += 1
        seen.append(calls)
        factor = table[0] + 0 * sparse.sum() + 0.1 * calls + 0.01 * len(seen) + 0.0 * weight.detach().sum()
        return compiled(F.cross_entropy(output, batch[-1])) * factor

    return mlp(loss=loss)


def empty() -> nn.Module:
    """A parameter with no elements."""
    model = MLP(width=12, layers=3, inputs=8, classes=4)
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 4)))
    return model


def keeping(tensor: bool = False) -> nn.Module:
    return with_layer(Keeping(tensor))


def with_layer(layer: nn.Module) -> nn.Module:
    model = MLP(width=12, layers=3, inputs=8, classes=4)
    model.insert(1, layer)
    return model


class Plain:
    """A schedule without state_dict."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.at, self.rates = optimizer, 0, OrderedDict(a=0.9, b=0.8)
        self.rule = lambda at: self.rates["a"] ** at

    def step(self) -> None:
        self.at += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * self.rule(self.at)


class Slotted:
    """A schedule that shows nothing of where it stands."""

    __slots__ = ("at", "optimizer")

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.at = optimizer, 0

    def step(self) -> None:
        self.at += 1


class Curve:
    """A rule of LambdaLR with a memory."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, at: int) -> float:
        self.asked += 1
        return 1 / (1 + self.asked)


class Warming(torch.optim.lr_scheduler.LRScheduler):
    """Holds another schedule as an object, as warm-up packages do."""

    def __init__(self, optimizer: Optimizer, after: Any) -> None:
        self.after, self.warm = after, 2
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch >= self.warm:
            self.after.step()
            return [float(group["lr"]) for group in self.optimizer.param_groups]
        return [rate * (self.last_epoch + 1) / 3 for rate in self.base_lrs]


def sgd(params: Any) -> Optimizer:
    return SGD(params, lr=1e-2, momentum=0.9)


def scheduled(schedule: Callable[..., Any]) -> Callable[[], Job]:
    return lambda: mlp(optimizer=sgd, lr_schedule=schedule, epochs=2)


class Shaking(SGD):
    """Adds noise of a generator of its own, after a number of steps that it counts itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        self.draws = torch.Generator().manual_seed(5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        noise = 1e-2 * float(torch.rand((), generator=self.draws)) if self.steps > 2 else 0.0
        for group in self.param_groups:
            group["lr"] = 1e-2 + noise
        super().step()


class Meter:
    """How often it was asked."""

    def __init__(self) -> None:
        self.count, self.seen = 0, [0.0]


class Equipped(SGD):
    """Keeps an object, generators of Python and NumPy, and tensors besides its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=3.0)
        self.meter, self.python, self.numpy = Meter(), random.Random(3), np.random.default_rng(4)
        self.scale = torch.ones(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.meter.count += 1
        self.meter.seen.append(self.python.random() * float(self.numpy.random()))
        self.scale *= 0.9
        for group in self.param_groups:
            group["lr"] = 3.0 * float(self.scale[0]) * sum(self.meter.seen) / self.meter.count
        super().step()


def hooked_step(params: Any) -> Optimizer:
    """An optimizer whose hook counts in its closure."""
    made, count = SGD(params, lr=0.3), 0

    def divide(live: Optimizer, *_: Any) -> None:
        nonlocal count
        count += 1
        for group in live.param_groups:
            group["lr"] = 3.0 / count

    made.register_step_pre_hook(divide)
    return made


def hooked_model() -> nn.Module:
    """A model whose hooks of a layer and of a parameter count in their closures."""
    made, calls, gradients = MLP(width=12, layers=3, inputs=8, classes=4), 0, 0

    def scale(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += module.training
        return output * (1 + 0.3 * calls)

    def divide(gradient: Tensor) -> Tensor:
        nonlocal gradients
        gradients += 1
        return gradient / gradients

    list(made.modules())[-1].register_forward_hook(scale)
    list(made.parameters())[-1].register_hook(divide)
    return made


def counting(optimizer: Optimizer) -> LambdaLR:
    """A schedule over a function that counts in its closure."""
    count = 0

    def rate(_: int) -> float:
        nonlocal count
        count += 1
        return 30 / count

    return LambdaLR(optimizer, rate)


class Slow(SGD):
    """Slow weights that its `state_dict` does not return."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.slow: list[Tensor] = []
        self.ticks = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        values = [value for group in self.param_groups for value in group["params"]]
        self.slow = self.slow or [value.detach().clone() for value in values]
        super().step()
        self.ticks += 1
        for slow, value in zip(self.slow, values, strict=True) if self.ticks % 3 == 0 else ():
            value.copy_(slow.lerp_(value, 0.5))


STATEFUL: dict[str, Callable[[], Job]] = {
    "nested": lambda: mlp(optimizer=Nested),
    "shared": lambda: mlp(optimizer=Shared),
    "looking": lambda: mlp(optimizer=Looking),
    "extra": lambda: mlp(model=keeping),
    "extra tensor": lambda: mlp(model=lambda: keeping(tensor=True)),
    "counting": lambda: mlp(model=lambda: with_layer(Counting())),
    "caching": lambda: mlp(model=lambda: with_layer(Caching())),
    "assorted": lambda: mlp(model=lambda: with_layer(Assorted())),
    "holding": lambda: mlp(model=lambda: with_layer(Holding())),
    "switching": lambda: mlp(model=Switching, optimizer=lambda params: torch.optim.Adam(params, lr=0.01)),
    "refreezing": lambda: mlp(model=Refreezing, optimizer=lambda params: torch.optim.Adam(params, lr=0.01)),
    "weighing": lambda: mlp(loss=Weighing()),
    "centre": lambda: mlp(loss=Centre()),
    "proxies": proxies,
    "closing": closing,
    "empty": lambda: mlp(model=empty),
    "shaking": lambda: mlp(optimizer=Shaking),
    "equipped": lambda: mlp(optimizer=Equipped),
    "hooked step": lambda: mlp(optimizer=hooked_step),
    "hooked model": lambda: mlp(model=hooked_model),
    "counting schedule": scheduled(counting),
    "slow": lambda: mlp(optimizer=Slow),
    "plain": scheduled(Plain),
    "curve": scheduled(lambda optimizer: LambdaLR(optimizer, Curve())),
    "warming": scheduled(lambda optimizer: Warming(optimizer, ExponentialLR(optimizer, 0.7))),
    "chained": scheduled(lambda o: ChainedScheduler([LinearLR(o, 0.1, total_iters=3), ExponentialLR(o, 0.9)])),
    "sequence": scheduled(lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, 6)], [2])),
    "one cycle": scheduled(lambda o, steps: OneCycleLR(o, 0.1, total_steps=steps)),
    "opaque": lambda: mlp(optimizer=Opaque),
    "shy": lambda: mlp(optimizer=Shy),
    "forgetful": lambda: mlp(optimizer=Forgetful),
    "slotted": scheduled(Slotted),
}


def _run(world: World, name: str, plan: str) -> Run:
    job = STATEFUL[name]()
    return Run(job, complete(from_text(plan), job), world)


def facts(run: Run) -> Any:
    """Everything that decides how a run goes on and is no tensor of parameter size, as text; and the parameters' sum."""

    def put(path: str, value: Tensor) -> Any:
        return [list(value.shape), float(value.double().sum())] if type(value) is Tensor else "sharded"

    states = [optimizer.state_dict() for optimizer in run.optimizers]
    plain = [{key: value for key, value in each.items() if key != "slow"} for each in states]
    return str(encode(plain, "", put))


def until(world: World, name: str, plan: str, folder: str, steps: int) -> list[float]:
    """Losses of the first steps, and a checkpoint after them."""
    with _run(world, name, plan) as run:
        losses = [float(run.step(batch).loss) for batch in run.batches(steps)]
        run.save(Path(folder))
    return losses


def after(world: World, name: str, plan: str, folder: str | None = None) -> dict[str, Any]:
    """Losses from a checkpoint, or the beginning, to the end, and what the run then holds."""
    with _run(world, name, plan) as run:
        if folder is not None:
            run.load(Path(folder))
        losses = [float(run.step(batch).loss) for batch in run.batches()]
        state = run.gather_full_state()
        found = {"losses": losses, "facts": facts(run)}
        if state is not None:
            found["parameters"] = state.parameters
    return found


def refused(world: World, name: str, plan: str) -> tuple[str, int]:
    """The message with which a job is refused, and after how many steps."""
    from echelon.errors import JobError

    run = None
    try:
        run = _run(world, name, plan)
        for batch in run.batches():
            run.step(batch)
    except JobError as error:
        return str(error), 0 if run is None else run.step_number
    finally:
        if run is not None:
            run.close()
    return "no error", run.step_number
