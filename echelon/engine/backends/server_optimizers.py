"""The job's torch optimizers as rules of a parameter server, number for number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.errors import JobError
from echelon.profiler.embedding_tables import find_optimizer_obstacle
from echelon.server.protocol.specs import Rule

#: Settings that change the formula and that no server computes; what they must be.
_REQUIRED_SETTINGS = {"maximize": False, "amsgrad": False}


def make_rule(name: str, optimizer: Optimizer, group: Mapping[str, Any], *, is_table: bool) -> Rule:
    """How a server trains the parameter `name` as `optimizer` would; refused where it could not.

    The learning rate goes with each push: schedules change it.
    """
    reason = find_optimizer_obstacle(optimizer, group) if is_table else _unsupported_reason(optimizer, group)
    if reason:
        raise JobError(f"optimizer=: {name} cannot be trained by a server: {reason}")
    optimizer_class, decay = type(optimizer), float(group.get("weight_decay", 0.0))
    # Rows that no sample uses move too where they have momentum, averages or decay.
    every_row = is_table and bool(decay)
    if optimizer_class is torch.optim.SGD:
        if not group["momentum"]:
            return Rule(kind="sgd", weight_decay=decay, every=every_row)
        return Rule(
            kind="momentum",
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            weight_decay=decay,
            every=is_table,
        )
    if optimizer_class is torch.optim.Adagrad:
        initial_value = float(group["initial_accumulator_value"])
        return Rule(kind="adagrad", eps=float(group["eps"]), initial=initial_value, weight_decay=decay, every=every_row)
    if optimizer_class is torch.optim.SparseAdam:
        beta1, beta2 = map(float, group["betas"])
        # It counts the steps of the table, not those of a row.
        return Rule(kind="adam", beta1=beta1, beta2=beta2, eps=float(group["eps"]), steps="given")
    beta1, beta2 = map(float, group["betas"])
    return Rule(
        kind="adam",
        beta1=beta1,
        beta2=beta2,
        eps=float(group["eps"]),
        weight_decay=decay,
        decoupled=optimizer_class is torch.optim.AdamW or bool(group.get("decoupled_weight_decay")),
        every=is_table,
    )


def _unsupported_reason(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    optimizer_class = type(optimizer)
    if optimizer_class not in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW):
        return f"no server computes {optimizer_class.__name__}; use SGD, Adagrad, Adam or AdamW, or dense=allreduce in the plan"
    unsupported = next(
        (key for key, required in _REQUIRED_SETTINGS.items() if group.get(key, required) != required), None
    )
    return (
        f"{unsupported}={group[unsupported]} is not done by servers; leave it out, or use dense=allreduce"
        if unsupported
        else ""
    )


def learning_rate(optimizer: Optimizer, group: Mapping[str, Any], update_count: int) -> float:
    """The learning rate of the next update, before which there were `update_count`."""
    lr = group["lr"]
    lr = float(lr.item() if isinstance(lr, Tensor) else lr)
    decay = float(group.get("lr_decay", 0.0)) if isinstance(optimizer, torch.optim.Adagrad) else 0.0
    return lr / (1 + update_count * decay)
