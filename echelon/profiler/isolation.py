"""Give each trial run its own copy of everything that a job's functions can reach and change.

A loss may keep a running average, count its calls or read the job's own module (a penalty on weights); a factory may wrap a module that
was built before. Runs that share such objects disturb each other, and the user's objects must be left as they were. So each run has

    the job's module          a deep copy
    callable objects          deep copies: a loss that is a module or has attributes
    closures, defaults        values that functions captured, rebound while the run is active
    globals                   those that the job's functions mention, rebound while the run is active

All copies are made with one memo, so that a captured parameter is the run's own parameter. While a run is active the user's module also
shares its attributes with the run's copy, so that code that reaches it in another way (a hook, another file) sees the run's values.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from echelon.job import Job
from echelon.profiler.build import copy_module

#: Bytes from which on a tensor that no model owns is shared: it is data, and data is read.
_LARGE = 2**26
_FUNCTIONS = ("loss", "inputs", "collate", "optimizer", "schedule")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_STATEFUL = (nn.Module, Tensor, np.ndarray, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CONTAINERS = (list, dict, set, tuple, deque)


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A place that holds a value: a closure's cell, a function's defaults, or a global. `key`: the global's name."""

    holder: Any
    key: str = ""

    @property
    def value(self) -> Any:
        return self.holder[self.key] if isinstance(self.holder, dict) else getattr(self.holder, self.key)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


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
        mine = frozenset() if self._copy is None else frozenset(map(id, self._copy.modules()))
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
        kept, self._depth = list(self._values), 0
        try:
            with self.active(), FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
                made = list(factory().parameters())
        except Exception:  # a constructor that looks at values
            made = []
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
    if isinstance(value, (*_PLAIN, FunctionType, type, ModuleType)):
        return value
    if any(_bytes(each) >= _LARGE and id(each) not in memo for each in _tensors(value)) and not isinstance(
        value, nn.Module
    ):
        return value
    known = set(memo)
    try:
        made = copy.deepcopy(value, memo)
    except Exception:  # a lock, a file, a tensor with a history
        for key in set(memo) - known:
            del memo[key]
        return value
    if dtype is not None:
        made = _lifted(made, dtype, own)
        memo[id(value)] = made
    return made


def _lifted(value: Any, dtype: torch.dtype, own: Set[int]) -> Any:
    """With floating tensors in `dtype`, but for the modules `own`: the model is cast as a whole."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else _wide(value, dtype)
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
    if _is_user(type(value)) and hasattr(value, "__dict__"):
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


def held_values(job: Job, model: nn.Module) -> dict[str, Slot]:
    """Where the loss and `inputs` keep values between calls: attributes of objects, closures, defaults, globals. By names that are the
    same at every start; what belongs to `model` is left out."""
    found: dict[str, Slot] = {}
    models = [model, job.model] if isinstance(job.model, nn.Module) else [model]
    seen = {id(each) for one in models for each in (*one.modules(), *one.parameters(), *one.buffers())}
    models_own = set(seen)
    pending = [(name, getattr(job, name)) for name in ("loss", "inputs")]
    while pending:
        path, value = pending.pop()
        if id(value) in seen or (not isinstance(value, FunctionType | MethodType | partial) and not _is_object(value)):
            continue
        seen.add(id(value))
        for name, slot in _held_by(value, path):
            found.setdefault(name, slot)
            pending.append((name, slot.value))
        pending += [(f"{path}.{at}", each) for at, each in enumerate(_called(value))]
    kinds = (*_PLAIN, *_STATEFUL, *_CONTAINERS)
    return {
        name: slot
        for name, slot in found.items()
        if id(slot.value) not in models_own and isinstance(slot.value, kinds) and not isinstance(slot.value, nn.Module)
    }


def _is_object(value: Any) -> bool:
    """An object of the user's that may change, or a module of any kind but a compiled one."""
    if isinstance(value, torch.jit.ScriptModule):
        return False
    return isinstance(value, nn.Module) or (
        hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | Dataset) and _is_user(type(value))
    )


def _held_by(value: Any, path: str) -> list[tuple[str, Slot]]:
    """The named slots of one function or object."""
    if isinstance(value, FunctionType):
        if not _is_user(value):
            return []
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        found = [(f"{path}.{name}", Slot(cell, "cell_contents")) for name, cell in cells if _filled(cell)]
        names = [name for name in _names(value.__code__) if name in value.__globals__]
        found += [(f"{value.__module__}:{name}", Slot(value.__globals__, name)) for name in names]
        defaults = {str(at): each for at, each in enumerate(value.__defaults__ or ())} | (value.__kwdefaults__ or {})
        # Only what is changed in place: a default cannot be assigned to.
        held = {name: each for name, each in defaults.items() if not isinstance(each, _PLAIN)}
        return found + [(f"{path}({name})", Slot(held, name)) for name in held]
    if isinstance(value, nn.Module):
        mine: list[tuple[str, Slot]] = []
        for slots in (value._parameters, value._buffers, value._modules):
            mine += [(f"{path}.{name}", Slot(slots, name)) for name in slots]
        plain = vars(value).keys() - vars(nn.Module()).keys()
        return mine + [(f"{path}.{name}", Slot(vars(value), name)) for name in sorted(plain)]
    return (
        [(f"{path}.{name}", Slot(vars(value), name)) for name in getattr(value, "__dict__", ())]
        if _is_object(value)
        else []
    )


def _called(value: Any) -> list[Any]:
    """What a bound method or a partial calls; of an object its methods."""
    if isinstance(value, FunctionType):
        return []
    return [each for each in _reached(value) if not isinstance(each, type)] + [
        each for each in (_reached(type(value)) if _is_object(value) else ()) if isinstance(each, FunctionType)
    ]


def _bytes(value: Any) -> int:
    """Of a tensor or an array; torch counts those of dense tensors only."""
    return int(value.nbytes) if not isinstance(value, Tensor) or value.layout is torch.strided else 0


def _slots(job: Job) -> list[tuple[Slot, bool]]:
    """Where the job's functions keep values between calls, and whether these take part in the step and are cast with the model."""
    found: dict[tuple[int, str], tuple[Slot, bool]] = {}
    seen: set[int] = set()
    step: list[Any] = [job.loss, job.inputs, job.optimizer, job.schedule, *job.metrics.values()]
    made = [] if isinstance(job.model, nn.Module) else [job.model]
    for lifted, roots in ((True, step), (False, [job.collate, *made])):
        pending = [each for each in roots if each is not None]
        while pending:
            value = pending.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            for slot in _of(value):
                found.setdefault((id(slot.holder), slot.key), (slot, lifted))
            pending += _reached(value)
    return list(found.values())


def _of(value: Any) -> list[Slot]:
    """The slots of one function."""
    if not isinstance(value, FunctionType) or not _is_user(value):
        return []
    slots = [Slot(cell, "cell_contents") for cell in value.__closure__ or () if _filled(cell)]
    slots += [Slot(value, "__defaults__")] if value.__defaults__ else []
    slots += [Slot(value, "__kwdefaults__")] if value.__kwdefaults__ else []
    slots += [Slot(value.__globals__, name) for name in _names(value.__code__) if name in value.__globals__]
    return [slot for slot in slots if _is_state(slot.value)]


def _reached(value: Any) -> list[Any]:
    """The functions and objects that can be called from here."""
    if isinstance(value, FunctionType):
        if not _is_user(value):
            return []
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        named = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        return [*cells, *named, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, type):
        return [each for each in vars(value).values() if isinstance(each, FunctionType)] if _is_user(value) else []
    return [type(value)] if _is_user(type(value)) else []


def _names(code: CodeType) -> list[str]:
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return [*code.co_names, *inner]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_state(value: Any) -> bool:
    """Whether a value may be changed, or rebound, by a run: not code, not a library's object."""
    if isinstance(value, FunctionType | type | ModuleType | Dataset):
        return False
    return isinstance(value, (*_PLAIN, *_STATEFUL, *_CONTAINERS)) or _is_user(type(value))


def _is_user(value: Any) -> bool:
    """Whether a function or class is the user's: not torch's, Python's or this package's."""
    name = value.__module__ if isinstance(value.__module__, str) else ""
    if name.split(".")[0] in ("echelon", "builtins", "torch", "numpy"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or not any(Path(file).is_relative_to(each) for each in _LIBRARIES)


_LIBRARIES = tuple({sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")})
