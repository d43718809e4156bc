"""Learning-rate schedules, by step and by what they look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler as torch_schedules

from bench.adversary.kit import cross_entropy, plain, sgd
from bench.adversary.spec import Spec, job


@job("OneCycleLR, which cycles momentum too and knows the total", owner="ckpt")
def one_cycle() -> Spec:
    return Spec(
        **plain(
            optimizer=sgd(0.1, momentum=0.9),
            lr_schedule=lambda optimizer, steps: torch_schedules.OneCycleLR(optimizer, 0.2, steps),
        )
    )


@job("ReduceLROnPlateau, which the loss of each evaluation steps", owner="ckpt")
def plateau() -> Spec:
    return Spec(
        **plain(
            lr_schedule=lambda optimizer: torch_schedules.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=0.5
            )
        ),
        epochs=3,
    )


@job("a chain: warm-up, then cosine (SequentialLR)", owner="ckpt")
def sequential() -> Spec:
    def schedule(optimizer: Any, steps: int) -> Any:
        warm = torch_schedules.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = torch_schedules.CosineAnnealingLR(optimizer, steps - 3)
        return torch_schedules.SequentialLR(optimizer, [warm, cosine], [3])

    return Spec(**plain(lr_schedule=schedule))


@job("LambdaLR with an object that keeps state", owner="ckpt")
def stateful_lambda() -> Spec:
    class Halving:
        def __init__(self) -> None:
            self.factor = 1.0

        def __call__(self, step: int) -> float:
            self.factor *= 0.9
            return self.factor

    return Spec(**plain(lr_schedule=lambda optimizer: torch_schedules.LambdaLR(optimizer, Halving())))


@job("CosineAnnealingWarmRestarts", owner="ckpt")
def warm_restarts() -> Spec:
    return Spec(**plain(lr_schedule=lambda optimizer: torch_schedules.CosineAnnealingWarmRestarts(optimizer, 3)))


@job("CyclicLR, which changes momentum as well", owner="ckpt")
def cyclic() -> Spec:
    return Spec(
        **plain(
            optimizer=sgd(0.1, momentum=0.9),
            lr_schedule=lambda optimizer: torch_schedules.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3),
        )
    )


@job("ChainedScheduler of two, one multiplicative", owner="ckpt")
def chained() -> Spec:
    return Spec(
        **plain(
            lr_schedule=lambda optimizer: torch_schedules.ChainedScheduler(
                [torch_schedules.ExponentialLR(optimizer, 0.95), torch_schedules.ConstantLR(optimizer, 0.5, 4)]
            )
        )
    )


class Bare:
    """A schedule without state_dict, which writes rates into the groups itself."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.steps)


@job("a schedule of one's own without state_dict", owner="ckpt", refusable="resume")
def without_state() -> Spec:
    return Spec(**plain(lr_schedule=Bare))


@job("a schedule that changes weight decay and not the rate", owner="ckpt")
def decays_decay() -> Spec:
    class Decay(torch_schedules.LRScheduler):
        def get_lr(self) -> list[float]:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.1 * 0.8**self.last_epoch
            return [group["lr"] for group in self.optimizer.param_groups]

    return Spec(**plain(optimizer=sgd(0.1, weight_decay=0.1), lr_schedule=Decay))


@job("a rate that follows from the norm of the weights, from step 6 on", refusable="pp tp")
def weight_norm_rate() -> Spec:
    def schedule(optimizer: Any) -> Any:
        weights = optimizer.param_groups[0]["params"]

        def factor(step: int) -> float:
            return 1.0 if step < 6 else 1 / (1 + sum(float(each.detach().norm()) for each in weights))

        return torch_schedules.LambdaLR(optimizer, factor)

    return Spec(**plain(lr_schedule=schedule))


@job("a rate that follows from the norm of the gradients, from step 6 on", refusable="pp tp")
def gradient_norm_rate() -> Spec:
    def schedule(optimizer: Any) -> Any:
        def factor(step: int) -> float:
            found = [each.grad for each in optimizer.param_groups[0]["params"] if step >= 6 and each.grad is not None]
            return min(1.0, sum(float(each.norm()) for each in found)) if found else 1.0

        return torch_schedules.LambdaLR(optimizer, factor)

    return Spec(**plain(lr_schedule=schedule))


@job(
    "a rate that follows from a running mean which the loss keeps, from step 5 on",
    refusable="dp micro zero shares pp resume",
)
def loss_rate() -> Spec:
    seen = {"mean": 1.0}

    def loss(output: Tensor, batch: Any) -> Tensor:
        value = cross_entropy(output, batch)
        if torch.is_grad_enabled():
            seen["mean"] = 0.8 * seen["mean"] + 0.2 * float(value.detach())
        return value

    def schedule(optimizer: Any) -> Any:
        return torch_schedules.LambdaLR(optimizer, lambda step: 1.0 if step < 5 else min(1.0, seen["mean"] / 2))

    return Spec(**plain(loss=loss, lr_schedule=schedule))
