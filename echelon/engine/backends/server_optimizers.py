"""Translate the job's torch optimizers to rules of a parameter server, with equal results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.errors import JobError
from echelon.profiler.embedding_tables import find_optimizer_obstacle
from echelon.server.protocol.specs import Rule

#: Settings that no server supports, with the values they must have.
_REQUIRED_SETTINGS = {"maximize": False, "amsgrad": False}


def make_rule(name: str, optimizer: Optimizer, group: Mapping[str, Any], *, is_table: bool) -> Rule:
    """The rule by which a server trains the parameter `name` as `optimizer` would; refused where there is none. Learning rates go with each push."""
    reason = find_optimizer_obstacle(optimizer, group) if is_table else _unsupported_reason(optimizer, group)
    if reason:
        raise JobError(f"optimizer=: {name} cannot be trained by a server: {reason}")
    optimizer_class, decay = type(optimizer), float(group.get("weight_decay", 0.0))
    # Rows that no sample uses change too where they have momentum, averages or decay.
    decays_rows = is_table and bool(decay)
    if optimizer_class is torch.optim.SGD and not group["momentum"]:
        return Rule(kind="sgd", weight_decay=decay, every=decays_rows)
    if optimizer_class is torch.optim.SGD:
        return Rule(
            kind="momentum", momentum=float(group["momentum"]), dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]), weight_decay=decay, every=is_table,
        )  # fmt: skip
    eps = float(group["eps"])
    if optimizer_class is torch.optim.Adagrad:
        initial = float(group["initial_accumulator_value"])
        return Rule(kind="adagrad", eps=eps, initial=initial, weight_decay=decay, every=decays_rows)
    beta1, beta2 = map(float, group["betas"])
    if optimizer_class is torch.optim.SparseAdam:  # it counts the steps of the table, not those of a row
        return Rule(kind="adam", beta1=beta1, beta2=beta2, eps=eps, steps="given")
    decoupled = optimizer_class is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
    return Rule(kind="adam", beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, decoupled=decoupled, every=is_table)


def _unsupported_reason(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    optimizer_class = type(optimizer)
    if optimizer_class not in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW):
        return f"no server computes {optimizer_class.__name__}; use SGD, Adagrad, Adam or AdamW, or dense=allreduce in the plan"
    setting = next((key for key, value in _REQUIRED_SETTINGS.items() if group.get(key, value) != value), None)
    if setting is None:
        return ""
    return f"{setting}={group[setting]} is not done by servers; leave it out, or use dense=allreduce"


def learning_rate(optimizer: Optimizer, group: Mapping[str, Any], update_count: int) -> float:
    """The learning rate of the update after `update_count` others."""
    lr = group["lr"]
    lr = float(lr.item() if isinstance(lr, Tensor) else lr)
    decay = float(group.get("lr_decay", 0.0)) if isinstance(optimizer, torch.optim.Adagrad) else 0.0
    return lr / (1 + update_count * decay)
