"""What a job's functions reach: the functions, objects and containers that they use, and the slots in which these keep values.

    functions       closures, globals that they mention, defaults, attributes
    partials        the function and its arguments
    objects         attributes and methods; of a module also its parameters, buffers, submodules and hooks, of an optimizer its hooks
    classes         attributes and methods
    containers      their items; of instances of a user's class also attributes and methods

Only the user's own code is followed, not torch's, NumPy's or another library's, and Python's own records (`SimpleNamespace`).
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

from echelon.trials.iterator_replay import ReplayableIterator

#: Values without an identity: an equal one is as good.
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device)
GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: Bytes that change in place.
BYTE_BUFFER_TYPES = (bytearray, array)
_CONTAINER_TYPES = (OrderedDict, list, dict, set, tuple, deque)
_FOLLOWED_TYPES = (Tensor, np.ndarray, MethodType, partial, ReplayableIterator, *BYTE_BUFFER_TYPES, *GENERATOR_TYPES)
#: Python's own classes that hold attributes.
RECORD_TYPES = (SimpleNamespace, Namespace, UserDict, UserList, queue.Queue)
_DESCRIPTOR_TYPES = (staticmethod, classmethod, property)
#: Recurrent layers' caches of their own parameters, rebuilt whenever one is assigned.
_RNN_WEIGHT_CACHES = frozenset({"_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights"})
_HOOK_ATTRIBUTES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # fmt: skip
_GRADIENT_HOOK_ATTRIBUTES = ("_backward_hooks", "_post_accumulate_grad_hooks")
#: Items of longer containers are not followed: they are data.
_MAX_FOLLOWED_ITEMS = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """An entry of a dict, or an attribute."""

    owner: Any
    key: str

    @property
    def value(self) -> Any:
        return self.owner[self.key] if isinstance(self.owner, dict) else getattr(self.owner, self.key)

    def assign(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)

    def delete(self) -> None:
        if isinstance(self.owner, dict):
            self.owner.pop(self.key, None)
        else:
            delattr(self.owner, self.key)


def find_reachable(roots: Mapping[str, Any], *, excluded_ids: Collection[int] = ()) -> dict[str, Any]:
    """Everything with an identity that is reached from `roots`, by a name that is the same wherever the same code built the same objects."""
    reached: dict[str, Any] = {}
    seen_ids = set(excluded_ids)
    pending = list(roots.items())[::-1]
    while pending:
        name, value = pending.pop()
        if id(value) in seen_ids or not _is_followed(value):
            continue
        seen_ids.add(id(value))
        reached[name] = value
        pending += [(f"{name}{label}", reference) for label, reference in reversed(_list_references(value))]
    return reached


def find_unfollowed(nodes: Iterable[Any]) -> list[Any]:
    """The values, but for plain ones, that `nodes` reference and that are not followed."""
    items = [item for node in nodes for _, item in _list_references(node)]
    return [item for item in items if not isinstance(item, PLAIN_TYPES) and not _is_followed(item)]


def _is_followed(value: Any) -> bool:
    if isinstance(value, FunctionType | type):
        return is_user_defined(value)
    return isinstance(value, _FOLLOWED_TYPES) or is_container(value) or is_user_object(value)


def is_container(value: Any) -> bool:
    """Whether it is one of Python's containers or of a class derived from one (Counter, a user's list)."""
    return isinstance(value, _CONTAINER_TYPES) and not isinstance(value, torch.Size)


def get_builtin_base(container: Any) -> Any:
    """Python's own class that a container is derived from: its methods follow no rule of the user's."""
    return next(base for base in _CONTAINER_TYPES if isinstance(container, base))


def is_user_object(value: Any) -> bool:
    """Whether it is an object of the user's that may change, an optimizer, or a module of any kind but TorchScript's."""
    if isinstance(value, (ModuleType, torch.jit.ScriptModule, *_DESCRIPTOR_TYPES, type, FunctionType, MethodType)):
        return False
    if isinstance(value, (nn.Module, Optimizer, *RECORD_TYPES)):
        return True
    return is_user_defined(type(value)) and (hasattr(value, "__dict__") or bool(_list_slot_names(type(value))))


def _list_references(value: Any) -> list[tuple[str, Any]]:
    items = _list_items(value) if is_container(value) else []
    if is_container(value) and not is_user_object(value):
        return items
    if isinstance(value, MethodType):
        return [(".self", value.__self__), (".function", value.__func__)]
    if isinstance(value, partial):
        arguments = [*enumerate(value.args), *value.keywords.items()]
        return [(".function", value.func), *((f"({name})", item) for name, item in arguments)]
    slot_values = [(label, slot.value) for label, slot in get_slots(value).items()]
    if isinstance(value, FunctionType):
        defaults = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return slot_values + [(f"({name})", item) for name, item in defaults]
    if isinstance(value, type):
        return slot_values + [(f".{name}", item) for name, item in _list_methods(value)]
    if not is_user_object(value) or isinstance(value, Dataset):
        return slot_values
    return [*items, *slot_values, *_list_user_hooks(value), (".class", type(value))]


def _list_items(container: Any) -> list[tuple[str, Any]]:
    if len(container) > _MAX_FOLLOWED_ITEMS or isinstance(container, set):
        return []
    base = get_builtin_base(container)
    pairs = base.items(container) if isinstance(container, dict) else enumerate(base.__iter__(container))
    followed = [(key, item) for key, item in pairs if not isinstance(item, PLAIN_TYPES)]
    return [(f"[{key!r}]", item) for key, item in followed if isinstance(key, PLAIN_TYPES)]


def _list_user_hooks(value: Any) -> list[tuple[str, Any]]:
    """The user's functions that torch calls around a module, around a step of an optimizer, or for a parameter's gradient."""
    owners: list[tuple[str, Any, tuple[str, ...]]] = [("", value, _HOOK_ATTRIBUTES)]
    if isinstance(value, nn.Module):
        parameters = [(name, p) for name, p in value._parameters.items() if p is not None]
        owners += [(f".{name}", parameter, _GRADIENT_HOOK_ATTRIBUTES) for name, parameter in parameters]
    user_hooks = []
    for name, owner, attributes in owners:
        for attribute in attributes:
            hooks = filter(_is_user_hook, (getattr(owner, attribute, None) or {}).values())
            user_hooks += [(f"{name}.{attribute}[{index}]", hook) for index, hook in enumerate(hooks)]
    return user_hooks


def _is_user_hook(hook: Any) -> bool:
    code = hook.func if isinstance(hook, partial) else hook
    code = code.__func__ if isinstance(code, MethodType) else code
    return is_user_defined(code) if isinstance(code, FunctionType) else is_user_object(code)


def get_slots(value: Any) -> dict[str, Slot]:
    """The slots of a function, an object or a class that have a value, by label."""
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        slots = {f".{name}": Slot(cell, "cell_contents") for name, cell in cells if _has_cell_value(cell)}
        names = [name for name in _referenced_names(value.__code__) if name in value.__globals__]
        slots |= {f":{name}": Slot(value.__globals__, name) for name in names}
        return slots | {f".{name}": Slot(vars(value), name) for name in vars(value)}
    if isinstance(value, type):
        if issubclass(value, Enum | tuple):  # constants
            return {}
        items = [(name, item) for name, item in vars(value).items() if not name.startswith("__")]
        names = [name for name, item in items if not (isinstance(item, type) or hasattr(type(item), "__get__"))]
        return {f".{name}": Slot(value, name) for name in names}
    if not is_user_object(value):
        return {}
    slots = {}
    if isinstance(value, nn.Module):
        for registry in (value._parameters, value._buffers, value._modules):
            slots |= {f".{name}": Slot(registry, name) for name in registry}
    names, attributes = _list_attribute_names(value), getattr(value, "__dict__", {})
    return slots | {f".{name}": Slot(attributes if name in attributes else value, name) for name in names}


def _list_attribute_names(value: Any) -> list[str]:
    """The attributes of an object itself, also those in `__slots__`, but for what torch gives every module and optimizer."""
    if isinstance(value, Dataset):  # the rest is data
        attributes = [(name, item) for name, item in vars(value).items() if not isinstance(item, io.IOBase)]
        return [name for name, item in attributes if isinstance(item, (*PLAIN_TYPES, Iterator, Dataset))]
    hidden = frozenset[str]()
    if isinstance(value, nn.Module | Optimizer):
        hidden = _module_attributes() if isinstance(value, nn.Module) else _optimizer_attributes()
    if isinstance(value, nn.RNNBase):
        hidden |= _RNN_WEIGHT_CACHES
    names = [name for name in getattr(value, "__dict__", ()) if name not in hidden]
    return names + [name for name in _list_slot_names(type(value)) if hasattr(value, name)]


def _list_slot_names(value: type) -> list[str]:
    """What a class and its bases declare in `__slots__`."""
    declared = [vars(base).get("__slots__", ()) for base in value.__mro__]
    names = [name for item in declared for name in ([item] if isinstance(item, str) else item)]
    return [name for name in names if not name.startswith("__")]


def find_slot(value: Any, label: str) -> Slot | None:
    """The slot with this label, whether it has a value or not; None where there can be none."""
    if (slot := get_slots(value).get(label)) is not None:
        return slot
    name = label[1:]
    if isinstance(value, FunctionType):
        if label.startswith(":"):
            return Slot(value.__globals__, name)
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=False))
        return Slot(cells[name], "cell_contents") if name in cells else Slot(vars(value), name)
    if isinstance(value, type):
        return Slot(value, name)
    if is_user_object(value):
        return Slot(vars(value), name) if hasattr(value, "__dict__") else Slot(value, name)
    return None


def _list_methods(value: type) -> list[tuple[str, FunctionType]]:
    methods = []
    for base in (value, *value.__mro__[1:]):
        for name, attribute in vars(base).items() if is_user_defined(base) else ():
            function = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
            if isinstance(function, FunctionType):
                methods.append((name if base is value else f"{base.__qualname__}.{name}", function))
    return methods


def _referenced_names(code: CodeType) -> list[str]:
    """The names of globals and attributes that code mentions, with those of functions inside."""
    inner = [_referenced_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def _has_cell_value(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_user_defined(value: Any) -> bool:
    """Whether a function or class is the user's: not torch's, Python's or this package's."""
    name = value.__module__ if isinstance(value.__module__, str) else ""
    if name.split(".")[0] in ("echelon", "torch", "numpy", *sys.stdlib_module_names):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or _is_own_file(file)


@cache
def _is_own_file(file: str) -> bool:
    return not any(Path(file).is_relative_to(folder) for folder in _LIBRARY_FOLDERS)


@cache
def _module_attributes() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


@cache
def _optimizer_attributes() -> frozenset[str]:
    """What torch gives every optimizer; schedules add three."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"_opt_called", "_step_count", "step"}


_LIBRARY_FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
