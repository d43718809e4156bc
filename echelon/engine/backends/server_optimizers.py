"""The job's torch optimizers as rules of a parameter server, number for number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.errors import JobError
from echelon.profiler.embedding_tables import table_rule
from echelon.server.protocol.specs import Rule

#: Settings that change the formula and that no server computes; what they must be.
_PLAIN = {"maximize": False, "amsgrad": False}


def rule_of(name: str, optimizer: Optimizer, group: Mapping[str, Any], *, table: bool) -> Rule:
    """How a server trains the parameter `name` as `optimizer` would; refused where it could not.

    The learning rate goes with each push: schedules change it.
    """
    why = table_rule(optimizer, group) if table else _unfit(optimizer, group)
    if why:
        raise JobError(f"optimizer=: {name} cannot be trained by a server: {why}")
    kind, decay = type(optimizer), float(group.get("weight_decay", 0.0))
    # Rows that no sample uses move too where they have momentum, averages or decay.
    every = table and bool(decay)
    if kind is torch.optim.SGD:
        if not group["momentum"]:
            return Rule(kind="sgd", weight_decay=decay, every=every)
        return Rule(
            kind="momentum",
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            weight_decay=decay,
            every=table,
        )
    if kind is torch.optim.Adagrad:
        first = float(group["initial_accumulator_value"])
        return Rule(kind="adagrad", eps=float(group["eps"]), initial=first, weight_decay=decay, every=every)
    if kind is torch.optim.SparseAdam:
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
        decoupled=kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay")),
        every=table,
    )


def _unfit(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    kind = type(optimizer)
    if kind not in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW):
        return f"no server computes {kind.__name__}; use SGD, Adagrad, Adam or AdamW, or dense=allreduce in the plan"
    strange = next((key for key, plain in _PLAIN.items() if group.get(key, plain) != plain), None)
    return f"{strange}={group[strange]} is not done by servers; leave it out, or use dense=allreduce" if strange else ""


def rate_of(optimizer: Optimizer, group: Mapping[str, Any], updates: int) -> float:
    """The learning rate of the next update, before which there were `updates`."""
    rate = group["lr"]
    rate = float(rate.item() if isinstance(rate, Tensor) else rate)
    decay = float(group.get("lr_decay", 0.0)) if isinstance(optimizer, torch.optim.Adagrad) else 0.0
    return rate / (1 + updates * decay)
