"""Give each trial run its own copy of everything that a job's functions can reach and change, so that runs do not disturb each other.

The job's module and callable objects (a loss that is a module) are deep copies. Values in closures, defaults, globals that the functions
mention, and attributes of functions and classes are copies that are rebound while the run is active. All copies share one memo, so that a
captured parameter is the run's own parameter. While a run is active, the user's module shares its attributes with the run's copy, so that
code that reaches it in another way (a hook, another file) sees the run's values.
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
from echelon.trials import reachable
from echelon.trials.deep_copies import copy_module, deep_copy
from echelon.trials.iterator_replay import ReplayableIterator
from echelon.trials.module_tree import is_torchscript
from echelon.trials.shape_model import register_copies
from echelon.trials.snapshot import Snapshot, find_reachable_replayable
from echelon.trials.torch_patches import TorchPatches

#: Bytes from which on a tensor that no model owns is shared: it is data, and data is read.
_MIN_SHARED_BYTES = 2**26
_FUNCTION_FIELDS = ("loss", "inputs", "collate", "optimizer", "lr_schedule")
_CONTAINER_TYPES = (list, dict, set, tuple, deque, *reachable.BYTE_BUFFER_TYPES, *reachable.RECORD_TYPES)
_STATE_TYPES = (nn.Module, Tensor, np.ndarray, ReplayableIterator, *reachable.GENERATOR_TYPES, *_CONTAINER_TYPES)


class IsolatedJob:
    """A job for one run. `job` is to be used only while the run is `active`."""

    def __init__(
        self, job: Job, dtype: torch.dtype | None = None, pristine_model: nn.Module | None = None,
        shared_model: nn.Module | None = None,
    ) -> None:  # fmt: skip
        """`dtype`: of the floating tensors that the loss and other functions captured (class weights), as the model is cast. `pristine_model`: a
        copy of the job's module from before a run cut or sharded it. `shared_model`: a live model that stays shared: only the functions are
        copied."""
        memo = _memo_sharing_data(job)
        if shared_model is not None:
            parts = (*shared_model.modules(), *shared_model.parameters(), *shared_model.buffers())
            memo |= {id(part): part for part in parts}
        self._original_model = job.model if isinstance(job.model, nn.Module) and shared_model is None else None
        self._model_copy: nn.Module | None = None
        own_ids: Set[int] = frozenset()
        if self._original_model is not None:
            copied = self._model_copy = copy_module(pristine_model or self._original_model, memo)
            if pristine_model is not None:
                memo |= _map_counterparts(self._original_model, copied)
            own_ids = frozenset(map(id, [*copied.modules(), *copied.parameters()]))
        dtypes = [(slot, dtype if is_cast else None) for slot, is_cast in _find_job_slots(job)]
        self._slot_values = [(slot, _copy_state(slot.value, memo, cast, own_ids)) for slot, cast in dtypes]
        changes: dict[str, Any] = {}
        for name in _FUNCTION_FIELDS:
            if (function := getattr(job, name)) is not None:
                changes[name] = _copy_state(function, memo, None if name == "collate" else dtype, own_ids)
        changes["metrics"] = {name: _copy_state(value, memo, dtype, own_ids) for name, value in job.metrics.items()}
        if self._model_copy is not None:
            changes["model"] = self._model_copy
        elif not isinstance(job.model, type) and shared_model is None:
            model = _copy_state(job.model, memo, None)
            changes["model"] = (lambda: copy_module(model())) if self._reuses_parameters(job.model) else model
        self.job: Job = dataclasses.replace(job, **changes)
        register_copies(memo)
        self._active_depth = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, this run's values are in place."""
        self._active_depth += 1
        restore = self._swap_in_values() if self._active_depth == 1 else lambda: None
        try:
            yield
        finally:
            self._active_depth -= 1
            restore()

    def _swap_in_values(self) -> Callable[[], None]:
        saved_values = [(slot, slot.value) for slot, _ in self._slot_values]
        for slot, value in self._slot_values:
            slot.assign(value)
        shared_attributes = _share_attributes(self._original_model, self._model_copy)

        def restore() -> None:
            self._slot_values = [(slot, slot.value) for slot, _ in self._slot_values]  # a counter may have moved
            for slot, value in saved_values:
                slot.assign(value)
            for module, values in shared_attributes:
                object.__setattr__(module, "__dict__", values)

        return restore

    def _reuses_parameters(self, factory: Callable[[], nn.Module]) -> bool:
        """Whether a factory returns parameters that it neither makes nor visibly captured: in fake mode, those that it makes are fake."""
        if (cached := _REUSES_BY_FACTORY.get(factory)) is not None:
            return cached
        own_ids = {id(leaf) for _, value in self._slot_values for leaf in _find_tensors(value)}
        saved_slot_values, self._active_depth, patches = list(self._slot_values), 0, TorchPatches()
        with self.active():
            factory_state = Snapshot({"model": factory})
            try:
                with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
                    parameters = list(factory().parameters())
            except Exception:  # a constructor that looks at values
                parameters = []
            factory_state.restore()
        patches.restore()
        self._slot_values = saved_slot_values
        reuses = any(not isinstance(p, FakeTensor) and not p.is_meta and id(p) not in own_ids for p in parameters)
        with contextlib.suppress(TypeError):  # what weak references cannot point to is tried again
            _REUSES_BY_FACTORY[factory] = reuses
        return reuses


#: Factory -> whether it returns parameters of others.
_REUSES_BY_FACTORY: WeakKeyDictionary[Callable[[], nn.Module], bool] = WeakKeyDictionary()


def _memo_sharing_data(job: Job) -> dict[int, Any]:
    """A memo by which the data stays the user's own."""
    memo: dict[int, Any] = {}
    for data in (job.data, job.eval_data, job.warmup_data):
        if data is not None:
            attributes = list(vars(data).values()) if hasattr(data, "__dict__") else []
            leaves = [*attributes, *tree_leaves(attributes)]
            shared = [data, *(leaf for leaf in leaves if isinstance(leaf, Tensor | np.ndarray | Dataset))]
            memo |= {id(item): item for item in shared}
    return memo


def _map_counterparts(original: nn.Module, counterpart: nn.Module) -> dict[int, Any]:
    """A memo by which functions that captured parts of `original` get those of `counterpart`."""
    modules, parameters = dict(counterpart.named_modules()), dict(counterpart.named_parameters())
    memo: dict[int, Any] = {id(part): modules[path] for path, part in original.named_modules() if path in modules}
    return memo | {id(part): parameters[name] for name, part in original.named_parameters() if name in parameters}


def _share_attributes(original: nn.Module | None, copied: nn.Module | None) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Have every module of `original` share the attributes of its copy; returns what they were."""
    if original is None or copied is None or is_torchscript(original):
        return []
    pairs = [(a, b) for a, b in zip(original.modules(), copied.modules(), strict=False) if not is_torchscript(a)]
    original_attributes = [(own, vars(own)) for own, _ in pairs]
    for own, other in pairs:
        object.__setattr__(own, "__dict__", vars(other))
    return original_attributes


def _copy_state(value: Any, memo: dict[int, Any], dtype: torch.dtype | None, own_ids: Set[int] = frozenset()) -> Any:
    """A deep copy, or the value itself where it is not state or cannot be copied."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, (*reachable.PLAIN_TYPES, FunctionType, type, ModuleType)):
        return value
    if not isinstance(value, nn.Module):
        data = [t for t in _find_tensors(value) if not isinstance(t, nn.Parameter) and id(t) not in memo]
        dense = [item for item in data if isinstance(item, np.ndarray) or item.layout is torch.strided]
        if any(item.nbytes >= _MIN_SHARED_BYTES for item in dense):
            return value
    try:
        copied = deep_copy(value, memo)
    except Exception:  # a lock, a file, a tensor with a history
        return value
    if dtype is not None:
        copied = _cast_floating(copied, dtype, own_ids)
        memo[id(value)] = copied
    return copied


def _cast_floating(value: Any, dtype: torch.dtype, own_ids: Set[int]) -> Any:
    """Cast floating tensors, but for those of modules and parameters in `own_ids`: the model is cast as a whole."""
    if isinstance(value, nn.Parameter):
        if id(value) not in own_ids:
            value.data = _cast_tensor(value.data, dtype)  # in place: it stays what the optimizer trains
        return value
    if isinstance(value, Tensor):
        return _cast_tensor(value, dtype)
    if isinstance(value, nn.Module):
        for module in value.modules():
            if id(module) not in own_ids:
                module._apply(lambda tensor: _cast_tensor(tensor, dtype), recurse=False)
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_cast_floating(item, dtype, own_ids) for item in value)
    if type(value) is dict:
        return {key: _cast_floating(item, dtype, own_ids) for key, item in value.items()}
    if isinstance(value, MethodType):
        _cast_floating(value.__self__, dtype, own_ids)
        return value
    if isinstance(value, partial):
        args, kwargs = (_cast_floating(item, dtype, own_ids) for item in (value.args, value.keywords))
        return partial(value.func, *args, **kwargs)
    if reachable.is_user_defined(type(value)) and hasattr(value, "__dict__"):
        for name, item in vars(value).items():
            if isinstance(item, Tensor | nn.Module | list | tuple | dict):
                with contextlib.suppress(Exception):
                    object.__setattr__(value, name, _cast_floating(item, dtype, own_ids))
    return value


def _cast_tensor(value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.is_complex():
        return value.to(dtype.to_complex())
    return value.to(dtype) if value.is_floating_point() else value


def _find_tensors(value: Any) -> list[Any]:
    """Tensors and arrays in plain containers and, one level deep, in attributes."""
    leaves = tree_leaves(value)
    owners = [x for x in leaves if hasattr(x, "__dict__") and not isinstance(x, type | ModuleType | Tensor)]
    leaves += [item for owner in owners for item in vars(owner).values()]
    leaves += [item for leaf in leaves if isinstance(leaf, nn.Module) for item in leaf.parameters()]
    return [item for item in leaves if isinstance(item, Tensor | np.ndarray)]


def _find_job_slots(job: Job) -> list[tuple[reachable.Slot, bool]]:
    """The slots in which the job's functions keep values between calls, and whether these are part of the step and cast with the model."""
    slots: dict[tuple[int, str], tuple[reachable.Slot, bool]] = {}
    step_functions = {name: getattr(job, name) for name in _FUNCTION_FIELDS if name != "collate"}
    step_functions["metrics"] = dict(job.metrics)
    other_functions = {"collate": job.collate, "model": None if isinstance(job.model, nn.Module) else job.model}
    for is_cast, roots in ((True, step_functions), (False, other_functions)):
        for value in find_reachable_replayable(roots).values():
            if isinstance(value, FunctionType | type | Dataset):  # another object's slots are copied with it
                own = list(reachable.get_slots(value).values())
                if isinstance(value, FunctionType):
                    names = [name for name in ("__defaults__", "__kwdefaults__") if getattr(value, name)]
                    own += [reachable.Slot(value, name) for name in names]
                for slot in own:
                    if _is_state(slot.value):
                        slots.setdefault((id(slot.owner), slot.key), (slot, is_cast))
    return list(slots.values())


def _is_state(value: Any) -> bool:
    """Whether a run may change or rebind a value: not code, not a library's object."""
    if isinstance(value, FunctionType | type | ModuleType | Dataset):
        return False
    return isinstance(value, (*reachable.PLAIN_TYPES, *_STATE_TYPES)) or reachable.is_user_defined(type(value))
