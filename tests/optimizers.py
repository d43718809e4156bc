"""Small optimizers of each class, written as people write them: for trials and for training against one process."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer


class Plain(Optimizer):
    """Steps by `update(group, value, state)`, without momentum or closure."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    self.update(group, value, self.state[value])

    def update(self, group: dict[str, Any], value: Tensor, state: dict[str, Any]) -> None:
        value.sub_(group["lr"] * value.grad)


def _adam(value: Tensor, state: dict[str, Any]) -> Tensor:
    """Adam's direction; moments and a step count in `state`."""
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(value), exp_avg_sq=torch.zeros_like(value))
    state["step"] += 1
    state["exp_avg"].lerp_(value.grad, 0.1)
    state["exp_avg_sq"].lerp_(value.grad.square(), 0.01)
    first, second = 1 - 0.9 ** state["step"], 1 - 0.99 ** state["step"]
    return (state["exp_avg"] / first) / ((state["exp_avg_sq"] / second).sqrt() + 1e-8)


class Lamb(Plain):
    """Adam's direction, scaled to the parameter's norm."""

    def update(self, group: dict[str, Any], value: Tensor, state: dict[str, Any]) -> None:
        direction = _adam(value, state)
        size, length = value.norm(), direction.norm()
        trust = torch.where((size > 0) & (length > 0), size / length, 1.0)
        value.sub_(group["lr"] * trust * direction)


class Lars(Plain):
    """SGD with momentum, scaled to the parameter's norm from step `begin` on."""

    def update(self, group: dict[str, Any], value: Tensor, state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        rate = group["lr"]
        size, length = value.norm().item(), value.grad.norm().item()
        if state["step"] > group.get("begin", 0) and size > 0 and length > 0:
            rate *= size / length
        state["momentum"] = rate * value.grad + 0.9 * state.get("momentum", torch.zeros_like(value))
        value.sub_(state["momentum"])


class Shampoo(Plain):
    """Inverse fourth roots of both sides' second moments; SGD for what is no matrix."""

    def update(self, group: dict[str, Any], value: Tensor, state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        gradient = value.grad
        if value.ndim == 2 and state["step"] > group.get("begin", 0):
            for dim, side in enumerate((gradient @ gradient.T, gradient.T @ gradient)):
                key = f"side_{dim}"
                state[key] = side + state.get(key, 1e-4 * torch.eye(len(side), dtype=side.dtype))
            left, right = (_root(state[f"side_{dim}"]) for dim in range(2))
            gradient = left @ gradient @ right
        value.sub_(group["lr"] * gradient)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=1e-12).pow(-0.25) @ vectors.T


class ClipInside(Plain):
    """SGD that clips by the norm of all its gradients, inside step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        values = [v for group in self.param_groups for v in group["params"] if v.grad is not None]
        total = math.sqrt(sum(v.grad.square().sum().item() for v in values))
        for value in values:
            value.grad.mul_(min(1.0, 0.05 / (total + 1e-6)))
        super().step()


class NvLamb(Lamb):
    """LAMB with gradients divided by their global norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        values = [v for group in self.param_groups for v in group["params"] if v.grad is not None]
        total = torch.stack([v.grad.norm() for v in values]).norm()
        for value in values:
            value.grad.div_(total.clamp(min=1e-3))
        super().step()


class DAdapt(Plain):
    """SGD whose rate grows with an estimate over all parameters, kept in the groups and in a shared state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr, d=1e-2, k=0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        shared = self.state["shared"]
        numerator = squares = 0.0
        for value in (v for each in self.param_groups for v in each["params"] if v.grad is not None):
            total = self.state[value].setdefault("sum", torch.zeros_like(value))
            numerator += group["d"] * (value.grad * total).sum().item()
            total.add_(value.grad, alpha=group["d"])
            squares += total.square().sum().item()
        shared["numerator"] = shared.get("numerator", 0.0) + numerator
        d = max(group["d"], 2 * shared["numerator"] / (math.sqrt(squares) + 1e-8), group["d"] * 1.1)
        for each in self.param_groups:
            each["d"], each["k"] = min(d, 1.0), each["k"] + 1
        super().step()

    def update(self, group: dict[str, Any], value: Tensor, state: dict[str, Any]) -> None:
        value.sub_(group["lr"] * group["d"] * value.grad)


class Sgld(Plain):
    """SGD with noise from torch's default generator."""

    def update(self, group: dict[str, Any], value: Tensor, state: dict[str, Any]) -> None:
        value.sub_(group["lr"] * value.grad + 1e-3 * torch.randn_like(value))


class NumpyNoise(Plain):
    """SGD with noise from NumPy's and Python's generators."""

    def update(self, group: dict[str, Any], value: Tensor, state: dict[str, Any]) -> None:
        noise = torch.as_tensor(numpy.random.normal(size=tuple(value.shape)), dtype=value.dtype)
        value.sub_(group["lr"] * value.grad + 1e-3 * random.random() * noise)


class EntropyNoise(Plain):
    """SGD with noise that no seed decides."""

    def update(self, group: dict[str, Any], value: Tensor, state: dict[str, Any]) -> None:
        value.sub_(group["lr"] * value.grad + 1e-3 * numpy.random.default_rng().normal())


class Prodigy(Plain):
    """Adam's direction with a rate that grows by the distance from the start, over all parameters."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr, d=1e-3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group, top, bottom = self.param_groups[0], 0.0, 0.0
        for value in (v for each in self.param_groups for v in each["params"] if v.grad is not None):
            state = self.state[value]
            if not state:
                state.update(start=value.clone(), s=torch.zeros_like(value))
            state["s"].mul_(0.95).add_(value.grad, alpha=group["d"])
            top += float((value.grad * (state["start"] - value)).sum())
            bottom += float(state["s"].abs().sum())
        for each in self.param_groups:
            each["d"] = max(each["d"], group["d"] * top / (bottom + 1e-12))
        super().step()

    def update(self, group: dict[str, Any], value: Tensor, state: dict[str, Any]) -> None:
        value.sub_(group["lr"] * group["d"] * value.grad)


class ThroughData(Plain):
    """Gives parameters new memory."""

    def update(self, group: dict[str, Any], value: Tensor, state: dict[str, Any]) -> None:
        value.data = value.data - group["lr"] * value.grad


class Picky(Plain):
    """Steps on the parameters that it knows by their shapes, and cannot be tried on others."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        shapes = sorted(tuple(value.shape) for group in self.param_groups for value in group["params"])
        if (10, 6) not in shapes or (6, 10) not in shapes:
            raise KeyError("unknown parameters")
        super().step()


def by_value(params: Any) -> Optimizer:
    """`optimizer=` that derives a rate from the first parameter's values."""
    values = [each[1] if isinstance(each, tuple) else each for each in params]
    return Plain(values, lr=0.01 * float(values[0].detach().abs().mean()))


def matrices_and_rest(make: Any) -> Any:
    """`optimizer=` of two: `make` for matrices, AdamW for the rest."""

    def optimizers(params: Any) -> list[Optimizer]:
        values = list(params)
        tensors = [each[1] if isinstance(each, tuple) else each for each in values]
        rest = [value for value in tensors if value.ndim != 2]
        return [make([value for value in tensors if value.ndim == 2]), torch.optim.AdamW(rest, lr=1e-2)]

    return optimizers
