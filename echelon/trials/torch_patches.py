"""What the user's code changes in torch itself: functions that it replaces (`torch.tanh = ...`), hooks that it registers for every module.

A factory that does so does it at each call. Models that are built for a trial or a proof must not add to what the training's model does.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional, init
from torch.nn.modules import module as hooks

from echelon.trials.reachable import is_user

_HOOKS = [name for name, value in vars(hooks).items() if name.startswith("_global_") and isinstance(value, dict)]


class Patches:
    """What torch is now."""

    def __init__(self) -> None:
        layers = [each for each in vars(nn).values() if isinstance(each, type)]
        self._owners = [(owner, dict(vars(owner))) for owner in (torch, Tensor, functional, init, nn, *layers)]
        self._hooks = {name: dict(getattr(hooks, name)) for name in _HOOKS}

    def put_back(self) -> None:
        """Undo what the user's code changed since: not what echelon replaces for a while."""
        for owner, held in self._owners:
            changed = [(name, held[name]) for name, value in vars(owner).items() if held.get(name, value) is not value]
            for name, value in changed:
                if _is_users(vars(owner)[name]):
                    setattr(owner, name, value)
        for name, held in self._hooks.items():
            live = getattr(hooks, name)
            for key in [key for key, hook in live.items() if key not in held and _is_users(hook)]:
                del live[key]


def _is_users(value: Any) -> bool:
    code = getattr(value, "__func__", value)
    return is_user(code if isinstance(code, FunctionType | type) else type(code))
