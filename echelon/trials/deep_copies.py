"""Deep copies of what the user's code holds, also where it holds what Python cannot copy (locks, files)."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch import nn

from echelon.trials.reachable import leaves
from echelon.trials.snapshot import reached

T = TypeVar("T")


def deep_copy(value: T, memo: dict[int, Any] | None = None) -> T:
    """A deep copy that shares what cannot be copied. `memo`: that of `copy.deepcopy`; as it was where this raises."""
    nodes = reached({"value": value})  # iterators become such as can be copied
    memo = {} if memo is None else memo
    try:
        return _copied(value, memo)
    except Exception:
        shared = {id(each): each for each in leaves(nodes.values()) if not _is_copied(each)}
        if not shared:
            raise
    memo.update(shared)
    return _copied(value, memo)


def _copied(value: T, memo: dict[int, Any]) -> T:
    known = set(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        for key in set(memo) - known:
            del memo[key]
        raise


def _is_copied(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except Exception:
        return False
    return True


def copy_module(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy with the hooks of its parameters, which `copy.deepcopy` drops."""
    copied = deep_copy(model, memo)
    if isinstance(model, torch.jit.ScriptModule):
        return copied
    for mine, theirs in zip(model.parameters(), copied.parameters(), strict=True):
        if theirs is not mine and mine._backward_hooks:
            theirs._backward_hooks = OrderedDict(mine._backward_hooks)
        for hook in (getattr(mine, "_post_accumulate_grad_hooks", None) or {}).values() if theirs is not mine else ():
            theirs.register_post_accumulate_grad_hook(hook)
    return copied
