"""State in functions that torch calls: hooks of modules, parameters and optimizers, and functions of schedules; and what these share with others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from bench.adversary.kit import CLASSES, SAMPLES, WIDTH, cross_entropy, integers, net, numbers, plain
from bench.adversary.spec import Spec, job


@job("a hook before each step of the optimizer divides gradients by a count in its closure", owner="ckpt")
def step_counter() -> Spec:
    def optimizer(params: Any) -> Optimizer:
        made, count = SGD(params, lr=0.3), 0

        def divide(live: Optimizer, *_: Any) -> None:
            nonlocal count
            count += 1
            for group in live.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(count)

        made.register_step_pre_hook(divide)
        return made

    return Spec(**plain(optimizer=optimizer))


@job("a hook after each step keeps an average in its closure, and puts it back every fourth step", owner="ckpt")
def step_average() -> Spec:
    def optimizer(params: Any) -> Optimizer:
        made, kept = SGD(params, lr=0.3), {"count": 0, "averages": []}

        @torch.no_grad()
        def average(live: Optimizer, *_: Any) -> None:
            values = [p for group in live.param_groups for p in group["params"]]
            kept["averages"] = kept["averages"] or [p.detach().clone() for p in values]
            kept["count"] += 1
            for mean, p in zip(kept["averages"], values, strict=True):
                mean.lerp_(p, 0.3)
                if kept["count"] % 4 == 0:
                    p.copy_(mean)

        made.register_step_post_hook(average)
        return made

    return Spec(**plain(optimizer=optimizer))


@job("a forward hook counts in its closure and scales", owner="ckpt")
def forward_counter() -> Spec:
    def model() -> nn.Module:
        made, count = net()(), 0

        def scale(module: nn.Module, _: Any, output: Tensor) -> Tensor:
            nonlocal count
            count += module.training
            return output * (1 + 0.1 * count)

        made.head.register_forward_hook(scale)
        return made

    return Spec(**plain(model=model, eval_data=None, metrics={}))


@job("a parameter's gradient hook counts in its closure", owner="ckpt")
def gradient_counter() -> Spec:
    def model() -> nn.Module:
        made, count = net()(), 0

        def divide(gradient: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return gradient / count

        made.head.weight.register_hook(divide)
        return made

    return Spec(**plain(model=model))


@job("a hook clips the list of parameters that the optimizer's function was given", owner="optim")
def clipping_hook() -> Spec:
    def optimizer(params: Any) -> Optimizer:
        given = list(params)
        made = SGD(given, lr=0.2)

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(given, 0.5)

        made.register_step_pre_hook(clip)
        return made

    return Spec(**plain(optimizer=optimizer))


@job("LambdaLR over a function that counts in its closure", owner="ckpt")
def counting_schedule() -> Spec:
    def schedule(optimizer: Optimizer) -> LambdaLR:
        count = 0

        def rate(_: int) -> float:
            nonlocal count
            count += 1
            return 1 / count

        return LambdaLR(optimizer, rate)

    return Spec(**plain(lr_schedule=schedule))


@job("a schedule sets the weight of a term of the loss")
def annealed_loss() -> Spec:
    weight = {"of the term": 0.0}

    def rate(step: int) -> float:
        weight["of the term"] = 0.1 * step
        return 1.0

    def loss(output: Tensor, batch: Any) -> Tensor:
        return cross_entropy(output, batch) + weight["of the term"] * (output**2).mean()

    return Spec(**plain(loss=loss, lr_schedule=lambda optimizer: LambdaLR(optimizer, rate), eval_data=None, metrics={}))


@job("a schedule sets a temperature that forward reads")
def annealed_forward() -> Spec:
    temperature = {"now": 1.0}

    def rate(step: int) -> float:
        temperature["now"] = 1 + 0.3 * step
        return 1.0

    def model() -> nn.Module:
        made = net()()
        made.head.register_forward_hook(lambda module, given, output: output / temperature["now"])
        return made

    return Spec(
        **plain(model=model, lr_schedule=lambda optimizer: LambdaLR(optimizer, rate), eval_data=None, metrics={})
    )


@job("an optimizer counts its steps in its class", owner="optim")
def class_counter() -> Spec:
    class Slowing(SGD):
        count = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            Slowing.count += 1
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(Slowing.count)
            super().step()

    return Spec(**plain(optimizer=lambda params: Slowing(params, lr=0.3)))


@job("groups by an attribute of the parameters (S4, Mamba)", owner="optim", refusable="zero tp pp")
def marked_groups() -> Spec:
    def model() -> nn.Module:
        made = net()()
        made.head.weight._no_weight_decay = True
        return made

    def optimizer(params: Any) -> Optimizer:
        given = list(params)
        marked = [p for p in given if getattr(p, "_no_weight_decay", False)]
        others = [p for p in given if not getattr(p, "_no_weight_decay", False)]
        groups = [{"params": others, "weight_decay": 0.5}, {"params": marked, "weight_decay": 0.0}]
        return AdamW([group for group in groups if group["params"]], lr=0.02)

    return Spec(**plain(model=model, optimizer=optimizer))


@job("groups by the identity of the module's parameters", owner="optim", refusable="zero tp pp")
def own_groups() -> Spec:
    torch.manual_seed(0)
    module = net()()
    head = {id(p) for p in module.head.parameters()}

    def optimizer(params: Any) -> Optimizer:
        given = list(params)
        groups = [
            {"params": [p for p in given if id(p) in head], "lr": 0.5},
            {"params": [p for p in given if id(p) not in head]},
        ]
        return SGD([group for group in groups if group["params"]], lr=0.02)

    return Spec(**plain(model=module, optimizer=optimizer))


@job("the loss sets how hard the samples of the next step are", refusable="dp micro zero shares tp pp")
def curriculum() -> Spec:
    class Levelled(Dataset):
        def __init__(self) -> None:
            self.inputs, self.labels, self.level = numbers(SAMPLES, WIDTH), integers(CLASSES, SAMPLES), 1.0

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.inputs[index] * self.level, self.labels[index]

    data = Levelled()

    def loss(output: Tensor, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            data.level *= 0.9
        return cross_entropy(output, batch)

    return Spec(**plain(data=data, loss=loss, eval_data=None, metrics={}))
