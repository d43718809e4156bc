"""Deep copies of what the user's code holds, which share what Python cannot copy (locks, files)."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch import nn

from echelon.trials.reachable import find_unfollowed
from echelon.trials.snapshot import find_reachable_replayable

T = TypeVar("T")


def deep_copy(value: T, memo: dict[int, Any] | None = None) -> T:
    """A deep copy that shares what cannot be copied. `memo`: that of `copy.deepcopy`; unchanged where this raises."""
    reachable = find_reachable_replayable({"value": value})  # makes iterators copyable
    memo = {} if memo is None else memo
    try:
        return _deepcopy_or_reset_memo(value, memo)
    except Exception:
        shared = {id(leaf): leaf for leaf in find_unfollowed(reachable.values()) if not _is_copyable(leaf)}
        if not shared:
            raise
    memo.update(shared)
    return _deepcopy_or_reset_memo(value, memo)


def _deepcopy_or_reset_memo(value: T, memo: dict[int, Any]) -> T:
    keys_before = set(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        for key in set(memo) - keys_before:
            del memo[key]
        raise


def _is_copyable(value: Any) -> bool:
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
    for original, duplicate in zip(model.parameters(), copied.parameters(), strict=True):
        if duplicate is not original:
            if original._backward_hooks:
                duplicate._backward_hooks = OrderedDict(original._backward_hooks)
            for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
                duplicate.register_post_accumulate_grad_hook(hook)
    return copied
