"""What a run keeps besides `state_dict()`: what modules and the loss hold in attributes, closures and globals (held_state.py), counters and
generators of optimizers, and which parameters forward froze or unfroze.

A checkpoint holds what changed since the job was made, and a resumed run gets it back.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence, Sized
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.engine.function_state import FunctionState
from echelon.engine.held_state import Changes, HeldState
from echelon.engine.stored import Stored
from echelon.engine.values import Unstorable, decode, encode, from_inline, tensor_refs
from echelon.profiler.snapshot import Snapshot
from echelon.tree import tensors

if TYPE_CHECKING:
    from echelon.engine.run import Run

Values = Mapping[str, Any]
#: Types of attributes that are kept; containers if they hold nothing else and are small.
_KEPT = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.Generator, list, tuple, dict, set, deque)
_SMALL = 1000


class ModelState(HeldState):
    """Saves and restores what the modules of a model keep besides parameters and persistent buffers."""

    largest = 2**26  # a cache of activations is not worth it

    def __init__(self, model: nn.Module) -> None:
        super().__init__({"model": model}, without=_saved(model), registered={id(each) for each in model.modules()})


def model_snapshot(model: nn.Module) -> Snapshot:
    """What the modules keep besides parameters and persistent buffers."""
    return Snapshot({"model": model}, without=_saved(model))


def _saved(model: nn.Module) -> set[int]:
    """The ids of what `state_dict()` returns."""
    buffers = (
        value
        for module in model.modules()
        for name, value in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    )
    return {id(value) for value in (*model.parameters(), *buffers)}


class Attributes:
    """Saves and restores what one run keeps so."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._optimizers, self._trainable = _of_optimizers(run), trainable(run.model)
        self.model = ModelState(run.model)
        #: What the loss and `inputs` keep.
        self.functions = FunctionState(run.job, run.model, trained=run.loss_parameters.values())
        #: What `collate` keeps: it runs ahead of the steps, so that nobody can say what belongs to one.
        self._collation = HeldState({"collate": run.job.collate}, without=())
        self._lost: set[str] = set()

    def switched(self) -> dict[str, bool]:
        """Parameters that were frozen (False) or unfrozen (True) since the start, as far as this rank has them."""
        return _changed(trainable(self._run.model), self._trainable)

    def collect(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What changed since the start, of all stages, for JSON, and the tensors in it that this rank is to write. Every rank must call it."""
        run, tensors = self._run, dict[str, Tensor]()

        def put(path: str, value: Tensor) -> Any:
            tensors[path] = value
            return [path, value.device.type]

        speaks = not run.axes["dp"].rank and not run.axes["tp"].rank
        changed = run.ranks.gather(self.model.changed() if speaks else [])
        # Of stages that changed the same object the first one stores it.
        mine = [name for name in changed[run.ranks.rank] if not any(name in each for each in changed[: run.ranks.rank])]
        model, lost = self.model.changes(put, mine)
        functions, also_lost = (None, []) if run.data.rank or not run.tells else self.functions.changes(put)
        ahead = [f"{name}: collate= changes it while samples are read" for name in self._collation.changed_places()]
        self._warn([*lost, *also_lost, *ahead])
        optimizers = [_changed(*each) for each in zip(_of_optimizers(run), self._optimizers, strict=True)]
        everyone = run.ranks.gather((model, optimizers, self.switched(), functions))
        return {
            "model": {name: labels for each, *_ in everyone for name, labels in each.items()},
            "optimizers": everyone[0][1],
            "trainable": {name: flag for _, _, theirs, _ in everyone for name, flag in theirs.items()},
            "functions": next(each for *_, each in everyone if each is not None),
        }, tensors

    def of_model(self) -> tuple[Changes, list[str]]:
        """What the modules of all stages keep and changed since the start, with tensors as they are; and what of it cannot be copied. Every rank
        must call it."""
        run = self._run
        speaks = not run.axes["dp"].rank and not run.axes["tp"].rank
        mine = self.model.changes(lambda _, value: value.cpu()) if speaks else ({}, [])
        found: Changes = {}
        lost: list[str] = []
        for theirs, names in run.ranks.gather(mine):
            found = theirs | found
            lost += names
        return found, lost

    def _warn(self, lost: Sequence[str]) -> None:
        for why in lost:
            name = why.partition(":")[0]
            if name not in self._lost:
                self._lost.add(name)
                self._run.warn(f"{why}: checkpoints do not hold it, so that a resumed run has its first value again")

    def rooms(self, stored: Stored) -> dict[str, Tensor]:
        """Tensors to be filled from a checkpoint before `restore`."""
        self._rooms = {}
        attributes = stored.manifest.get("attributes") or {}
        for path, device in tensor_refs([attributes.get("model", {}), attributes.get("functions", {})]):
            entry = stored.entries[f"held/{path}"]
            where = torch.device("cpu") if device == "cpu" else self._run.device
            self._rooms[path] = torch.empty(entry.shape, dtype=entry.dtype, device=where)
        return self._rooms

    def restore(self, stored: Mapping[str, Any] | None) -> None:
        """Give back what `collect` returned; None: the checkpoint is from before attributes were kept."""
        if stored is None:
            return
        run = self._run
        set_trainable(run.model, self._trainable | stored.get("trainable", {}))
        for optimizer, values in zip(run.optimizers, stored["optimizers"], strict=True):
            _restore_attributes(optimizer, values)
        for held, changes in ((self.model, stored.get("model", {})), (self.functions, stored.get("functions", {}))):
            for name in held.restore(changes, lambda ref: self._rooms[ref[0]]):
                run.warn(
                    f"{name}: the checkpoint holds a value for it, and this job has no place for it; it is left out"
                )


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


def _of_optimizers(run: Run) -> list[Values]:
    return [_encoded(each, _optimizer_attributes()) for each in run.optimizers]


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
