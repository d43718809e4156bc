"""Counters, flags and generators: numbers, strings and random states that modules and optimizers keep as plain attributes and change while they
train; which parameters they froze or unfroze; and what the loss and `inputs` keep (function_state.py).

`state_dict()` does not include them. A checkpoint holds those that changed since the job was made, and a resumed run gets them back.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sized
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.engine.function_state import FunctionState
from echelon.engine.model_state import spoken_for
from echelon.engine.stored import Stored
from echelon.engine.values import Unstorable, decode, encode, from_inline, tensor_refs
from echelon.tree import tensors

if TYPE_CHECKING:
    from echelon.engine.run import Run

Values = Mapping[str, Any]
#: Types of attributes that are kept; containers if they hold nothing else and are small.
_KEPT = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.Generator, list, tuple, dict, set, deque)
_SMALL = 1000


class Attributes:
    """Saves and restores the plain attributes of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._modules, self._optimizers = _of_modules(run.model), _of_optimizers(run)
        self._trainable = trainable(run.model)
        #: What the loss and `inputs` keep.
        self.functions = FunctionState(run.job, run.model)
        self._lost: set[str] = set()
        #: By module, what a checkpoint gave back.
        self.restored: Mapping[str, Values] = {}

    def switched(self) -> dict[str, bool]:
        """Parameters that were frozen (False) or unfrozen (True) since the start, as far as this rank has them."""
        return _changed(trainable(self._run.model), self._trainable)

    def collect(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What changed since the start, of all stages, for JSON, and the tensors in it that this rank is to write. Every rank must call it."""
        run = self._run
        modules = {
            path: _changed(values, self._modules.get(path, {})) for path, values in _of_modules(run.model).items()
        }
        modules = {path: values for path, values in modules.items() if values}
        mine = {name.removesuffix(".") for name in spoken_for(run, [f"{path}." for path in modules])}
        optimizers = [_changed(*each) for each in zip(_of_optimizers(run), self._optimizers, strict=True)]
        speaks = not run.axes["dp"].rank and not run.axes["tp"].rank
        functions, kept = self._of_functions()
        everyone = run.ranks.gather((modules if speaks else {}, mine, optimizers, self.switched(), functions))
        found: dict[str, Any] = {}
        for theirs, spoken, *_ in everyone:
            found |= {path: values for path, values in theirs.items() if path in spoken or path not in found}
        flags = {name: flag for *_, theirs, _ in everyone for name, flag in theirs.items()}
        values = next(each for *_, each in everyone if each is not None)
        return {"modules": found, "optimizers": everyone[0][2], "trainable": flags, "functions": values}, kept

    def _of_functions(self) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
        """What the loss keeps on the first rank that computes it: None on others."""
        run, tensors = self._run, dict[str, Tensor]()
        if run.data.rank or not run.tells:
            return None, tensors

        def put(path: str, value: Tensor) -> Any:
            tensors[path] = value
            return [path, value.device.type]

        found, lost = self.functions.changes(put)
        for why in lost:
            name = why.partition(":")[0]
            if name not in self._lost:
                self._lost.add(name)
                run.warn(f"{why}: checkpoints do not hold it, so that a resumed run has its first value again")
        return found, tensors

    def rooms(self, stored: Stored) -> dict[str, Tensor]:
        """Tensors to be filled from a checkpoint before `restore`."""
        self._rooms = {}
        for path, device in tensor_refs(_functions_of(stored.manifest.get("attributes"))):
            entry = stored.entries[f"function/{path}"]
            where = torch.device("cpu") if device == "cpu" else self._run.device
            self._rooms[path] = torch.empty(entry.shape, dtype=entry.dtype, device=where)
        return self._rooms

    def restore(self, stored: Mapping[str, Any] | None) -> None:
        """Give back what `collect` returned; None: the checkpoint is from before attributes were kept."""
        if stored is None:
            return
        run, self.restored = self._run, stored["modules"]
        set_trainable(run.model, self._trainable | stored.get("trainable", {}))
        for path, module in run.model.named_modules():
            if path in self._modules:
                _restore_attributes(module, self.restored.get(path, {}))
        for optimizer, values in zip(run.optimizers, stored["optimizers"], strict=True):
            _restore_attributes(optimizer, values)
        for name in self.functions.restore(_functions_of(stored), lambda ref: self._rooms[ref[0]]):
            run.warn(
                f"{name}: the checkpoint holds a value for it, which has no place in this job's loss; it is left out"
            )


def _functions_of(stored: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = (stored or {}).get("functions", {})
    return found


def _restore_attributes(owner: Any, values: Values) -> None:
    held = vars(owner)
    for name, stored in values.items():
        held[name] = _restored(held.get(name), decode(stored, from_inline))


def _restored(there: Any, value: Any) -> Any:
    """`value`, in the container or generator that is there, because other objects may refer to it."""
    if type(there) is not type(value):
        return value
    if isinstance(there, torch.Generator):
        there.set_state(value.get_state())
    elif isinstance(there, list | dict | set | deque):
        there.clear()
        (there.extend if isinstance(there, list | deque) else there.update)(value)
    else:
        return value
    return there


def _changed(values: Values, first: Values) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in first or first[name] != value}


def trainable(model: nn.Module) -> dict[str, bool]:
    """By name whether a parameter requires gradients."""
    return {name: value.requires_grad for name, value in model.named_parameters()}


def set_trainable(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Freeze and unfreeze parameters as `trainable` returned them; others stay as they are."""
    for name, value in model.named_parameters():
        if flags.get(name, value.requires_grad) != value.requires_grad:
            value.requires_grad_(flags[name])


def _of_modules(model: nn.Module) -> dict[str, Values]:
    """Encoded attributes by module. Modules that cache tensors outside of state_dict() are left out: the cache is empty after a resume, so
    what counts its entries must start over too."""
    return {
        path: _encoded(module, _module_attributes())
        for path, module in model.named_modules()
        if not module._non_persistent_buffers_set
    }


def _of_optimizers(run: Run) -> list[Values]:
    return [_encoded(each, _optimizer_attributes()) for each in run.optimizers]


@cache
def _module_attributes() -> frozenset[str]:
    """Those that torch gives every module."""
    return frozenset(vars(nn.Module()))


@cache
def _optimizer_attributes() -> frozenset[str]:
    """Those that torch gives every optimizer; schedules add two."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"_opt_called", "_step_count"}


def _encoded(owner: Any, torchs: frozenset[str]) -> Values:
    """Attributes that are kept, for JSON; none of an owner that caches tensors."""
    own = {
        name: value for name, value in vars(owner).items() if name not in torchs and not isinstance(value, nn.Module)
    }
    if tensors(own):
        return {}
    found = {}
    for name, value in own.items():
        if isinstance(value, _KEPT) and (not isinstance(value, Sized) or len(value) <= _SMALL):
            with contextlib.suppress(Unstorable):
                found[name] = encode(value, name, _refuse)
    return found


def _refuse(path: str, value: Tensor) -> Any:
    raise Unstorable(path, "a tensor")
