"""Counters, flags and generators: numbers, strings and random states that modules and optimizers keep as plain attributes and change while they
train.

No `state_dict()` has them. A checkpoint holds those that changed since the job was made, and a resumed run gets them back.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.engine.model_state import spoken_for
from echelon.engine.values import Unstorable, decode, encode, from_inline

if TYPE_CHECKING:
    from echelon.engine.run import Run

Values = Mapping[str, Any]
#: Types of attributes that are kept; containers if they hold nothing else and are small.
_KEPT = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.Generator, list, tuple, dict, set, deque)
_SMALL = 1000
#: Attributes that torch keeps in every module and optimizer; schedules add the last two.
_TORCHS = frozenset(vars(nn.Module()))
_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"_opt_called", "_step_count"}


class Attributes:
    """Those of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._modules, self._optimizers = _of_modules(run.model), _of_optimizers(run)
        #: By module, what a checkpoint gave back.
        self.restored: Mapping[str, Values] = {}

    def collect(self) -> dict[str, Any]:
        """What changed since the start, of all stages, for JSON. Every rank must call it."""
        run = self._run
        modules = {
            path: _changed(values, self._modules.get(path, {})) for path, values in _of_modules(run.model).items()
        }
        modules = {path: values for path, values in modules.items() if values}
        mine = {name.removesuffix(".") for name in spoken_for(run, [f"{path}." for path in modules])}
        optimizers = [_changed(*each) for each in zip(_of_optimizers(run), self._optimizers, strict=True)]
        speaks = not run.axes["dp"].rank and not run.axes["tp"].rank
        everyone = run.ranks.gather((modules if speaks else {}, mine, optimizers))
        found: dict[str, Any] = {}
        for theirs, spoken, _ in everyone:
            found |= {path: values for path, values in theirs.items() if path in spoken or path not in found}
        return {"modules": found, "optimizers": everyone[0][2]}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Give back what `collect` returned."""
        run, self.restored = self._run, stored["modules"]
        for path, module in run.model.named_modules():
            if path in self._modules:
                _give_back(module, self.restored.get(path, {}))
        for optimizer, values in zip(run.optimizers, stored["optimizers"], strict=True):
            _give_back(optimizer, values)


def _give_back(owner: Any, values: Values) -> None:
    """In place where others may hold the same object."""
    for name, stored in values.items():
        value, held = decode(stored, from_inline), vars(owner)
        there = held.get(name)
        if type(there) is not type(value):
            held[name] = value
        elif isinstance(there, torch.Generator):
            there.set_state(value.get_state())
        elif isinstance(there, list | dict | set | deque):
            there.clear()
            (there.extend if isinstance(there, list | deque) else there.update)(value)
        else:
            held[name] = value


def _changed(values: Values, first: Values) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in first or first[name] != value}


def _of_modules(model: nn.Module) -> dict[str, Values]:
    """Not of modules that keep tensors outside of state_dict(): such a cache starts empty, and so must the numbers about it."""
    found: dict[str, Values] = {}
    for path, module in model.named_modules():
        held = vars(module)
        if not module._non_persistent_buffers_set and not any(isinstance(value, Tensor) for value in held.values()):
            found[path] = _encoded({name: value for name, value in held.items() if name not in _TORCHS})
    return found


def _of_optimizers(run: Run) -> list[Values]:
    return [
        _encoded({name: value for name, value in vars(each).items() if name not in _OPTIMIZERS})
        for each in run.optimizers
    ]


def _encoded(values: Values) -> Values:
    """Those of them that are kept, for JSON."""
    found = {}
    for name, value in values.items():
        if isinstance(value, _KEPT) and (not isinstance(value, Sized) or len(value) <= _SMALL):
            with contextlib.suppress(Unstorable):
                found[name] = encode(value, name, _refuse)
    return found


def _refuse(path: str, value: Tensor) -> Any:
    raise Unstorable(path, "a tensor")
