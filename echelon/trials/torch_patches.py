"""What the user's code changes in torch itself: functions that it replaces (`torch.tanh = ...`), hooks that it registers for every module.

A factory that does so does it at each call. Models that are built for a trial or a proof must not add to what the training's model does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional, init
from torch.nn.modules import module as hooks

from echelon.trials.reachable import is_user_defined

_HOOK_DICTS = [n for n, value in vars(hooks).items() if n.startswith("_global_") and isinstance(value, dict)]


@contextlib.contextmanager
def patch_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` inside; nothing happens where this version of a library does not have it."""
    if not hasattr(owner, name):
        yield
        return
    is_own, original = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


class TorchPatches:
    """The present state of torch."""

    def __init__(self) -> None:
        layer_classes = [value for value in vars(nn).values() if isinstance(value, type)]
        owners = (torch, Tensor, functional, init, nn, *layer_classes)
        self._saved_attributes = [(owner, dict(vars(owner))) for owner in owners]
        self._saved_hooks = {name: dict(getattr(hooks, name)) for name in _HOOK_DICTS}

    def restore(self) -> None:
        """Undo what the user's code has changed since, but not echelon's own patches."""
        for owner, saved in self._saved_attributes:
            changed = [name for name, value in vars(owner).items() if saved.get(name, value) is not value]
            for name in changed:
                if _is_user_code(vars(owner)[name]):
                    setattr(owner, name, saved[name])
        for name, saved in self._saved_hooks.items():
            current = getattr(hooks, name)
            for key in [key for key, hook in current.items() if key not in saved and _is_user_code(hook)]:
                del current[key]


def _is_user_code(value: Any) -> bool:
    code = getattr(value, "__func__", value)
    return is_user_defined(code if isinstance(code, FunctionType | type) else type(code))
