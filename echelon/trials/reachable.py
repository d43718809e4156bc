"""What a job's functions reach: the functions, objects and containers that they use, and the places in which these keep values.

    functions       closures, globals that they mention, defaults, attributes
    partials        the function and its arguments
    objects         attributes and methods; of a module also its parameters, buffers, submodules and hooks, of an optimizer its hooks
    classes         attributes and methods
    containers      their items; of one of a user's class also attributes and methods

Only the user's own code is followed, not torch's, NumPy's or another library's, and records of Python's own (`SimpleNamespace`).
"""

from __future__ import annotations

import dataclasses
import io
import queue
import random
import sys
import sysconfig
from argparse import Namespace
from array import array
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from echelon.trials.iterator_replay import Replay

#: Values without an identity: an equal one is as good.
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: Bytes that change in place.
BUFFERS = (bytearray, array)
_CONTAINERS = (OrderedDict, list, dict, set, tuple, deque)
#: Classes of Python's own that hold attributes.
RECORDS = (SimpleNamespace, Namespace, UserDict, UserList, queue.Queue)
_DESCRIPTORS = (staticmethod, classmethod, property)
#: What recurrent layers keep of their own parameters, made again whenever one is assigned.
_OF_RECURRENT = frozenset({"_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights"})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # fmt: skip
_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
#: Items of longer containers are not followed: they are data.
_LONG = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A place that holds a value: an entry of a dict, or an attribute."""

    holder: Any
    key: str

    @property
    def value(self) -> Any:
        return self.holder[self.key] if isinstance(self.holder, dict) else getattr(self.holder, self.key)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)

    def clear(self) -> None:
        """Leave it without a value."""
        if isinstance(self.holder, dict):
            self.holder.pop(self.key, None)
        else:
            delattr(self.holder, self.key)


def reachable(roots: Mapping[str, Any], *, without: Collection[int] = ()) -> dict[str, Any]:
    """By name everything with an identity that is reached from `roots`, but objects whose id is in `without`. Names are the same wherever the
    same code built the same objects."""
    found: dict[str, Any] = {}
    seen = set(without)
    pending = list(roots.items())[::-1]
    while pending:
        name, value = pending.pop()
        if id(value) in seen or not _is_followed(value):
            continue
        seen.add(id(value))
        found[name] = value
        pending += [(f"{name}{label}", each) for label, each in reversed(_next(value))]
    return found


def leaves(nodes: Iterable[Any]) -> list[Any]:
    """What reachable things lead to and is not followed, but plain values."""
    found = [each for node in nodes for _, each in _next(node)]
    return [each for each in found if not isinstance(each, PLAIN) and not _is_followed(each)]


def _is_followed(value: Any) -> bool:
    if isinstance(value, FunctionType | type):
        return is_user(value)
    if isinstance(value, (Tensor, np.ndarray, MethodType, partial, Replay, *BUFFERS, *GENERATORS)):
        return True
    return is_container(value) or is_object(value)


def is_container(value: Any) -> bool:
    """Whether it holds items that are followed; also of a class derived from Python's own (Counter, a list of the user's)."""
    return isinstance(value, _CONTAINERS) and not isinstance(value, torch.Size)


def base_of(container: Any) -> Any:
    """Python's own class that a container is derived from: its methods go by no rule of the user's."""
    return next(each for each in _CONTAINERS if isinstance(container, each))


def is_object(value: Any) -> bool:
    """Whether it is an object of the user's that may change, or an optimizer or a module of any kind but a compiled one."""
    if isinstance(value, (ModuleType, torch.jit.ScriptModule, *_DESCRIPTORS, type, FunctionType, MethodType)):
        return False
    return isinstance(value, (nn.Module, Optimizer, *RECORDS)) or (
        is_user(type(value)) and (hasattr(value, "__dict__") or any(map(_fixed, type(value).__mro__)))
    )


def _next(value: Any) -> list[tuple[str, Any]]:
    """What one thing leads to, by labels."""
    items = _items(value) if is_container(value) else []
    if is_container(value) and not is_object(value):
        return items
    if isinstance(value, MethodType):
        return [(".self", value.__self__), (".function", value.__func__)]
    if isinstance(value, partial):
        given = [*enumerate(value.args), *value.keywords.items()]
        return [(".function", value.func), *((f"({name})", each) for name, each in given)]
    held = [(label, slot.value) for label, slot in slots_of(value).items()]
    if isinstance(value, FunctionType):
        defaults = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return held + [(f"({name})", each) for name, each in defaults]
    if isinstance(value, type):
        return held + [(f".{name}", each) for name, each in methods_of(value)]
    if not is_object(value) or isinstance(value, Dataset):
        return held
    return [*items, *held, *_hooks(value), (".class", type(value))]


def _items(container: Any) -> list[tuple[str, Any]]:
    if len(container) > _LONG or isinstance(container, set):
        return []
    base = base_of(container)
    pairs = base.items(container) if isinstance(container, dict) else enumerate(base.__iter__(container))
    return [(f"[{key!r}]", each) for key, each in pairs if isinstance(key, PLAIN) and not isinstance(each, PLAIN)]


def _hooks(value: Any) -> list[tuple[str, Any]]:
    """Functions of the user's that torch calls around a module, around a step of an optimizer, or for a parameter's gradient."""
    owners: list[tuple[str, Any, tuple[str, ...]]] = [("", value, _HOOKS)]
    if isinstance(value, nn.Module):
        owners += [(f".{name}", each, _GRADIENT_HOOKS) for name, each in value._parameters.items() if each is not None]
    found = []
    for name, owner, kinds in owners:
        for kind in kinds:
            hooks = [each for each in (getattr(owner, kind, None) or {}).values() if _is_users(each)]
            found += [(f"{name}.{kind}[{place}]", each) for place, each in enumerate(hooks)]
    return found


def _is_users(hook: Any) -> bool:
    code = hook.func if isinstance(hook, partial) else hook
    code = code.__func__ if isinstance(code, MethodType) else code
    return is_user(code) if isinstance(code, FunctionType) else is_object(code)


def slots_of(value: Any) -> dict[str, Slot]:
    """The places of a function, an object or a class that can be assigned to, those with a value, by label."""
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        found = {f".{name}": Slot(cell, "cell_contents") for name, cell in cells if is_filled(cell)}
        globals_ = {f":{name}": Slot(value.__globals__, name) for name in names(value.__code__)}
        found |= {label: slot for label, slot in globals_.items() if slot.key in value.__globals__}
        return found | {f".{name}": Slot(vars(value), name) for name in vars(value)}
    if isinstance(value, type):
        if issubclass(value, Enum | tuple):  # constants
            return {}
        plain = [name for name, each in vars(value).items() if not name.startswith("__") and not _is_code(each)]
        return {f".{name}": Slot(value, name) for name in plain}
    if not is_object(value):
        return {}
    found = {}
    if isinstance(value, nn.Module):
        for held in (value._parameters, value._buffers, value._modules):
            found |= {f".{name}": Slot(held, name) for name in held}
    return found | {f".{name}": _attribute(value, name) for name in _names_held(value)}


def _names_held(value: Any) -> list[str]:
    """The attributes of an object itself, also those in `__slots__`; not what torch gives every module and optimizer, nor lists of a module's parameters."""
    hidden = frozenset[str]()
    if isinstance(value, nn.Module | Optimizer):
        hidden = _module_attributes() if isinstance(value, nn.Module) else _optimizer_attributes()
    if isinstance(value, nn.RNNBase):
        hidden |= _OF_RECURRENT
    fixed = [name for each in type(value).__mro__ for name in _fixed(each) if hasattr(value, name)]
    if isinstance(value, Dataset):  # the rest is data
        held = [(name, each) for name, each in vars(value).items() if not isinstance(each, io.IOBase)]
        return [name for name, each in held if isinstance(each, (*PLAIN, Iterator, Dataset))]
    return [*(name for name in getattr(value, "__dict__", ()) if name not in hidden), *fixed]


def _fixed(value: type) -> list[str]:
    """What a class declares in `__slots__`."""
    declared = vars(value).get("__slots__", ())
    every = [declared] if isinstance(declared, str) else list(declared)
    return [name for name in every if not name.startswith("__")]


def _attribute(value: Any, name: str) -> Slot:
    return Slot(vars(value), name) if name in getattr(value, "__dict__", ()) else Slot(value, name)


def slot_at(value: Any, label: str) -> Slot | None:
    """The place with this label, whether it has a value or not; None where there can be none."""
    if (known := slots_of(value).get(label)) is not None:
        return known
    name = label[1:]
    if isinstance(value, FunctionType):
        if label.startswith(":"):
            return Slot(value.__globals__, name)
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=False))
        return Slot(cells[name], "cell_contents") if name in cells else Slot(vars(value), name)
    if isinstance(value, type):
        return Slot(value, name)
    if is_object(value):
        return Slot(vars(value), name) if hasattr(value, "__dict__") else Slot(value, name)
    return None


def methods_of(value: type) -> list[tuple[str, FunctionType]]:
    """The functions that a class defines, with those of its base classes."""
    found = []
    for each in (value, *value.__mro__[1:]):
        for name, held in vars(each).items() if is_user(each) else ():
            code = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
            if isinstance(code, FunctionType):
                found.append((name if each is value else f"{each.__qualname__}.{name}", code))
    return found


def _is_code(value: Any) -> bool:
    return isinstance(value, (FunctionType, type, *_DESCRIPTORS)) or hasattr(type(value), "__get__")


def names(code: CodeType) -> list[str]:
    """The names of globals and attributes that code mentions, with those of functions inside."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in names(each)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def is_filled(cell: Any) -> bool:
    """Whether a closure's variable has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_user(value: Any) -> bool:
    """Whether a function or class is the user's: not torch's, Python's or this package's."""
    return _is_user_module(value.__module__ if isinstance(value.__module__, str) else "")


def _is_user_module(name: str) -> bool:
    if name.split(".")[0] in ("echelon", "torch", "numpy", *sys.stdlib_module_names):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or _is_own_file(file)


@cache
def _is_own_file(file: str) -> bool:
    return not any(Path(file).is_relative_to(each) for each in _LIBRARIES)


@cache
def _module_attributes() -> frozenset[str]:
    """Those that torch gives every module."""
    return frozenset(vars(nn.Module()))


@cache
def _optimizer_attributes() -> frozenset[str]:
    """Those that torch gives every optimizer; schedules add three."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"_opt_called", "_step_count", "step"}


_LIBRARIES = tuple({sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")})
