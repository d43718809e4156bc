"""Give each trial run its own copy of everything that a job's functions can reach and change.

A loss may keep a running average, count its calls or read the job's own module (a penalty on weights); a factory may wrap a module that
was built before. Runs that share such objects disturb each other, and the user's objects must be left as they were. So each run has

    the job's module          a deep copy
    callable objects          deep copies: a loss that is a module or has attributes
    closures, defaults        values that functions captured, rebound while the run is active
    globals                   those that the job's functions mention, rebound while the run is active
    attributes                of functions and classes, rebound while the run is active

All copies are made with one memo, so that a captured parameter is the run's own parameter. While a run is active the user's module also
shares its attributes with the run's copy, so that code that reaches it in another way (a hook, another file) sees the run's values.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Set
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from echelon.job import Job
from echelon.trials.deep_copies import copy_module, deep_copy
from echelon.trials.iterator_replay import Replay
from echelon.trials.reachable import BUFFERS, GENERATORS, PLAIN, RECORDS, Slot, is_user, slots_of
from echelon.trials.shape_model import note_copies
from echelon.trials.snapshot import Snapshot, reached
from echelon.trials.torch_patches import Patches

#: Bytes from which on a tensor that no model owns is shared: it is data, and data is read.
_LARGE = 2**26
_FUNCTIONS = ("loss", "inputs", "collate", "optimizer", "schedule")
_STATEFUL = (nn.Module, Tensor, np.ndarray, *GENERATORS, list, dict, set, tuple, deque, *BUFFERS, *RECORDS, Replay)


class Isolated:
    """A job for one run. `job` is to be used only while the run is `active`."""

    def __init__(
        self,
        job: Job,
        dtype: torch.dtype | None = None,
        pristine: nn.Module | None = None,
        keep: nn.Module | None = None,
    ) -> None:
        """`dtype`: floating tensors that the loss and its kin captured (class weights) are cast to it, as the model is. `pristine`: a
        copy of the job's module from before a run cut or sharded it. `keep`: a live model that stays shared: of the job only the
        functions get copies of their own."""
        memo = _shared(job)
        if keep is not None:
            memo |= {id(each): each for each in (*keep.modules(), *keep.parameters(), *keep.buffers())}
        self._original = job.model if isinstance(job.model, nn.Module) and keep is None else None
        self._copy = None if self._original is None else copy_module(pristine or self._original, memo)
        if pristine is not None and self._original is not None and self._copy is not None:
            memo |= _counterparts(self._original, self._copy)
        own = [] if self._copy is None else [*self._copy.modules(), *self._copy.parameters()]
        mine = frozenset(map(id, own))
        self._values = [
            (slot, _copied(slot.value, memo, dtype if lifted else None, mine)) for slot, lifted in _slots(job)
        ]
        given = {name: getattr(job, name) for name in _FUNCTIONS if getattr(job, name) is not None}
        changes: dict[str, Any] = {
            name: _copied(value, memo, dtype if name != "collate" else None, mine) for name, value in given.items()
        }
        changes["metrics"] = {name: _copied(value, memo, dtype, mine) for name, value in job.metrics.items()}
        if self._copy is not None:
            changes["model"] = self._copy
        elif not isinstance(job.model, type) and keep is None:
            model = _copied(job.model, memo, None)
            changes["model"] = partial(_deep, model) if self._reuses(job.model) else model
        self.job: Job = dataclasses.replace(job, **changes)
        note_copies(memo)
        self._depth = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """This run's values are in place."""
        self._depth += 1
        restore = self._swap() if self._depth == 1 else lambda: None
        try:
            yield
        finally:
            self._depth -= 1
            restore()

    def _swap(self) -> Callable[[], None]:
        before = [(slot, slot.value) for slot, _ in self._values]
        for slot, value in self._values:
            slot.put(value)
        attributes = _share_attributes(self._original, self._copy)

        def restore() -> None:
            self._values = [(slot, slot.value) for slot, _ in self._values]  # a counter has moved on
            for slot, value in before:
                slot.put(value)
            for module, values in attributes:
                object.__setattr__(module, "__dict__", values)

        return restore

    def _reuses(self, factory: Callable[[], nn.Module]) -> bool:
        """Whether a factory hands out parameters that it neither makes nor visibly captured: under fake tensors those that it makes are
        fake."""
        if (known := _REUSES.get(factory)) is not None:
            return known
        own = {id(leaf) for _, value in self._values for leaf in _tensors(value)}
        kept, self._depth, patches = list(self._values), 0, Patches()
        with self.active():
            held = Snapshot({"model": factory})
            try:
                with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
                    made = list(factory().parameters())
            except Exception:  # a constructor that looks at values
                made = []
            held.put_back()
        patches.put_back()
        self._values = kept
        found = any(not isinstance(each, FakeTensor) and not each.is_meta and id(each) not in own for each in made)
        with contextlib.suppress(TypeError):  # what weak references cannot point to is tried again
            _REUSES[factory] = found
        return found


#: Factory -> whether it hands out parameters of others.
_REUSES: WeakKeyDictionary[Callable[[], nn.Module], bool] = WeakKeyDictionary()


def _deep(factory: Callable[[], nn.Module]) -> nn.Module:
    return copy_module(factory())


def _shared(job: Job) -> dict[int, Any]:
    """A memo by which the data stays the user's own."""
    memo: dict[int, Any] = {}
    for data in (job.data, job.evaluation, job.warmup_data):
        if data is not None:
            memo[id(data)] = data
            held = list(vars(data).values()) if hasattr(data, "__dict__") else []
            memo.update(
                {
                    id(each): each
                    for each in [*held, *tree_leaves(held)]
                    if isinstance(each, Tensor | np.ndarray | Dataset)
                }
            )
    return memo


def _counterparts(original: nn.Module, other: nn.Module) -> dict[int, Any]:
    """A memo by which functions that captured parts of one module get those of the other."""
    modules, parameters = dict(other.named_modules()), dict(other.named_parameters())
    memo: dict[int, Any] = {id(mine): modules[path] for path, mine in original.named_modules() if path in modules}
    return memo | {id(mine): parameters[name] for name, mine in original.named_parameters() if name in parameters}


def _share_attributes(original: nn.Module | None, other: nn.Module | None) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Have every module of `original` share the attributes of its counterpart; returns what they were."""
    if original is None or other is None or isinstance(original, torch.jit.ScriptModule):
        return []
    pairs = zip(original.modules(), other.modules(), strict=False)
    both = [(mine, theirs) for mine, theirs in pairs if not isinstance(mine, torch.jit.ScriptModule)]
    before = [(mine, vars(mine)) for mine, _ in both]
    for mine, theirs in both:
        object.__setattr__(mine, "__dict__", vars(theirs))
    return before


def _copied(value: Any, memo: dict[int, Any], dtype: torch.dtype | None, own: Set[int] = frozenset()) -> Any:
    """A deep copy, or the value itself where it is no state or cannot be copied."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, (*PLAIN, FunctionType, type, ModuleType)):
        return value
    large = [each for each in _tensors(value) if _bytes(each) >= _LARGE and not isinstance(each, nn.Parameter)]
    if any(id(each) not in memo for each in large) and not isinstance(value, nn.Module):
        return value
    try:
        made = deep_copy(value, memo)
    except Exception:  # a lock, a file, a tensor with a history
        return value
    if dtype is not None:
        made = _lifted(made, dtype, own)
        memo[id(value)] = made
    return made


def _lifted(value: Any, dtype: torch.dtype, own: Set[int]) -> Any:
    """With floating tensors in `dtype`, but for modules and parameters in `own`: the model is cast as a whole."""
    if isinstance(value, nn.Parameter):
        if id(value) not in own:
            value.data = _wide(value.data, dtype)  # in place: it stays what the optimizer trains
        return value
    if isinstance(value, Tensor):
        return _wide(value, dtype)
    if isinstance(value, nn.Module):
        for module in value.modules():
            if id(module) not in own:
                module._apply(lambda tensor: _wide(tensor, dtype), recurse=False)
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_lifted(each, dtype, own) for each in value)
    if type(value) is dict:
        return {key: _lifted(each, dtype, own) for key, each in value.items()}
    if isinstance(value, MethodType):
        _lifted(value.__self__, dtype, own)
        return value
    if isinstance(value, partial):
        return partial(value.func, *_lifted(value.args, dtype, own), **_lifted(value.keywords, dtype, own))
    if is_user(type(value)) and hasattr(value, "__dict__"):
        for name, each in vars(value).items():
            if isinstance(each, Tensor | nn.Module | list | tuple | dict):
                with contextlib.suppress(Exception):
                    object.__setattr__(value, name, _lifted(each, dtype, own))
    return value


def _wide(value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.is_complex():
        return value.to(dtype.to_complex())
    return value.to(dtype) if value.is_floating_point() else value


def _tensors(value: Any) -> list[Any]:
    """Tensors and arrays in plain containers and, one level deep, in attributes."""
    held = tree_leaves(value)
    held += [
        each
        for one in held
        if hasattr(one, "__dict__") and not isinstance(one, type | ModuleType | Tensor)
        for each in vars(one).values()
    ]
    held += [each for one in held if isinstance(one, nn.Module) for each in one.parameters()]
    return [each for each in held if isinstance(each, Tensor | np.ndarray)]


def _bytes(value: Any) -> int:
    """The bytes of a tensor or an array; 0 for sparse tensors, whose bytes torch does not count."""
    return int(value.nbytes) if not isinstance(value, Tensor) or value.layout is torch.strided else 0


def _slots(job: Job) -> list[tuple[Slot, bool]]:
    """Where the job's functions keep values between calls, and whether these take part in the step and are cast with the model."""
    found: dict[tuple[int, str], tuple[Slot, bool]] = {}
    step = {name: getattr(job, name) for name in _FUNCTIONS if name != "collate"} | {"metrics": dict(job.metrics)}
    rest = {"collate": job.collate, "model": None if isinstance(job.model, nn.Module) else job.model}
    for lifted, roots in ((True, step), (False, rest)):
        for value in reached(roots).values():
            for slot in _of(value):
                found.setdefault((id(slot.holder), slot.key), (slot, lifted))
    return list(found.values())


def _of(value: Any) -> list[Slot]:
    """The slots of one function, class or data set; another object's are copied with it."""
    slots = list(slots_of(value).values()) if isinstance(value, FunctionType | type | Dataset) else []
    if isinstance(value, FunctionType):
        slots += [Slot(value, name) for name in ("__defaults__", "__kwdefaults__") if getattr(value, name)]
    return [slot for slot in slots if _is_state(slot.value)]


def _is_state(value: Any) -> bool:
    """Whether a value may be changed, or rebound, by a run: not code, not a library's object."""
    if isinstance(value, FunctionType | type | ModuleType | Dataset):
        return False
    return isinstance(value, (*PLAIN, *_STATEFUL)) or is_user(type(value))
